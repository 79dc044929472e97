"""Static tensors of every sub-array on the host, as many of each: what one makes room for serves all.

Optimizer state is used once a step, and a parameter is idle from its update to the next forward pass. A
search that relieves one peak after another takes such tensors of one sub-array and then of the next; all of
that one's copies then meet in its own turn, and compute waits. With the same share of each on the host, every
turn copies a little of its own while the others' are away. What the last one copies out has to be there when
the step ends, and updates come last in a turn: it is also tried with less on the host than the others.

Where the link is busy all the time with that, every sub-array also makes the same feature maps again: their
peak is what all static tensors have to make room for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from trainmux.ir import Multiplexing, Schedule
from trainmux.planning._facts import Facts
from trainmux.planning._policy import Task, plain_order
from trainmux.planning._remember import remembered
from trainmux.planning.policies._body import FixedBody, known_facts, static_bytes
from trainmux.planning.policies._clock import seconds_of
from trainmux.planning.policies._gaps import Choice, Gap, find_gaps
from trainmux.planning.policies._layout import Demand, Layout, demand, lay_out
from trainmux.planning.policies._relieve import LinkPrice, Reliever

_NUM_SHARES, _MOST_RECOMPUTED = 56, 0.7
"""Of what a sub-array's feature maps need at their peak, how much less that is to be: so many shares, evenly
spaced. Some is cheap to make again, and what comes next costs several times as much."""
_STRIDES = (8, 4, 2, 1)
"""How far apart shares are that are tried."""
_NUM_ROUNDS = 1000
"""In which a sub-array by itself is relieved: in most of them it gives up one tensor."""
_LARGE_BODY = 300
"""Nodes from which on not all shares are tried."""
_SMALL_BYTES = 2**20
"""Copies of less than this are slower by the byte, and there are many: they are the last to go."""
_NUM_BISECTIONS = 7
_MORE = (1.0, 1.1, 1.2, 1.35, 1.5, 2.0)
"""How many times the least share that fits is on the host: with room to spare copies back begin early."""
_MAX_WORSE = 2
"""So many in a row that are slower than the best end a search."""
_CLOSE = 1 + 1e-9

_Share = Callable[[float], float]
"""What the last sub-array has on the host, where the others have a given share."""


def spread_static(task: Task, below: float = math.inf) -> Schedule | None:
    """The quickest such schedule that was found; ``None`` where none takes less than ``below`` seconds.

    With more and more made again the link has less to do, and compute more: of large bodies shares far apart
    are tried first, and then closer and closer ones around the best. Of small ones all are: there a share is
    a tensor more or less, and the time goes up and down.
    """
    spread = _Spread(task)
    best: Layout | None = None
    around: int | None = None
    for last_share in (_as_others, _less):
        search = _Search(spread, below, last_share)
        _look_around(search, around)
        around = search.best_number
        if search.best is not None:
            best, below = search.best, search.below
    return best.schedule("idle while others have their turns") if best is not None else None


def _look_around(search: _Search, around: int | None) -> None:
    """Try shares; where ``around`` is given, of large bodies only those not far from it."""
    strides = _STRIDES if search.is_large else _STRIDES[-1:]
    numbers = range(0, _NUM_SHARES + 1, strides[0])
    if around is not None and search.is_large:
        numbers = range(around % strides[0], _NUM_SHARES + 1, strides[0])
        numbers = numbers[max(0, numbers.index(around) - 1) : numbers.index(around) + 2]
    for number in numbers:
        search.look_at(number)
        if search.is_done or (search.is_large and search.num_worse == _MAX_WORSE):
            break
    for stride in strides[1:]:
        middle = search.best_number if search.best_number is not None else around or 0
        for number in (middle - stride, middle + stride):
            if not search.is_done and 0 <= number <= _NUM_SHARES:
                search.look_at(number)


class _Search:
    """The best layout so far, of which share it is, and how many since were slower."""

    def __init__(self, spread: _Spread, below: float, last_share: _Share) -> None:
        self._spread = spread
        self._last_share = last_share
        self.below = below
        self.is_large = spread.is_large
        self._seen: set[tuple[Choice, ...]] = set()
        self._seconds = math.inf
        self.best: Layout | None = None
        self.best_number: int | None = None
        self.num_worse = 0

    @property
    def is_done(self) -> bool:
        return self.below <= self._spread.least_seconds * _CLOSE

    def look_at(self, number: int) -> None:
        """Make so many shares again."""
        base = self._spread.recomputed(number / _NUM_SHARES * _MOST_RECOMPUTED)
        if base is None or tuple(base) in self._seen:
            return
        self._seen.add(tuple(base))
        found = list(self._spread.layouts(base, self.below, self._last_share))
        if not found:
            return
        layout, seconds = min(found, key=lambda pair: pair[1])
        if seconds < self.below:
            self.best, self.below = layout, seconds
        if seconds < self._seconds:
            self._seconds, self.best_number, self.num_worse = seconds, number, 0
        elif seconds > self._seconds * _CLOSE:
            self.num_worse += 1


class _Spread:
    def __init__(self, task: Task) -> None:
        self._task = task
        facts = known_facts(task)
        self._body = FixedBody(task, plain_order(task.profiles, task.multiplexing), facts)
        self._gaps = find_gaps(facts, with_static=True)
        self._rows = _static_rows(self._body, self._gaps)
        self.least_seconds = float(self._body.starts[-1])
        self.is_large = self._body.length >= _LARGE_BODY

    def layouts(
        self, base: Sequence[Choice], below: float, last_share: _Share
    ) -> Iterator[tuple[Layout, float]]:
        """With more and more on the host beside the choices of ``base``, and what each takes; none where it
        is no less than ``below``.
        """
        if not self._rows:
            return
        most = self._demand(base, 1.0, last_share)
        if most is None or most.peak_bytes > self._task.limit_bytes:
            return
        if self.least_seconds + float(most.recompute_seconds.sum()) >= below:
            return
        least, best, num_worse = self._least_share(base, last_share), math.inf, 0
        for share in dict.fromkeys(min(1.0, least * more) for more in _MORE):
            needs = self._demand(base, share, last_share)
            limit = self._task.limit_bytes
            layout = lay_out(self._body, self._gaps, needs, limit) if needs is not None else None
            if layout is None:
                continue
            seconds = seconds_of(layout)
            yield layout, seconds
            num_worse = 0 if seconds < best else num_worse + 1
            best = min(best, seconds)
            if num_worse == _MAX_WORSE or best <= self.least_seconds * _CLOSE:
                return

    def _least_share(self, base: Sequence[Choice], last_share: _Share) -> float:
        low, high = 0.0, 1.0
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) / 2
            needs = self._demand(base, middle, last_share)
            fits = needs is not None and needs.peak_bytes <= self._task.limit_bytes
            low, high = (low, middle) if fits else (middle, high)
        return high

    def _demand(self, base: Sequence[Choice], share: float, last_share: _Share) -> Demand | None:
        """With a share of each sub-array's static tensors on the host."""
        choices = list(base)
        *others, last = self._rows
        for row, own in (*((row, share) for row in others), (last, last_share(share))):
            for number in _filled(self._gaps, row, own):
                choices[number] = Choice.SWAP
        return demand(self._body, self._gaps, choices)

    def recomputed(self, share: float) -> list[Choice] | None:
        """The same feature maps made again in all sub-arrays of a profile; ``None`` where they cannot be."""
        found = [_alone(facts).recomputed(share) for facts in self._body.all_facts]
        if any(own is None for own in found):
            return None
        return [(found[gap.sub_array] or {}).get((gap.tensor, gap.last), Choice.KEEP) for gap in self._gaps]


class _Alone:
    """One sub-array by itself, with fewer and fewer bytes by making again what is the cheapest."""

    def __init__(self, facts: Facts) -> None:
        task = Task((facts.profile,), Multiplexing.TURNS, limit_bytes=0, host_bytes=0)
        body = FixedBody(task, plain_order(task.profiles, task.multiplexing), [facts])
        self._gaps = find_gaps([facts], with_static=False)
        reliever = Reliever(self._gaps, [True] * len(self._gaps), may_swap=False, num_rounds=_NUM_ROUNDS)
        self._path = reliever.path(body, LinkPrice(math.inf))
        self._static_bytes = static_bytes([facts]).total
        self._peak_bytes = int(body.needed().max())

    def recomputed(self, share: float) -> dict[tuple[int, int], Choice] | None:
        """What happens to each gap where maps need ``share`` less; ``None`` where they cannot."""
        if not share:
            return {}
        limit = round(self._peak_bytes - share * (self._peak_bytes - self._static_bytes))
        step = self._path.first_within(limit, 0)
        if step is None:
            return None
        return {(gap.tensor, gap.last): choice for gap, choice in zip(self._gaps, step.choices, strict=True)}


_alone = remembered(_Alone)


def _as_others(share: float) -> float:
    return share


def _less(share: float) -> float:
    """Half as much as the others; only where they have nearly all on the host, the last one has too."""
    return max(share / 2, 3 * share - 2)


def _static_rows(body: FixedBody, gaps: Sequence[Gap]) -> list[list[int]]:
    """The static gaps of each sub-array by number: all that are large come first, of these whatever is used
    once a step, of these the largest.
    """
    rows: dict[int, list[int]] = {}
    for number, gap in enumerate(gaps):
        if gap.is_static:
            rows.setdefault(gap.sub_array, []).append(number)

    def order(number: int) -> tuple[bool, int, int, int]:
        gap = gaps[number]
        num_uses = len(body.all_facts[gap.sub_array].tensors[gap.tensor].accesses)
        return (gap.size_bytes < _SMALL_BYTES, min(num_uses, 2), -gap.size_bytes, number)

    return [sorted(rows[sub_array], key=order) for sub_array in sorted(rows)]


def _filled(gaps: Sequence[Gap], row: Sequence[int], share: float) -> list[int]:
    """Gaps of a row that come closest to a share of its bytes, those in front if they can be; small ones only
    where all large ones are taken.
    """
    wanted = share * sum(gaps[number].size_bytes for number in row)
    taken = []
    skips_large = False
    for number in row:
        size = gaps[number].size_bytes
        if skips_large and size < _SMALL_BYTES:
            break
        if size <= wanted * _CLOSE:
            taken.append(number)
            wanted -= size
        else:
            skips_large = skips_large or size >= _SMALL_BYTES
    return taken
