"""Which jobs share memory: arenas with two ends, jobs at each end, bytes for each arena.

Two jobs share one arena from its two ends, as in the paper. For more jobs the paper proposes pairs, each with
a budget of its own (§4, §7.3). That needs the largest job of every pair at once. Where the budget is too
small for it, one arena serves all, and several jobs alternate at each end. Lanes of one job, whose iterations
wait for each other, are in one arena: then only two of them can ever wait, and the scheduler sees both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainmux.colocate._demand import JobDemand
from trainmux.errors import BudgetError, ConfigError, PlanError
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


def check_demands(demands: Sequence[JobDemand], budget_bytes: int) -> None:
    """Refuse jobs that cannot be scheduled together.

    `ConfigError`: two of one name, or regions of different sizes. `BudgetError`, with the smallest workable
    budget: one job alone does not fit, or all of them do not even when time-sliced.
    """
    names = [demand.name for demand in demands]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"jobs must have different names, but got {twice[0]!r} twice; rename one of them")
    sizes = sorted({demand.region_bytes for demand in demands})
    if len(sizes) > 1:
        raise ConfigError(
            f"jobs that share an arena must use regions of one size, but got {sizes}; cut them alike"
        )
    _check_lanes(demands)
    least = smallest_budget(demands)
    for demand in demands:
        alone = demand.local_bytes + demand.peak_bytes
        if alone > budget_bytes:
            raise BudgetError(
                f"the budget must hold every job by itself, but job {demand.name!r} needs "
                f"{exact_bytes(alone)} "
                f"and the budget is {exact_bytes(budget_bytes)}; {exact_bytes(least)} is the smallest "
                "that works "
                "for all jobs",
                smallest_bytes=least,
            )
    if least > budget_bytes:
        raise BudgetError(
            f"the budget must hold the local memory of every job and the largest job's feature maps, "
            f"{exact_bytes(least)}, but is {exact_bytes(budget_bytes)}; raise it or leave out a job",
            smallest_bytes=least,
        )


def lanes_by_job(demands: Iterable[JobDemand]) -> dict[str, list[JobDemand]]:
    """The lanes of each job with concurrent micro-batches."""
    found: dict[str, list[JobDemand]] = {}
    for demand in demands:
        if demand.micro_batches is not None:
            found.setdefault(demand.job, []).append(demand)
    return found


def _check_lanes(demands: Sequence[JobDemand]) -> None:
    """Refuse, with `PlanError`, lanes that do not form one job in rotation."""
    for job, lanes in lanes_by_job(demands).items():
        rows = [lane.micro_batches for lane in lanes if lane.micro_batches is not None]
        expected = [replace(rows[0], index=index) for index in range(rows[0].num_lanes)]
        steps = [lane.steps for lane in lanes]
        total = None if None in steps else sum(step for step in steps if step is not None)
        wanted = [None if total is None else row.steps_of(total) for row in rows]
        alike = {(lane.segments, lane.share, lane.is_measured, lane.is_watched) for lane in lanes}
        if rows != expected or steps != wanted or len(alike) > 1:
            raise PlanError(
                f"expected all lanes of job {job!r} in order, alike and with micro-batches in rotation, but "
                f"got {rows} with steps {steps}; make them of one demand"
            )


_Ends = tuple[list[JobDemand], list[JobDemand]]


def choose_layout(demands: Sequence[JobDemand], budget_bytes: int) -> MemoryLayout:
    """Pairs if they fit and the arenas have half of what full sharing would need, else one arena.

    Jobs must have passed `check_demands`.
    """
    room = budget_bytes - sum(demand.local_bytes for demand in demands)
    if len(demands) <= 2:
        return _with_capacities([(list(demands[:1]), list(demands[1:]))], room) if demands else MemoryLayout()
    if 2 * room >= sum(demand.peak_bytes for demand in demands):
        for pairing in _pairings(demands):
            if sum(_least(pair) for pair in pairing) <= room:
                return _with_capacities(pairing, room)
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
    """Spread jobs over the two ends of one arena with equal total times, lanes of one job over both ends."""
    ends: _Ends = ([], [])
    for lanes in lanes_by_job(demands).values():
        _spread(lanes, ends)
    others = [demand for demand in demands if demand.micro_batches is None]
    for demand in sorted(others, key=lambda one: -one.solo_seconds):
        min(ends, key=lambda side: sum(one.solo_seconds for one in side)).append(demand)
    return ends


def _spread(lanes: Sequence[JobDemand], ends: _Ends) -> None:
    for number, lane in enumerate(lanes):
        ends[number % 2].append(lane)


def _pairings(demands: Sequence[JobDemand]) -> Iterator[list[_Ends]]:
    """Pairs of similar iteration times; pairs of large and small peaks. Lanes of one job are a pair."""
    pairs_of_lanes: list[_Ends] = []
    for lanes in lanes_by_job(demands).values():
        pairs_of_lanes.append(([], []))
        _spread(lanes, pairs_of_lanes[-1])
    others = [demand for demand in demands if demand.micro_batches is None]
    by_time = sorted(others, key=lambda one: one.solo_seconds)
    yield pairs_of_lanes + [(by_time[i : i + 1], by_time[i + 1 : i + 2]) for i in range(0, len(by_time), 2)]
    by_size = sorted(others, key=lambda one: one.peak_bytes)
    half = len(by_size) // 2
    pairs: list[_Ends] = [([by_size[-1 - i]], [by_size[i]]) for i in range(half)]
    alone: list[_Ends] = [([demand], []) for demand in by_size[half : len(by_size) - half]]
    yield pairs_of_lanes + pairs + alone
