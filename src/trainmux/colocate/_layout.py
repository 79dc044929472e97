"""Which jobs share memory: arenas with two ends, jobs at each end, bytes for each arena.

Two jobs share one arena from its two ends, as in the paper. For more jobs the paper proposes pairs, each with
a budget of its own (§4, §7.3). That needs the largest job of every pair at once. Where the budget is too
small for it, one arena serves all, and several jobs alternate at each end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainmux.colocate._demand import JobDemand
from trainmux.errors import BudgetError
from trainmux.sizes import exact_bytes


@dataclass(frozen=True)
class ArenaLayout:
    """An arena: the names of jobs that alternate at its base and at its top."""

    base: tuple[str, ...]
    top: tuple[str, ...]
    capacity_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.base + self.top


@dataclass(frozen=True)
class MemoryLayout:
    """All arenas; every job is in exactly one."""

    arenas: tuple[ArenaLayout, ...] = ()

    @property
    def names(self) -> set[str]:
        """All jobs."""
        return {name for arena in self.arenas for name in arena.names}

    def has_places_of(self, other: MemoryLayout) -> bool:
        """Whether every job keeps its arena and end, so that only capacities may differ."""
        places = [[(arena.base, arena.top) for arena in layout.arenas] for layout in (self, other)]
        return places[0] == places[1]


def smallest_budget(demands: Iterable[JobDemand]) -> int:
    """The least bytes with which all jobs can be trained, time-sliced if need be."""
    rows = list(demands)
    return sum(demand.local_bytes for demand in rows) + max((demand.peak_bytes for demand in rows), default=0)


def check_budget(demands: Sequence[JobDemand], budget_bytes: int) -> None:
    """Refuse jobs that do not fit even when time-sliced: `BudgetError`, with the smallest workable budget."""
    least = smallest_budget(demands)
    if least > budget_bytes:
        raise BudgetError(
            f"the budget must hold the local memory of every job and what the largest job's iteration takes, "
            f"{exact_bytes(least)}, but is {exact_bytes(budget_bytes)}; raise it or leave out a job",
            smallest_bytes=least,
        )


_Ends = tuple[list[JobDemand], list[JobDemand]]


def choose_layout(demands: Sequence[JobDemand], budget_bytes: int) -> MemoryLayout:
    """Pairs of jobs with similar iteration times if they fit and the arenas have half of what full sharing
    would need, else one arena.

    Jobs must have passed `check_budget`.
    """
    room = budget_bytes - sum(demand.local_bytes for demand in demands)
    if len(demands) <= 2:
        return _with_capacities([(list(demands[:1]), list(demands[1:]))], room) if demands else MemoryLayout()
    by_time = sorted(demands, key=lambda one: one.solo_seconds)
    pairs: list[_Ends] = [(by_time[i : i + 1], by_time[i + 1 : i + 2]) for i in range(0, len(by_time), 2)]
    if 2 * room >= sum(demand.peak_bytes for demand in demands) and sum(map(_least, pairs)) <= room:
        return _with_capacities(pairs, room)
    return _with_capacities([_two_ends(demands)], room)


def _least(ends: _Ends) -> int:
    return max(demand.peak_bytes for side in ends for demand in side)


def _need(ends: _Ends) -> int:
    """The bytes with which both ends can be at their peaks at once; more is of no use."""
    return sum(max((demand.peak_bytes for demand in side), default=0) for side in ends)


def _with_capacities(arenas: Sequence[_Ends], room: int) -> MemoryLayout:
    """Give each arena the peak of its largest job, and split the rest in proportion to what they lack."""
    least = [_least(ends) for ends in arenas]
    wanted = [_need(ends) - size for ends, size in zip(arenas, least, strict=True)]
    spare = max(0, room - sum(least))
    region_bytes = arenas[0][0][0].region_bytes
    found = []
    for ends, smallest, more in zip(arenas, least, wanted, strict=True):
        given = min(more, spare * more // sum(wanted)) if more else 0
        capacity = (smallest + given) // region_bytes * region_bytes
        base, top = (tuple(demand.name for demand in side) for side in ends)
        found.append(ArenaLayout(base, top, capacity))
    return MemoryLayout(tuple(found))


def _two_ends(demands: Sequence[JobDemand]) -> _Ends:
    """Spread jobs over the two ends of one arena with equal total times."""
    ends: _Ends = ([], [])
    for demand in sorted(demands, key=lambda one: -one.solo_seconds):
        min(ends, key=lambda side: sum(one.solo_seconds for one in side)).append(demand)
    return ends
