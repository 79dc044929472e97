"""Plans that could be made, whatever the budget: the rungs of a ladder of limits.

For each arrangement of members there is a fixed row of limits, from the least that any decisions need to what
the arrangement needs with nothing decided, and what a policy makes of each does not depend on anybody's
budget. A budget chooses among rungs at or below it, so a larger one chooses among all that a smaller one had.
That is what makes predicted time never rise with the budget, whatever the greed or luck of a policy does; it
costs that rungs below the budget are worked on too, as far as a bound does not rule them out.

Few rungs would waste memory between them, many would cost time. So there are few, and steps between each two
of them. Steps serve only budgets between their own two rungs: those above never look at them. For this a step
counts only if it is not quicker than the rung above it, or than those below that. (Where a policy does better
with less memory, which happens, the better schedule is thus left out; a rung's own is never.)

What is placed on a real slab may need more than the sum of live bytes. Then the policy is asked again for
that much less, a few times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Profile, Program, Schedule, SubArray
from trainmux.rewrite import rewrite
from trainmux.scheduling._bound import least_seconds
from trainmux.scheduling._lift import schedule_sub_arrays
from trainmux.scheduling._policy import Infeasible, Task, plain_order
from trainmux.scheduling.policies import Auto, KnownPolicy
from trainmux.scheduling.policies._body import FixedBody, known_facts
from trainmux.scheduling.policies._gaps import Choice, find_gaps
from trainmux.scheduling.policies._layout import demand
from trainmux.simulate import lane_times

_MAX_TIGHTENINGS = 3
_NUM_RUNGS = 6
_NUM_STEPS = 4
"""Steps from one rung to the next, the last of which is that rung."""
_ROUNDING = 1e-9
"""Times that differ by less than this share differ by the rounding of sums alone."""


@dataclass(frozen=True)
class Arrangement:
    """Members in sub-arrays, one profile each, and how these share the device."""

    sub_arrays: tuple[tuple[str, ...], ...]
    profiles: tuple[Profile, ...]
    multiplexing: Multiplexing

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(len(members) for members in self.sub_arrays)

    @property
    def in_words(self) -> str:
        widths = "+".join(str(width) for width in self.widths[:8])
        more = f"+... ({len(self.widths)} sub-arrays)" if len(self.widths) > 8 else ""
        return f"{widths}{more} {self.multiplexing.value}"

    def fingerprints(self) -> tuple[str, ...]:
        """Those of the distinct profiles."""
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
    """A schedule of an arrangement, placed and timed."""

    schedule: Schedule
    program: Program
    seconds: float

    @property
    def slab_bytes(self) -> int:
        return self.program.slab_bytes


class Candidates:
    """What a policy can do with one arrangement; each limit is worked on once, when it is asked for."""

    def __init__(self, arrangement: Arrangement, known: KnownPolicy, host_bytes: int) -> None:
        self.arrangement = arrangement
        self.known = known
        self._host_bytes = host_bytes
        task = self._task(0)
        self._facts = known_facts(task)
        body = FixedBody(task, plain_order(task.profiles, task.multiplexing), self._facts)
        self._plain_schedule = body.plain_schedule()
        self.plain_bytes = int(body.needed().max())
        self.least_bytes = self._least_bytes(body)
        """What no decisions of the policy's kind can go below."""
        self.least_seconds = float(body.starts[-1])
        """No schedule of this arrangement is quicker than its nodes alone."""
        self.least_need: int | None = None
        """The fewest bytes that the policy said it needs where it found nothing."""
        self._plain: Candidate | None = None
        self._smallest: Candidate | None = None
        self._made: dict[int, Candidate | None] = {}

    def limits(self) -> list[int]:
        """All rungs and steps, from the lowest up."""
        if not self.known.has_decisions:
            return []
        count = _NUM_RUNGS * _NUM_STEPS
        way = self.plain_bytes - self.least_bytes
        return list(dict.fromkeys(self.least_bytes + way * step // count for step in range(count)))

    def best(self, available: int, to_beat: float) -> Candidate | None:
        """The quickest candidate within ``available`` bytes.

        Where nothing can be quicker than ``to_beat`` seconds, nothing or something slower may be returned.
        """
        if self.plain_bytes <= available and self.plain().slab_bytes <= available:
            return self.plain()
        limits = self.limits()
        rungs = [limit for limit in limits[::_NUM_STEPS] if limit <= available]
        found: Candidate | None = None
        for limit in reversed(rungs):
            if self._is_ruled_out(limit, found, to_beat):
                break
            found = _quicker(found, self._within(limit))
        if not rungs or (found is not None and found.seconds <= self.least_seconds * (1 + _ROUNDING)):
            return found
        above = limits.index(rungs[-1]) + _NUM_STEPS
        steps = [limit for limit in limits[above - _NUM_STEPS + 1 : above] if limit <= available]
        if not steps or self._is_ruled_out(steps[-1], found, to_beat):
            return found
        allowed = self.least_seconds
        if above < len(limits):
            higher = _quicker(found, self._within(limits[above]))
            allowed = higher.seconds if higher is not None else math.inf
        for limit in reversed(steps):
            if self._is_ruled_out(limit, found, to_beat):
                break
            step = self._within(limit)
            if step is not None and step.seconds >= allowed * (1 - _ROUNDING):
                found = _quicker(found, step)
        return found

    def _is_ruled_out(self, limit_bytes: int, found: Candidate | None, to_beat: float) -> bool:
        """Whether nothing within a limit, or a lower one, can be quicker than what there is."""
        quickest = to_beat if found is None else min(to_beat, found.seconds)
        bound = least_seconds(self._facts, self.arrangement.multiplexing, limit_bytes)
        return bound == math.inf or bound * (1 + _ROUNDING) >= quickest

    def plain(self) -> Candidate:
        """With nothing swapped and nothing recomputed."""
        if self._plain is None:
            self._plain = self._place(self._plain_schedule)
        return self._plain

    def smallest(self) -> Candidate | None:
        """What needs the fewest bytes of all, for a policy that knows how; otherwise ``None``."""
        if self._smallest is None and isinstance(self.known.policy, Auto):
            try:
                schedule = self.known.policy.smallest(self._task(0))
            except Infeasible:
                schedule = self._plain_schedule
            self._smallest = self._place(schedule)
        return self._smallest

    def _within(self, limit_bytes: int) -> Candidate | None:
        """What the policy makes of one of `limits`, tightened where the slab needs more than the limit."""
        if limit_bytes not in self._made:
            self._made[limit_bytes] = self._make(limit_bytes)
        return self._made[limit_bytes]

    def _make(self, limit_bytes: int) -> Candidate | None:
        tightened = limit_bytes
        policy = self.known.policy
        for _ in range(_MAX_TIGHTENINGS):
            task = self._task(tightened)
            try:
                schedule = schedule_sub_arrays(policy.schedule, task, together=isinstance(policy, Auto))
            except Infeasible as reason:
                need = tightened + reason.excess_bytes
                self.least_need = need if self.least_need is None else min(self.least_need, need)
                return None
            try:
                candidate = self._place(schedule)
            except PlanError:
                return None  # decisions that no program can carry out
            if candidate.slab_bytes <= limit_bytes:
                return candidate
            tightened -= candidate.slab_bytes - limit_bytes
        return None

    def _least_bytes(self, body: FixedBody) -> int:
        """With all swapped that can be: a recomputed tensor is away no longer than a swapped one.

        In another order than the plain one nodes of two sub-arrays only meet more of each other's tensors.
        """
        gaps = find_gaps(self._facts, with_static=isinstance(self.known.policy, Auto))
        needs = demand(body, gaps, [Choice.SWAP] * len(gaps))
        assert needs is not None
        return needs.peak_bytes

    def _place(self, schedule: Schedule) -> Candidate:
        program = rewrite(self.arrangement.profiles, schedule)
        return Candidate(schedule, program, lane_times(program.body, self.arrangement.profiles).seconds)

    def _task(self, limit_bytes: int) -> Task:
        arrangement = self.arrangement
        return Task(arrangement.profiles, arrangement.multiplexing, limit_bytes, self._host_bytes)


def _quicker(first: Candidate | None, second: Candidate | None) -> Candidate | None:
    if first is None or second is None:
        return second if first is None else first
    return second if second.seconds < first.seconds else first
