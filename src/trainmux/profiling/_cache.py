"""Measured profiles on disk, by fingerprint of what was measured; a stale one is never taken."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from trainmux.errors import PlanError
from trainmux.ir import Profile, load, save
from trainmux.runtime import user_cache_folder

_VARIABLE = "TRAINMUX_PROFILE_DIR"


class ProfileCache:
    """A folder of profiles: ``TRAINMUX_PROFILE_DIR``, else in the user's cache folder."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else user_cache_folder("profiles", _VARIABLE)

    def get(self, fingerprint: str) -> Profile | None:
        """The profile with this fingerprint; ``None`` where there is none, or none that can be read."""
        try:
            profile = load(self._path(fingerprint), Profile)
        except PlanError:
            return None
        return profile if profile.fingerprint == fingerprint else None

    def put(self, profile: Profile) -> None:
        """Keep a profile. Where it cannot be written, the next start measures again."""
        with suppress(PlanError):
            save(self._path(profile.fingerprint), profile)

    def _path(self, fingerprint: str) -> Path:
        return self.folder / f"{fingerprint}.profile.json"
