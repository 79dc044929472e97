"""Who shares memory with whom: arenas with two ends, jobs at each end, bytes for each arena.

Two jobs share one arena from its two ends, as in the paper. For more the paper proposes pairs, each with a
budget of its own (§4, §7.3). That asks for the largest job of every pair at once. Where the budget does not
allow it, or memory is better used in one piece, there is a second way: one arena for all, at each end of
which several jobs take turns. Lanes of one job, whose iterations wait for each other, are in one arena: then
only two of them can ever wait, and the scheduler sees both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainmux.colocate._demand import JobDemand
from trainmux.errors import BudgetError, ConfigError, PlanError
from trainmux.sizes import exact_bytes

_MAX_JOBS_FOR_ALL_PAIRINGS = 4


@dataclass(frozen=True)
class ArenaLayout:
    """An arena: jobs, by name, that take turns at its base and at its top."""

    base: tuple[str, ...]
    top: tuple[str, ...]
    capacity_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.base + self.top


@dataclass(frozen=True)
class Layout:
    """All arenas; every job is in exactly one."""

    arenas: tuple[ArenaLayout, ...]

    def has_places_of(self, other: Layout) -> bool:
        """Whether every job keeps its arena and end, so that at most capacities differ."""
        return [(arena.base, arena.top) for arena in self.arenas] == [
            (arena.base, arena.top) for arena in other.arenas
        ]

    def only(self, names: set[str]) -> Layout:
        """The same places for those of ``names``; arenas that nobody uses are left out."""
        kept = (
            ArenaLayout(
                tuple(name for name in arena.base if name in names),
                tuple(name for name in arena.top if name in names),
                arena.capacity_bytes,
            )
            for arena in self.arenas
        )
        return Layout(tuple(arena for arena in kept if arena.names))


ChooseLayout = Callable[[Sequence[JobDemand], int], Layout]


def smallest_budget(demands: Iterable[JobDemand]) -> int:
    """The least bytes with which all of ``demands`` can be trained, in turns if need be."""
    rows = list(demands)
    return sum(demand.local_bytes for demand in rows) + max((demand.peak_bytes for demand in rows), default=0)


def check_demands(demands: Sequence[JobDemand], budget_bytes: int) -> None:
    """Refuse jobs that cannot be scheduled together.

    `ConfigError`: two of one name, regions of different sizes. `BudgetError`, with the smallest workable
    budget: one job alone does not fit, or all of them do not even in turns.
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
            f"the budget must hold what every job keeps to itself and the largest job's feature maps, "
            f"{exact_bytes(least)}, but is {exact_bytes(budget_bytes)}; raise it or leave out a job",
            smallest_bytes=least,
        )


def check_layout(layout: Layout, demands: Sequence[JobDemand]) -> None:
    """Refuse, with `PlanError`, lanes of one job in several arenas."""
    arena_of = {name: number for number, arena in enumerate(layout.arenas) for name in arena.names}
    for job, lanes in lanes_by_job(demands).items():
        if len({arena_of[lane.name] for lane in lanes}) > 1:
            raise PlanError(
                f"expected the lanes of job {job!r} in one arena, but got {layout}; choose a layout that "
                "keeps them together"
            )


def lanes_by_job(demands: Iterable[JobDemand]) -> dict[str, list[JobDemand]]:
    """The lanes of each job whose micro-batches run side by side."""
    found: dict[str, list[JobDemand]] = {}
    for demand in demands:
        if demand.micro_batches is not None:
            found.setdefault(demand.job, []).append(demand)
    return found


def _check_lanes(demands: Sequence[JobDemand]) -> None:
    """Refuse, with `PlanError`, lanes that cannot take turns until all of their steps are done."""
    for job, lanes in lanes_by_job(demands).items():
        rows = [lane.micro_batches for lane in lanes if lane.micro_batches is not None]
        expected = [replace(rows[0], index=index) for index in range(rows[0].num_lanes)]
        steps = [lane.steps for lane in lanes]
        total = None if None in steps else sum(step for step in steps if step is not None)
        wanted = [None if total is None else row.steps_of(total) for row in rows]
        alike = {(lane.segments, lane.share, lane.is_measured, lane.is_watched) for lane in lanes}
        if rows != expected or steps != wanted or len(alike) > 1:
            raise PlanError(
                f"expected all lanes of job {job!r} in order, alike and with micro-batches in turns, but got "
                f"{rows} with steps {steps}; make them of one demand"
            )


def layouts(demands: Sequence[JobDemand], budget_bytes: int) -> Iterator[Layout]:
    """Layouts that fit the budget, of the kinds above; at least one where `check_demands` passes."""
    room = budget_bytes - sum(demand.local_bytes for demand in demands)
    if len(demands) <= 2:
        yield _with_capacities([(list(demands[:1]), list(demands[1:]))], room)
        return
    yield from (_with_capacities([ends], room) for ends in _two_ends(demands))
    for pairing in _pairings(list(demands)):
        least = sum(_least(pair) for pair in pairing)
        if least <= room:
            yield _with_capacities(pairing, room)


def layout_by_rule(demands: Sequence[JobDemand], budget_bytes: int) -> Layout:
    """Without a simulation: pairs if they fit with half of what full sharing would need, else one arena."""
    room = budget_bytes - sum(demand.local_bytes for demand in demands)
    candidates = list(layouts(demands, budget_bytes))
    pairs = [layout for layout in candidates if len(layout.arenas) > 1]
    peaks = sum(demand.peak_bytes for demand in demands)
    return pairs[0] if pairs and 2 * room >= peaks else candidates[0]


_Ends = tuple[list[JobDemand], list[JobDemand]]


def _least(ends: _Ends) -> int:
    return max(demand.peak_bytes for side in ends for demand in side)


def _need(ends: _Ends) -> int:
    """What lets both ends grow to their peaks at once; more is of no use."""
    return sum(max((demand.peak_bytes for demand in side), default=0) for side in ends)


def _with_capacities(arenas: Sequence[_Ends], room: int) -> Layout:
    """Each arena gets what its largest job needs; what is left is split in proportion to what they lack."""
    least = [_least(ends) for ends in arenas]
    wanted = [_need(ends) - bytes_ for ends, bytes_ in zip(arenas, least, strict=True)]
    spare = max(0, room - sum(least))
    region_bytes = arenas[0][0][0].region_bytes
    found = []
    for ends, smallest, more in zip(arenas, least, wanted, strict=True):
        given = min(more, spare * more // sum(wanted)) if sum(wanted) else 0
        capacity = (smallest + given) // region_bytes * region_bytes
        base, top = (tuple(demand.name for demand in side) for side in ends)
        found.append(ArenaLayout(base, top, capacity))
    return Layout(tuple(found))


def _two_ends(demands: Sequence[JobDemand]) -> Iterator[_Ends]:
    """Ways to spread jobs over the ends of one arena: equal times first, then large jobs apart.

    Lanes of one job are at both ends, or wherever they come.
    """
    together = lanes_by_job(demands)
    for weigh in (_seconds, _peak):
        for keeps_lanes_apart in (True, False) if together else (False,):
            ends: _Ends = ([], [])
            if keeps_lanes_apart:
                for lanes in together.values():
                    _take_turns(lanes, ends)
            placed = {demand.name for side in ends for demand in side}
            for demand in sorted(demands, key=lambda one: -weigh(one)):
                if demand.name not in placed:
                    min(ends, key=lambda side: sum(weigh(one) for one in side)).append(demand)
            yield ends


def _take_turns(lanes: Sequence[JobDemand], ends: _Ends) -> None:
    """Put the lanes of a job at both ends."""
    for number, lane in enumerate(lanes):
        ends[number % 2].append(lane)


def _pairings(demands: list[JobDemand]) -> Iterator[list[_Ends]]:
    """All pairings of a few jobs; of many, the two that put alike times or unlike sizes together.

    Lanes of one job are a pair.
    """
    pairs_of_lanes: list[_Ends] = []
    for lanes in lanes_by_job(demands).values():
        pairs_of_lanes.append(([], []))
        _take_turns(lanes, pairs_of_lanes[-1])
    others = [demand for demand in demands if demand.micro_batches is None]
    yield from (pairs_of_lanes + rest for rest in _pairings_of_jobs(others))


def _pairings_of_jobs(demands: list[JobDemand]) -> Iterator[list[_Ends]]:
    if len(demands) <= _MAX_JOBS_FOR_ALL_PAIRINGS:
        yield from _all_pairings(demands)
        return
    by_time = sorted(demands, key=_seconds)
    yield [(by_time[i : i + 1], by_time[i + 1 : i + 2]) for i in range(0, len(by_time), 2)]
    by_size = sorted(demands, key=_peak)
    half = len(by_size) // 2
    pairs: list[_Ends] = [([by_size[-1 - i]], [by_size[i]]) for i in range(half)]
    yield pairs + [([demand], []) for demand in by_size[half : len(by_size) - half]]


def _all_pairings(demands: list[JobDemand]) -> Iterator[list[_Ends]]:
    if len(demands) % 2:
        for alone in demands:
            others = [demand for demand in demands if demand is not alone]
            yield from ([*rest, ([alone], [])] for rest in _all_pairings(others))
        return
    if not demands:
        yield []
        return
    first = demands[0]
    for second in demands[1:]:
        others = [demand for demand in demands if demand is not first and demand is not second]
        yield from ([([first], [second]), *rest] for rest in _all_pairings(others))


def _seconds(demand: JobDemand) -> float:
    return demand.solo_seconds


def _peak(demand: JobDemand) -> float:
    return float(demand.peak_bytes)
