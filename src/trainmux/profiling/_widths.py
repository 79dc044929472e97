"""Analytic profiles of one group's members at many widths, of which few are lowered.

The widest and the narrowest are lowered because they are asked for first. Members alone give other kernels
than members fused, so where a width lies between one member and many, two members are lowered as well. What
then lies between two widths of the same kernels is worked out (`_outline`), and everything else is lowered.
A plan over worked-out profiles must not leave before `confirmed` has lowered the widths that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainmux.ir import Profile
from trainmux.profiling._analytic import analytic_profile, profile_of_outline
from trainmux.profiling._devices import Device
from trainmux.profiling._kernels import KernelGraph
from trainmux.profiling._outline import Outline, outline_between, outline_of

_ALONE, _FUSED = 1, 2


class WidthProfiles:
    """Profiles by width, for ``device``; ``read`` lowers a width and reads its kernels."""

    def __init__(self, read: Callable[[int], KernelGraph], device: Device, *, half: bool) -> None:
        self._read = read
        self._device = device
        self._half = half
        self._outlines: dict[int, Outline] = {}
        self._profiles: dict[int, Profile] = {}

    @property
    def lowered(self) -> frozenset[int]:
        """The widths whose kernels were read."""
        return frozenset(self._outlines)

    def profile(self, width: int) -> Profile:
        """Worked out from two other widths where that can be, else from the kernels."""
        if width not in self._profiles:
            found = self._between(width)
            if found is None:
                return self.confirmed(width)
            outline, origin = found
            self._profiles[width] = profile_of_outline(outline, origin, width, self._device, half=self._half)
        return self._profiles[width]

    def confirmed(self, width: int) -> Profile:
        """From the kernels; equal to what was worked out but for its fingerprint, unless that was wrong."""
        if width not in self._outlines:
            graph = self._read(width)
            self._outlines[width] = outline_of(graph)
            self._profiles[width] = analytic_profile(graph, width, self._device, half=self._half)
        return self._profiles[width]

    def _between(self, width: int) -> tuple[Outline, str] | None:
        """The outline of a width by those around it, and of whose kernels it was made."""
        higher = min((known for known in self._outlines if known > width), default=None)
        if higher is None:
            return None
        if width > _FUSED and not any(_ALONE < known < width for known in self._outlines):
            self.confirmed(_FUSED)
        lower = max((known for known in self._outlines if known < width), default=None)
        if lower is None:
            return None
        outline = outline_between(self._outlines[lower], lower, self._outlines[higher], higher, width)
        if outline is None:
            return None
        ends = (self._profiles[lower].fingerprint, self._profiles[higher].fingerprint)
        return outline, f"between {lower} and {higher}: {ends}"


def same_but_for_origin(derived: Profile, lowered: Profile) -> bool:
    """Whether two profiles say the same of kernels that were found in different ways."""
    return replace(derived, fingerprint=lowered.fingerprint) == lowered
