"""Schedules of one arrangement, placed on a slab and timed.

A policy counts live bytes. Placed on a real slab they may need more: then the policy is asked again for that
much less, a few times. A schedule that is not quicker than the best there is stays unplaced, as placing takes
the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Profile, Program, Schedule, SubArray
from trainmux.planning._body import FixedBody, Infeasible, Policy, Task, plain_body
from trainmux.planning._draft import Draft, draft
from trainmux.planning._rewrite import place
from trainmux.runtime import no_collections

ROUNDING = 1e-9
"""Times that differ by less than this share differ by the rounding of sums alone."""
_TIGHTENINGS = (1, 1, 1, 2, 4)
"""On each retry, lower the policy's limit by this multiple of the slab's overshoot, and by a little more."""
_LITTLE_MORE = 1 / 400
"""The part of the limit by which it is lowered in addition: a small overshoot tends to come back."""


@dataclass(frozen=True)
class Arrangement:
    """Members in sub-arrays, one profile each, and how these share the device.

    ``scratch_bytes`` are reserved in addition to the slab for what nodes need while they run.
    """

    sub_arrays: tuple[tuple[str, ...], ...]
    profiles: tuple[Profile, ...]
    multiplexing: Multiplexing
    scratch_bytes: int = 0

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

    def task(self, limit_bytes: int, host_bytes: int) -> Task:
        """The problem of scheduling it within so many bytes."""
        return Task(self.profiles, self.multiplexing, limit_bytes, host_bytes)

    @property
    def body(self) -> FixedBody:
        """The nodes in plain order."""
        return plain_body(self.profiles, self.multiplexing)

    @property
    def plain_bytes(self) -> int:
        """The live bytes at the peak with nothing swapped and nothing recomputed."""
        return int(self.body.needed().max())

    @property
    def compute_seconds(self) -> float:
        """The time of the nodes alone, which no schedule goes below."""
        return float(self.body.starts[-1])


@dataclass(frozen=True)
class PlacedSchedule:
    """A schedule of an arrangement, placed and timed."""

    arrangement: Arrangement
    schedule: Schedule
    program: Program
    seconds: float

    @property
    def slab_bytes(self) -> int:
        return self.program.slab_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.slab_bytes + self.arrangement.scratch_bytes

    def is_better_than(self, other: PlacedSchedule | None) -> bool:
        """Whether it is quicker."""
        return other is None or self.seconds < other.seconds * (1 - ROUNDING)


def place_draft(arrangement: Arrangement, made: Draft, enough_bytes: int = 0) -> PlacedSchedule:
    """Find offsets; the search for a smaller slab ends at ``enough_bytes``."""
    program = place(arrangement.profiles, made, enough_bytes=enough_bytes)
    return PlacedSchedule(arrangement, made.schedule, program, made.seconds)


def place_schedule(arrangement: Arrangement, schedule: Schedule) -> PlacedSchedule:
    """A schedule on the smallest slab that is found."""
    return place_draft(arrangement, draft(arrangement.profiles, schedule))


def place_plainly(arrangement: Arrangement) -> PlacedSchedule:
    """The arrangement with nothing swapped and nothing recomputed."""
    return place_schedule(arrangement, arrangement.body.plain_schedule())


class ScheduleSearch:
    """A policy's schedules of one arrangement, one after another, to be placed within ``limit_bytes``.

    ``drawn`` is the last schedule, as long as it is not placed; ``seconds`` is the time of the quickest,
    ``lacking_bytes`` what the policy said it lacks. Python looks for no cycles meanwhile: a draft has 100,000
    objects, and looking through them took half of its time.
    """

    def __init__(self, arrangement: Arrangement, policy: Policy, limit_bytes: int, host_bytes: int) -> None:
        self.arrangement = arrangement
        self.limit_bytes = limit_bytes
        self.drawn: Draft | None = None
        self.seconds = float("inf")
        self.lacking_bytes = 0
        self.is_over = False
        self._policy = policy
        self._host_bytes = host_bytes
        self._tightened = limit_bytes
        self._retries = iter(_TIGHTENINGS)
        self._schedules = self._ask()

    @no_collections()
    def draw(self) -> None:
        """Take the policy's next schedule; it may have none for now, or be at its end."""
        self.drawn = self._next_draft()
        if self.drawn is not None:
            self.seconds = min(self.seconds, self.drawn.seconds)

    @no_collections()
    def place(self) -> PlacedSchedule | None:
        """Place what is drawn. Where it does not fit, the first schedule for a lower limit is drawn."""
        made, self.drawn = self.drawn, None
        assert made is not None
        try:
            found = place_draft(self.arrangement, made, self.limit_bytes)
        except PlanError:  # decisions that no prologue or epilogue can carry out
            return None
        if found.slab_bytes <= self.limit_bytes:
            return found
        times = next(self._retries, None)
        if times is None:
            self.is_over = True
        else:
            overshoot = found.slab_bytes - self.limit_bytes
            self._tightened -= times * overshoot + int(_LITTLE_MORE * self.limit_bytes)
            self._schedules = self._ask()
            self.draw()
        return None

    def first(self) -> PlacedSchedule | None:
        """The first schedule that can be placed, if there is one."""
        found = None
        while found is None and not self.is_over:
            if self.drawn is None:
                self.draw()
            else:
                found = self.place()
        return found

    def _ask(self) -> Iterator[Schedule | None]:
        return self._policy.schedules(self.arrangement.task(self._tightened, self._host_bytes))

    def _next_draft(self) -> Draft | None:
        try:
            schedule = next(self._schedules)
            return None if schedule is None else draft(self.arrangement.profiles, schedule)
        except StopIteration:
            self.is_over = True
            return None
        except Infeasible as reason:
            self.is_over = True
            self.lacking_bytes = reason.excess_bytes + self.limit_bytes - self._tightened
            return None
        except PlanError:  # decisions that no program can carry out
            return None
