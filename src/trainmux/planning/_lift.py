"""Schedules for any number of sub-arrays from schedules for one, two or three of them.

Sub-arrays of the same profile do the same. In turns each is scheduled by itself, within what the others'
static tensors leave. In a ring a stage is a pair: the backward pass of one beside the forward pass of the
next; so each profile is scheduled as a pair with itself, and the pair's two roles alternate around the ring.
Where two profiles meet, or the count is odd, the stage runs backward before forward, which needs no more than
each of its passes alone. Copies are then placed anew along the whole ring.

So scheduling 64 sub-arrays costs what scheduling two costs, and a walk along the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainmux.ir import Multiplexing, Profile, Recomputation, Schedule, Swap
from trainmux.planning._facts import Facts, facts_of
from trainmux.planning._policy import Infeasible, Node, Task, plain_order
from trainmux.planning.policies._body import FixedBody, infeasible, known_facts, static_bytes
from trainmux.planning.policies._clock import seconds_of
from trainmux.planning.policies._gaps import Choice, Gap, find_gaps
from trainmux.planning.policies._layout import demand, lay_out

_POLICY = "a policy, applied to each sub-array in turn,"
_MAX_DIRECT_NODES = 4500
"""Nodes of sub-arrays that are scheduled all at once."""
_NUM_ROLES = 3
"""The first, any in the middle, and the last of sub-arrays that run in turns."""


_CLOSE = 1 + 1e-6
"""A ring that takes no longer than this many times its nodes' time is as quick as it can be."""


@dataclass(frozen=True)
class _Lifted:
    """A schedule for all sub-arrays, how long it takes, and how long its nodes alone take."""

    schedule: Schedule
    seconds: float
    least_seconds: float


Solve = Callable[[Task], Schedule]
"""What makes a schedule for one or two sub-arrays, or for any number if it is asked for them together."""


def schedule_sub_arrays(solve: Solve, task: Task, *, other_way: Solve | None = None) -> Schedule:
    """What ``solve`` makes of a task with any number of sub-arrays; raises `Infeasible` where nothing fits.

    ``other_way`` is asked too where a ring takes longer than its nodes alone: what hides well in a pair may
    not do so where different pairs meet.
    """
    count = len(task.profiles)
    if count == 1 or (count == 2 and task.multiplexing is Multiplexing.RING):
        return solve(task)
    if task.multiplexing is Multiplexing.TURNS:
        return _turns(solve, task)
    return _quickest_ring([solve] if other_way is None else [solve, other_way], task).schedule


def schedule_all_at_once(solve: Solve, task: Task) -> Schedule:
    """The same by a ``solve`` that can do more with all of them: swap what is static of idle ones."""
    if _is_direct(task):
        return solve(task)
    return _lifted(task, solve(_reduced(task)))


def _turns(solve: Solve, task: Task) -> Schedule:
    all_facts = known_facts(task)
    own_bytes = [static_bytes([facts]).total for facts in all_facts]
    singles: dict[int, Schedule] = {}
    order: list[Node] = []
    swaps: list[Swap] = []
    recomputes: list[Recomputation] = []
    for sub_array, profile in enumerate(task.profiles):
        if id(profile) not in singles:
            limit = task.limit_bytes - sum(own_bytes) + own_bytes[sub_array]
            host_bytes = task.host_bytes // len(task.profiles)
            alone = Task((profile,), Multiplexing.TURNS, limit, host_bytes, _worth(task, (profile,)))
            singles[id(profile)] = solve(alone)
        single = singles[id(profile)]
        order += [(sub_array, rank) for _, rank in single.order]
        swaps += [
            replace(
                swap,
                sub_array=sub_array,
                offload_after=(sub_array, swap.offload_after[1]),
                release_before=(sub_array, swap.release_before[1]),
                prefetch_prompt=(sub_array, swap.prefetch_prompt[1]),
            )
            for swap in single.swaps
        ]
        recomputes += [
            replace(each, sub_array=sub_array, before=(sub_array, each.before[1]))
            for each in single.recomputes
        ]
    return Schedule(Multiplexing.TURNS, tuple(order), tuple(swaps), tuple(recomputes))


def _quickest_ring(ways: Sequence[Solve], task: Task) -> _Lifted:
    best: _Lifted | None = None
    reasons: list[Infeasible] = []
    for solve in ways:
        try:
            found = _ring(solve, task)
        except Infeasible as reason:
            reasons.append(reason)
            continue
        if best is None or found.seconds < best.seconds:
            best = found
        if best.seconds <= best.least_seconds * _CLOSE:
            break
    if best is None:
        raise min(reasons, key=lambda each: each.excess_bytes)
    return best


def _ring(solve: Solve, task: Task) -> _Lifted:
    all_facts = known_facts(task)
    count = len(task.profiles)
    own_bytes = [static_bytes([facts]).total for facts in all_facts]
    pairs: dict[int, Schedule] = {}
    for sub_array, profile in enumerate(task.profiles):
        if id(profile) not in pairs:
            limit = task.limit_bytes - sum(own_bytes) + 2 * own_bytes[sub_array]
            both = (profile, profile)
            host_bytes = 2 * task.host_bytes // count
            pairs[id(profile)] = solve(Task(both, Multiplexing.RING, limit, host_bytes, _worth(task, both)))
    order: list[Node] = []
    for sub_array, profile in enumerate(task.profiles):
        following = (sub_array + 1) % count
        is_pair = task.profiles[following] is profile and following % 2 != sub_array % 2
        order += _stage(all_facts, sub_array, following, pairs[id(profile)] if is_pair else None)
    body = FixedBody(task, order, all_facts)
    gaps = find_gaps(all_facts, with_static=True)
    choices = [Choice.KEEP] * len(gaps)
    reasons: dict[tuple[int, int], str] = {}
    for sub_array, profile in enumerate(task.profiles):
        _copy_choices(pairs[id(profile)], sub_array % 2, sub_array, gaps, choices, reasons)
    return _placed(body, gaps, choices, reasons)


def _stage(all_facts: Sequence[Facts], sub_array: int, following: int, pair: Schedule | None) -> list[Node]:
    """The backward pass of ``sub_array`` and the forward pass of ``following``, in a pair's order if any."""
    num_forward = all_facts[sub_array].num_forward
    if pair is None:
        backward = range(num_forward, len(all_facts[sub_array].nodes))
        forward = range(all_facts[following].num_forward)
        return [*((sub_array, rank) for rank in backward), *((following, rank) for rank in forward)]
    role = sub_array % 2
    return [
        (sub_array if owner == role else following, rank)
        for owner, rank in pair.order
        if (rank >= num_forward) == (owner == role)
    ]


def _is_direct(task: Task) -> bool:
    num_nodes = sum(len(profile.nodes) for profile in task.profiles)
    return len(task.profiles) <= _NUM_ROLES or num_nodes <= _MAX_DIRECT_NODES


def _reduced(task: Task) -> Task:
    """Three sub-arrays in place of many, within what the others need even with all else on the host."""
    profile = task.profiles[0]
    if task.multiplexing is Multiplexing.RING or any(other is not profile for other in task.profiles):
        raise infeasible(task, _POLICY, 1)
    left_out = len(task.profiles) - _NUM_ROLES
    facts = known_facts(task)[0]
    swappable = {gap.tensor: gap.size_bytes for gap in find_gaps([facts], with_static=True) if gap.is_static}
    always = static_bytes([facts]).total - sum(swappable.values())
    limit = task.limit_bytes - left_out * always
    roles = (profile,) * _NUM_ROLES
    return Task(roles, Multiplexing.TURNS, limit, task.host_bytes, _worth(task, roles))


def _worth(task: Task, part: Sequence[Profile]) -> float:
    """A part's share, by the time of its nodes, of the time that a schedule of the whole task should take."""

    def seconds(profiles: Sequence[Profile]) -> float:
        return sum(facts_of(profile).start_seconds[-1] for profile in profiles)

    return task.worth_seconds * seconds(part) / max(seconds(task.profiles), 1e-30)


def _lifted(task: Task, schedule: Schedule) -> Schedule:
    """The decisions of the first, middle and last of three sub-arrays for all of a task's."""
    all_facts = known_facts(task)
    body = FixedBody(task, plain_order(task.profiles, task.multiplexing), all_facts)
    gaps = find_gaps(all_facts, with_static=True)
    choices = [Choice.KEEP] * len(gaps)
    reasons: dict[tuple[int, int], str] = {}
    last = len(task.profiles) - 1
    for sub_array in range(len(task.profiles)):
        role = 0 if sub_array == 0 else _NUM_ROLES - 1 if sub_array == last else 1
        _copy_choices(schedule, role, sub_array, gaps, choices, reasons)
    return _placed(body, gaps, choices, reasons).schedule


def _copy_choices(
    schedule: Schedule,
    role: int,
    sub_array: int,
    gaps: Sequence[Gap],
    choices: list[Choice],
    reasons: dict[tuple[int, int], str],
) -> None:
    """Decide for ``sub_array`` what ``schedule`` decides for its sub-array ``role``."""
    swapped = {
        (swap.tensor, swap.offload_after[1]): swap.reason for swap in schedule.swaps if swap.sub_array == role
    }
    recomputed = {each.tensor: each for each in schedule.recomputes if each.sub_array == role}
    for number, gap in enumerate(gaps):
        if gap.sub_array != sub_array:
            continue
        if (gap.tensor, gap.last) in swapped:
            choices[number] = Choice.SWAP
            reasons[sub_array, gap.tensor] = swapped[gap.tensor, gap.last]
        elif gap.tensor in recomputed and not gap.is_static:
            record = recomputed[gap.tensor]
            is_early = record.before != (role, gap.first)
            choices[number] = Choice.RECOMPUTE_EARLY if is_early else Choice.RECOMPUTE
            reasons[sub_array, gap.tensor] = record.reason


def _placed(
    body: FixedBody,
    gaps: tuple[Gap, ...],
    choices: Sequence[Choice],
    reasons: dict[tuple[int, int], str],
) -> _Lifted:
    needs = demand(body, gaps, choices)
    if needs is None:
        raise infeasible(body.task, _POLICY, 1)
    layout = lay_out(body, gaps, needs, body.task.limit_bytes)
    if layout is None:
        raise infeasible(body.task, _POLICY, max(1, needs.peak_bytes - body.task.limit_bytes))
    return _Lifted(layout.schedule(reasons), seconds_of(layout), float(body.starts[-1]))
