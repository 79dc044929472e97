"""Plans that could be made, whatever the budget: the rungs of a ladder of limits.

For each arrangement of members there is a fixed row of limits, from the least that any decisions need to what
the arrangement needs with nothing decided, and what a policy makes of each does not depend on anybody's
budget. A budget chooses among rungs at or below it, so a larger one chooses among all that a smaller one had.
That is what makes predicted time never rise with the budget, whatever the greed or luck of a policy does; it
costs that rungs below the budget are worked on too, as far as a bound does not rule them out.

Few rungs would waste memory between them, many would cost time. So there are few, and steps between each two
of them. Rungs are evenly spaced; where static tensors may be swapped too the way down is long, and each rung
lies half as far below what nothing decided needs as the one before. Steps serve only budgets between their
own two rungs: those above never look at them. For this a step counts only if it is not quicker than the rung
above it, or than those below that. (Where a policy does better with less memory, which happens, the better
schedule is thus left out; a rung's own is never.) Between two steps there are fine steps, in the same way.
For those static tensors are spread and nothing else is tried (`_spread`), which takes a tenth of the time.

What is placed on a real slab may need more than the sum of live bytes. Then the policy is asked again for
that much less, a few times. Placing takes long, so what is not quicker than the best there is stays unplaced;
for this a schedule counts only if asking for less did not make it much quicker.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainmux.errors import PlanError
from trainmux.ir import Part, Schedule
from trainmux.planning._arrangement import ROUNDING, Arrangement, Candidate
from trainmux.planning._bound import least_seconds
from trainmux.planning._lift import schedule_all_at_once, schedule_sub_arrays
from trainmux.planning._policy import Infeasible, Task, plain_order
from trainmux.planning._rewrite import Draft, draft, place
from trainmux.planning._slack import with_slack
from trainmux.planning._spread import spread_static
from trainmux.planning._timeline import lane_times
from trainmux.planning.policies import Auto, KnownPolicy
from trainmux.planning.policies._body import FixedBody, known_facts
from trainmux.planning.policies._gaps import Choice, find_gaps
from trainmux.planning.policies._layout import demand

_TIGHTENINGS, _LARGE_TIGHTENINGS, _HUGE_TIGHTENINGS = (1, 1, 2, 4, 8), (1, 2, 4), (1, 2)
"""How many times what a slab had too much a policy is asked to do without, one time after another."""
_LARGE_MARGIN = 1024
"""The same with large bodies: this part of the limit more, or a tiny excess is asked for again and again."""
_NUM_RUNGS, _HUGE_NUM_RUNGS = 6, 3
_NUM_STEPS, _HUGE_NUM_STEPS = 4, 2
"""Steps from one rung to the next, the last of which is that rung."""
_NUM_FINE_STEPS = 4
"""Fine steps from one step to the next, the last of which is that step."""
_MOST_GAIN, _LARGE_MOST_GAIN = 0.9, 0.99
"""Asking a policy for less may make a schedule quicker, by luck; to no less than this share of its time."""
_LARGE_BODY = 1000
"""From so many nodes on one decision weighs little, so luck is small, and every question takes long."""
_HUGE_BODY, _MOST_NODES = 3000, 6000
"""From the first number of nodes on few limits are worked on; beyond the second nothing is decided at all, a
body is taken as it is. So the time for many members is bounded: they are in wider sub-arrays too."""
SAME = 1e-10
"""Times that differ by less than this share are the same where it is asked what slower copies cost."""
_STRAIN = 1.3
"""How much longer copies take where it is asked what a schedule would take if they did."""
_STRAINS = (1.5, 1.25, 1.1)
"""How much longer they may take before compute waits for one: the first for which there is room."""


@dataclass(frozen=True)
class _Timed:
    """A schedule of which only the offsets are missing."""

    schedule: Schedule
    draft: Draft
    seconds: float


class Candidates:
    """What a policy can do with one arrangement; each limit is worked on once, when it is asked for.

    ``worth`` says what is to be had within a limit without any decision, in seconds.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        known: KnownPolicy,
        host_bytes: int,
        worth: Callable[[int], float] = lambda limit_bytes: math.inf,
    ) -> None:
        self._worth = worth
        self.arrangement = arrangement
        self.known = known
        self._host_bytes = host_bytes
        task = self._task(0)
        self._facts = known_facts(task)
        body = FixedBody(task, plain_order(task.profiles, task.multiplexing), self._facts)
        self._plain_schedule = body.plain_schedule()
        self._swaps_static = isinstance(known.policy, Auto)
        self._spreads = self._swaps_static and len(arrangement.profiles) > 1
        self._is_large = body.length >= _LARGE_BODY
        self._is_huge = is_huge = body.length >= _HUGE_BODY
        self.has_decisions = known.has_decisions and (
            len(arrangement.profiles) == 1 or body.length <= _MOST_NODES
        )
        """Whether anything but the body as it is will be offered."""
        self._num_rungs = _HUGE_NUM_RUNGS if is_huge else _NUM_RUNGS
        self._num_steps = _HUGE_NUM_STEPS if is_huge else _NUM_STEPS
        self._tightenings: tuple[int, ...] = _LARGE_TIGHTENINGS if self._is_large else _TIGHTENINGS
        if is_huge:
            self._tightenings = _HUGE_TIGHTENINGS
        self._most_gain = _LARGE_MOST_GAIN if self._is_large else _MOST_GAIN
        self.plain_bytes = int(body.needed().max())
        self.least_seconds = float(body.starts[-1])
        """No schedule of this arrangement is quicker than its nodes alone."""
        self.least_need: int | None = None
        """The fewest bytes that the policy said it needs where the last `best` found nothing."""
        self._least_bytes: int | None = None
        self._plain: Candidate | None = None
        self._smallest: Candidate | None = None
        self._smallest_timed: _Timed | None = None
        self._first: dict[int, _Timed | None] = {}
        self._made: dict[int, Candidate | None] = {}
        self._fine_first: dict[int, _Timed | None] = {}
        self._fine_made: dict[int, Candidate | None] = {}
        self._first_needs: dict[int, int] = {}
        self._made_needs: dict[int, int] = {}

    @property
    def least_bytes(self) -> int:
        """What no decisions of the policy's kind can go below.

        With all swapped that can be: a recomputed tensor is away no longer than a swapped one. In another
        order than the plain one nodes of two sub-arrays only meet more of each other's tensors.
        """
        if self._least_bytes is None:
            task = self._task(0)
            body = FixedBody(task, plain_order(task.profiles, task.multiplexing), self._facts)
            gaps = find_gaps(self._facts, with_static=self._swaps_static)
            needs = demand(body, gaps, [Choice.SWAP] * len(gaps))
            assert needs is not None
            self._least_bytes = needs.peak_bytes
        return self._least_bytes

    def limits(self) -> list[int]:
        """All rungs and steps, from the lowest up."""
        if not self.has_decisions:
            return []
        way = self.plain_bytes - self.least_bytes
        if self._swaps_static:
            rungs = [self.plain_bytes - (way >> halving) for halving in range(self._num_rungs)]
        else:
            rungs = [self.least_bytes + way * rung // self._num_rungs for rung in range(self._num_rungs)]
        found = [
            low + (high - low) * step // self._num_steps
            for low, high in pairwise([*rungs, self.plain_bytes])
            for step in range(self._num_steps)
        ]
        return list(dict.fromkeys(found))

    def bound(self, limit_bytes: int) -> float:
        """Seconds that no schedule within a limit, or a lower one, can go below; infinite where none fits."""
        if self.plain_bytes <= limit_bytes:
            return self.least_seconds
        if not self.has_decisions:
            return math.inf
        return least_seconds(
            self._facts, self.arrangement.multiplexing, limit_bytes, swaps_static=self._swaps_static
        )

    def best_plain(self, available: int) -> Candidate | None:
        """With nothing decided, where that fits."""
        if self.plain_bytes > available or self.plain().slab_bytes > available:
            return None
        return self.plain()

    def best(self, available: int, to_beat: float) -> Candidate | None:
        """The quickest candidate within ``available`` bytes.

        Where nothing can be quicker than ``to_beat`` seconds, nothing or something slower may be returned.
        """
        self.least_need = None
        plain = self.best_plain(available)
        if plain is not None:
            return plain
        limits = self.limits()
        rungs = [limit for limit in limits[:: self._num_steps] if limit <= available]
        found: Candidate | None = None
        for limit in reversed(rungs):
            if self._is_ruled_out(limit, found, to_beat):
                break
            found = self._quicker(found, limit, to_beat)
        if not rungs:
            return found
        above = limits.index(rungs[-1]) + self._num_steps
        steps = [limit for limit in limits[above - self._num_steps + 1 : above] if limit <= available]
        if found is not None and found.seconds <= self.least_seconds * (1 + ROUNDING):
            return self._calmest(found, steps)
        of_rungs = found
        found = self._of_steps(found, steps, lambda: self._allowed(of_rungs, above), to_beat)
        # Where live bytes would fit with nothing decided, but not on a slab, the last interval still serves.
        next_limit = bisect.bisect_right(limits, available)
        fine = [limit for limit in self._fine_steps(next_limit) if limit <= available]
        return self._of_steps(
            found, fine, lambda: self._offered(of_rungs, next_limit, above), to_beat, is_fine=True
        )

    def _of_steps(
        self,
        found: Candidate | None,
        steps: Sequence[int],
        allowed: Callable[[], float],
        to_beat: float,
        *,
        is_fine: bool = False,
    ) -> Candidate | None:
        """A step that is quicker than ``found`` where there is one, and not quicker than ``allowed``."""
        least: float | None = None
        for limit in reversed(steps):
            if self._is_ruled_out(limit, found, to_beat):
                break
            step = self._quicker(found, limit, to_beat, is_fine=is_fine)
            if step is None or step is found:
                continue
            if least is None:
                least = allowed()
            if step.seconds >= least * (1 - ROUNDING):
                found = step
        return found

    def _fine_steps(self, next_limit: int) -> list[int]:
        """Those below the limit of that number."""
        if not self._spreads:
            return []
        low, high = [*self.limits(), self.plain_bytes][next_limit - 1 : next_limit + 1]
        return [low + (high - low) * step // _NUM_FINE_STEPS for step in range(1, _NUM_FINE_STEPS)]

    def _calmest(self, found: Candidate, steps: list[int]) -> Candidate:
        """The one that slower copies cost the least, of those that take no longer than their nodes.

        ``steps`` are higher limits than that of ``found``: from the highest on, as it copies the least.
        """
        calmest = found
        for limit in reversed(steps):
            step = self._within(limit)
            if step is None or step.seconds > self.least_seconds * (1 + ROUNDING):
                continue
            if step.is_calm:
                return step
            if step.is_calmer_than(calmest):
                calmest = step
        return calmest

    def _allowed(self, of_rungs: Candidate | None, above: int) -> float:
        """What a step between two rungs may not be quicker than."""
        limits = self.limits()
        if above >= len(limits):
            return self.least_seconds
        higher = self._within(limits[above])
        known = [each.seconds for each in (of_rungs, higher) if each is not None]
        return min(known, default=math.inf)

    def _offered(self, of_rungs: Candidate | None, number: int, above: int) -> float:
        """What the limit of that number gives to budgets from there on: a fine step may not be quicker.

        A step that does not count gives nothing to anybody; ``above`` is the number of the next rung.
        """
        limits = self.limits()
        if number >= len(limits):
            return self.least_seconds
        made = self._within(limits[number])
        seconds = math.inf if made is None else made.seconds
        counts = number == above or seconds >= self._allowed(of_rungs, above) * (1 - ROUNDING)
        return seconds if counts else math.inf

    def _is_ruled_out(self, limit_bytes: int, found: Candidate | None, to_beat: float) -> bool:
        """Whether nothing within a limit, or a lower one, can be quicker than what there is."""
        quickest = to_beat if found is None else min(to_beat, found.seconds)
        bound = self.bound(limit_bytes)
        return bound == math.inf or bound * (1 + ROUNDING) >= quickest

    def _quicker(
        self, found: Candidate | None, limit_bytes: int, to_beat: float, *, is_fine: bool = False
    ) -> Candidate | None:
        """What there is for a limit where that is quicker than ``found``; placed only if it can be."""
        unplaced, within = (self._fine_unplaced, self._fine) if is_fine else (self._unplaced, self._within)
        first = unplaced(limit_bytes)
        quickest = to_beat if found is None else min(to_beat, found.seconds)
        if first is None or first.seconds * self._most_gain >= quickest:
            return found
        made = within(limit_bytes)
        return made if made is not None and (found is None or made.seconds < found.seconds) else found

    def plain(self) -> Candidate:
        """With nothing swapped and nothing recomputed."""
        if self._plain is None:
            self._plain = self._placed(self._timed(self._plain_schedule))
        return self._plain

    def smallest(self, to_beat: float = math.inf) -> Candidate | None:
        """What needs the fewest bytes of all, for a policy that knows how; otherwise ``None``.

        Nor is it placed where it takes ``to_beat`` seconds or more.
        """
        if not isinstance(self.known.policy, Auto):
            return None
        if self._smallest_timed is None:
            try:
                schedule = self.known.policy.smallest(self._task(0))
            except Infeasible:
                schedule = self._plain_schedule
            self._smallest_timed = self._timed(schedule)
        if self._smallest is None and self._smallest_timed.seconds < to_beat:
            self._smallest = self._placed(self._smallest_timed)
        return self._smallest

    def _unplaced(self, limit_bytes: int) -> _Timed | None:
        """What the policy makes of one of `limits`, before it is known what that needs on a slab."""
        if limit_bytes not in self._first:
            self._first[limit_bytes] = self._scheduled(limit_bytes, limit_bytes, self._first_needs)
        self._note_need(self._first_needs.get(limit_bytes))
        return self._first[limit_bytes]

    def _within(self, limit_bytes: int) -> Candidate | None:
        """The same placed, and tightened where the slab needs more than the limit."""
        if limit_bytes not in self._made:
            self._made[limit_bytes] = self._make(limit_bytes)
        self._note_need(self._made_needs.get(limit_bytes))
        return self._made[limit_bytes]

    def _note_need(self, need: int | None) -> None:
        if need is not None:
            self.least_need = need if self.least_need is None else min(self.least_need, need)

    def _make(self, limit_bytes: int) -> Candidate | None:
        def again(tightened: int) -> _Timed | None:
            return self._scheduled(tightened, limit_bytes, self._made_needs)

        return self._fitted(limit_bytes, self._unplaced(limit_bytes), again)

    def _fine_unplaced(self, limit_bytes: int) -> _Timed | None:
        """With static tensors spread, before it is known what that needs on a slab."""
        if limit_bytes not in self._fine_first:
            self._fine_first[limit_bytes] = self._spread_alone(limit_bytes)
        return self._fine_first[limit_bytes]

    def _fine(self, limit_bytes: int) -> Candidate | None:
        """The same placed and tightened."""
        if limit_bytes not in self._fine_made:
            first = self._fine_unplaced(limit_bytes)
            self._fine_made[limit_bytes] = self._fitted(limit_bytes, first, self._spread_alone)
        return self._fine_made[limit_bytes]

    def _spread_alone(self, limit_bytes: int) -> _Timed | None:
        schedule = spread_static(self._task(limit_bytes))
        try:
            return None if schedule is None else self._hurried(self._timed(schedule), limit_bytes)
        except PlanError:
            return None

    def _fitted(
        self, limit_bytes: int, first: _Timed | None, again: Callable[[int], _Timed | None]
    ) -> Candidate | None:
        """``first`` placed, or what is made ``again`` of lower limits until that fits."""
        timed = first
        tightened = limit_bytes
        margin = limit_bytes // _LARGE_MARGIN if self._is_large else 0
        for times in (*self._tightenings, 0):
            if timed is None or first is None:
                return None
            candidate = self._placed(timed, enough_bytes=limit_bytes)
            if candidate.slab_bytes <= limit_bytes:
                # Budgets that go by the first would miss one that is quicker by more than they allow for.
                is_found = candidate.seconds >= first.seconds * self._most_gain
                return self.with_slack(candidate, limit_bytes) if is_found else None
            tightened -= times * (candidate.slab_bytes - limit_bytes + margin)
            timed = again(tightened) if times else None
        return None

    def with_slack(self, candidate: Candidate, limit_bytes: int) -> Candidate:
        """The same with copies begun earlier and waited for later, as far as that fits into a limit.

        It takes as long as before: a quicker one would be no longer what others were compared with.
        """
        if candidate.is_calm:
            return candidate
        body = candidate.program.body
        strains = _STRAINS[:1] if self._is_huge else _STRAINS
        for strain, fetches in itertools.product(strains, (True, False)):
            timed = self._slackened(candidate.schedule, body, limit_bytes, strain, fetches=fetches)
            if timed is None or abs(timed.seconds - candidate.seconds) > candidate.seconds * SAME:
                continue
            slack = self._placed(timed, enough_bytes=limit_bytes)
            if slack.slab_bytes <= limit_bytes and slack.is_calmer_than(candidate):
                return slack
        return candidate

    def _hurried(self, timed: _Timed, limit_bytes: int) -> _Timed:
        """The same with copies begun earlier, if it is quicker so."""
        is_quick = timed.seconds <= self.least_seconds * (1 + ROUNDING)
        if is_quick or not timed.schedule.swaps or not self.known.is_hurried or self._is_huge:
            return timed
        slack = self._slackened(timed.schedule, timed.draft.body, limit_bytes, _STRAINS[0])
        return slack if slack is not None and slack.seconds < timed.seconds * (1 - ROUNDING) else timed

    def _slackened(
        self, schedule: Schedule, body: Part, limit_bytes: int, strain: float, *, fetches: bool = True
    ) -> _Timed | None:
        """A schedule with slack; ``None`` where that is none, or nothing changes."""
        profiles = self.arrangement.profiles
        found = with_slack(schedule, body, profiles, limit_bytes, strain, fetches=fetches)
        if found == schedule:
            return None
        try:
            return self._timed(found)
        except PlanError:
            return None

    def _scheduled(self, limit_bytes: int, asked_for: int, needs: dict[int, int]) -> _Timed | None:
        """What the policy makes of a limit; where nothing, ``needs[asked_for]`` is what it says it needs."""
        task = self._task(limit_bytes)
        best: _Timed | None = None
        lacking: list[int] = []
        ways: list[Callable[[Task, _Timed | None], Schedule | None]] = [self._each_by_itself]
        if self._spreads:
            ways += [self._spread, self._all_at_once]
        for make in ways:
            try:
                schedule = make(task, best)
                timed = self._timed(schedule) if schedule is not None else None
            except Infeasible as reason:
                lacking.append(reason.excess_bytes)
                continue
            except PlanError:
                continue  # decisions that no program can carry out
            if timed is not None and (best is None or timed.seconds < best.seconds * (1 - ROUNDING)):
                best = timed
            if best is not None and best.seconds <= self.least_seconds * (1 + ROUNDING):
                break
        if best is None and lacking:
            needs[asked_for] = limit_bytes + min(lacking)
        return self._hurried(best, limit_bytes) if best is not None else None

    def _each_by_itself(self, task: Task, best: _Timed | None) -> Schedule:
        policy = self.known.policy
        other_way = policy.other_way().schedule if isinstance(policy, Auto) else None
        return schedule_sub_arrays(policy.schedule, task, other_way=other_way)

    def _spread(self, task: Task, best: _Timed | None) -> Schedule | None:
        return spread_static(task, below=best.seconds if best is not None else math.inf)

    def _all_at_once(self, task: Task, best: _Timed | None) -> Schedule | None:
        """Takes the longest, so only where nothing else fits."""
        return schedule_all_at_once(self.known.policy.schedule, task) if best is None else None

    def _timed(self, schedule: Schedule) -> _Timed:
        profiles = self.arrangement.profiles
        made = draft(profiles, schedule)
        return _Timed(schedule, made, lane_times(made.body, profiles, counts_meetings=False).seconds)

    def _task(self, limit_bytes: int) -> Task:
        arrangement = self.arrangement
        return Task(
            arrangement.profiles,
            arrangement.multiplexing,
            limit_bytes,
            self._host_bytes,
            self._worth(limit_bytes),
        )

    def _placed(self, timed: _Timed, *, enough_bytes: int = 0) -> Candidate:
        """With offsets. A slab that is ``enough_bytes`` is not made smaller; `rewrite` would do so."""
        profiles = self.arrangement.profiles
        program = place(profiles, timed.draft, enough_bytes=enough_bytes)
        strained = timed.seconds
        if timed.schedule.swaps:
            strained = lane_times(program.body, profiles, _STRAIN, counts_meetings=False).seconds
        return Candidate(timed.schedule, program, timed.seconds, strained)
