"""Members in sub-arrays, and a schedule of such an arrangement, placed and timed."""

from __future__ import annotations

from dataclasses import dataclass

from trainmux.ir import Multiplexing, Profile, Program, Schedule, SubArray

ROUNDING = 1e-9
"""Times that differ by less than this share differ by the rounding of sums alone."""


@dataclass(frozen=True)
class Arrangement:
    """Members in sub-arrays, one profile each, and how these share the device.

    ``beside_bytes`` are reserved beside the slab for what nodes need while they run.
    """

    sub_arrays: tuple[tuple[str, ...], ...]
    profiles: tuple[Profile, ...]
    multiplexing: Multiplexing
    beside_bytes: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(len(members) for members in self.sub_arrays)

    @property
    def in_words(self) -> str:
        widths = "+".join(str(width) for width in self.widths[:8])
        more = f"+... ({len(self.widths)} sub-arrays)" if len(self.widths) > 8 else ""
        branches = " side by side" if self.num_branches > 1 else ""
        return f"{widths}{more}{branches} {self.multiplexing.value}"

    @property
    def num_branches(self) -> int:
        """On how many branches the members of each sub-array train; 1 where they are fused."""
        return self.profiles[0].num_branches

    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of the distinct profiles."""
        return tuple(dict.fromkeys(profile.fingerprint for profile in self.profiles))

    def partition(self) -> tuple[SubArray, ...]:
        """The sub-arrays as a plan names them."""
        known = self.fingerprints()
        return tuple(
            SubArray(members, known.index(profile.fingerprint))
            for members, profile in zip(self.sub_arrays, self.profiles, strict=True)
        )


@dataclass(frozen=True)
class Candidate:
    """A schedule of an arrangement, placed and timed.

    ``strained_seconds`` is what it takes where all copies are slower than predicted.
    """

    schedule: Schedule
    program: Program
    seconds: float
    strained_seconds: float

    @property
    def is_calm(self) -> bool:
        """Whether slower copies cost nothing."""
        return self.strained_seconds <= self.seconds * (1 + ROUNDING)

    def is_calmer_than(self, other: Candidate) -> bool:
        """Whether slower copies cost less here, of two that take the same with copies as predicted."""
        return self.strained_seconds < other.strained_seconds * (1 - ROUNDING)

    @property
    def slab_bytes(self) -> int:
        return self.program.slab_bytes
