"""Plans on disk: what was planned once is not planned again.

A plan is found by everything that decides it and is known before anything is fused: the members' graphs and
names, their updates, the fleet's settings, the device, the budget and what else was asked for, the versions
of torch and of this package's source. Nothing is taken that is damaged or that the verifier does not accept.
What was measured counts too: a plan over profiles that are no longer kept, or were measured anew, is stale.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmux.errors import TrainmuxError
from trainmux.fleet._group import Group
from trainmux.fleet._plan import Plan, plan_bytes
from trainmux.fleet._program_store import step_key
from trainmux.ir import Profile
from trainmux.profiling import ProfileCache, fingerprint_of_one, side_by_side
from trainmux.runtime import source_version, user_cache_folder

MAX_PLANS = 64
"""Plans that are kept; the least recently used go first."""

_VARIABLE = "TRAINMUX_PLAN_DIR"
_ENDING = ".plan.json"
_ROOMS = ("profiling", "planning")
"""Their source makes plans; what makes steps is in `step_key`."""


def plan_key(groups: Sequence[Group], *decisive: Any) -> str:
    """The key of a plan in the cache; ``decisive`` are further values that decide it."""
    digest = hashlib.sha256()
    for group in groups:
        shared = sorted(group.state.shared)
        key = replace(group.key, base=())  # has addresses
        facts = (group.variant(), key, group.stacked_batch, shared, group.width, group.config)
        digest.update(step_key(group.traced, facts, *decisive, source_version(*_ROOMS)).encode())
    return digest.hexdigest()


class PlanCache:
    """A folder of plans: ``TRAINMUX_PLAN_DIR``, else in the user's cache folder."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else user_cache_folder("plans", _VARIABLE)

    def get(self, key: str, profiles: ProfileCache) -> Plan | None:
        """The plan with this key, proved again; ``None`` where there is none that can be used.

        ``profiles`` are the measured ones that are kept: those of the plan must be among them.
        """
        path = self._path(key)
        try:
            plan = Plan.load(path)
            plan.program  # noqa: B018 - written and proved here, used later
        except TrainmuxError:
            return None
        if not all(_is_kept(profile, profiles) for profile in plan.profiles):
            return None
        with suppress(OSError):
            os.utime(path)
        return plan

    def put(self, key: str, plan: Plan) -> None:
        """Keep a plan. Where it cannot be written, the next start plans again."""
        with suppress(OSError, TrainmuxError):
            plan.save(self._path(key))
            kept = [(path.stat().st_mtime_ns, path) for path in self.folder.glob(f"*{_ENDING}")]
            for _, path in sorted(kept)[:-MAX_PLANS]:
                path.unlink(missing_ok=True)

    def forget(self, plan: Plan) -> None:
        """Remove a plan that has turned out to be stale, if it is kept."""
        with suppress(OSError):
            content = plan_bytes(plan)
            for path in self.folder.glob(f"*{_ENDING}"):
                if path.stat().st_size == len(content) and path.read_bytes() == content:
                    path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"


def _is_kept(profile: Profile, profiles: ProfileCache) -> bool:
    """Whether a profile is worked out, or kept as it was measured. Plans count workspaces elsewhere."""
    if profile.source == "analytic":
        return True
    kept = profiles.get(fingerprint_of_one(profile))
    if kept is None:
        return False
    planned = replace(kept, nodes=tuple(replace(node, workspace_bytes=0) for node in kept.nodes))
    return profile == side_by_side(planned, profile.num_branches, profile.width)
