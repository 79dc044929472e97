"""A lower bound on step time: compute, the recomputation that is needed, and the time of the link.

While a node runs, all tensors of its sub-array that are alive then are on the device, except those that lie
in a gap between two uses and were given up; static tensors of the others are too, unless they may be swapped.
Where this is more than the limit, each byte of the excess has its price: time of copies on the link, or a
node that runs again. A step is not shorter than the compute lane's work and not shorter than the link's, so
it is not shorter than any mixture of the two. For each of several mixtures the cheapest way to cover the
excess, bytes taken in part, is a bound, at each of several nodes where a sub-array needs the most; the
highest of them is kept. Prices are the least there can be: a node that makes several tensors is paid by each
in part, and a static tensor that helps several sub-arrays too.

In turns there is more to say. What is away while a node runs was copied out before it and is copied back, or
made again, behind it, all within its sub-array's turn: the two parts of the turn follow one another, and each
is mixed with the link by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trainmux.ir import Multiplexing, Profile
from trainmux.planning._facts import Facts, facts_of
from trainmux.planning._remember import remembered
from trainmux.planning.policies._gaps import Gap, find_gaps

_Floats = npt.NDArray[np.float64]
_SHARES = tuple(share / 8 for share in range(9))
_NUM_PROBES = 6
"""Stretches of a step in each of which the node that needs the most is looked at."""


@dataclass(frozen=True)
class _Items:
    """Bytes that can be given up: seconds to copy them out and back, or to make them again."""

    sizes: _Floats
    out_seconds: _Floats
    in_seconds: _Floats
    again_seconds: _Floats


@dataclass(frozen=True)
class _Probe:
    """A node: what is needed while it runs beside static tensors, what of it can be away, and the time of
    its sub-array's nodes before it and from it on. ``own_static`` are static tensors that can be away."""

    needed_bytes: int
    feature_maps: _Items
    own_static: _Items
    seconds_before: float
    seconds_after: float


@dataclass(frozen=True)
class _StepProbes:
    """All that bounds ask of a sub-array. ``link_seconds_per_byte`` is the least of any static tensor."""

    probes: tuple[_Probe, ...]
    static_bytes: int
    swappable_bytes: int
    link_seconds_per_byte: float
    seconds: float


def bound_seconds(profiles: Sequence[Profile], multiplexing: Multiplexing, limit_bytes: int) -> float:
    """A time that no schedule of these sub-arrays within a limit goes below, whatever it swaps."""
    return least_seconds(
        [facts_of(profile) for profile in profiles], multiplexing, limit_bytes, swaps_static=True
    )


def least_seconds(
    all_facts: Sequence[Facts], multiplexing: Multiplexing, limit_bytes: int, *, swaps_static: bool
) -> float:
    """A time that one pass through a body of these sub-arrays takes at least; infinite where none fits.

    Holds for any order and any decisions that policies can make. ``swaps_static`` says whether static tensors
    may be among them.
    """
    steps = [_step_probes(facts) for facts in all_facts]
    counts: dict[int, int] = {}
    for step in steps:
        counts[id(step)] = counts.get(id(step), 0) + 1
    distinct = {id(step): step for step in steps}
    excess_of = sum(step.static_bytes for step in steps) - limit_bytes
    bound = sum(step.seconds for step in steps)
    swappable = sum(step.swappable_bytes for step in steps) if swaps_static else 0
    per_byte = min(step.link_seconds_per_byte for step in steps) / len(steps)
    for share in _SHARES:
        total = 0.0
        for key, step in distinct.items():
            total += counts[key] * max(
                share * step.seconds
                + _cover(
                    (probe.feature_maps, _spread(swappable, per_byte)),
                    excess_of + probe.needed_bytes,
                    0.0,
                    1 - share,
                    share,
                )
                for probe in step.probes
            )
        bound = max(bound, total)
    if multiplexing is Multiplexing.TURNS:
        total = 0.0
        for key, step in distinct.items():
            others = swappable - step.swappable_bytes if swaps_static else 0
            total += counts[key] * max(
                _in_its_turn(probe, excess_of + probe.needed_bytes - others, swaps_static)
                for probe in step.probes
            )
        bound = max(bound, total)
    return bound


def _in_its_turn(probe: _Probe, excess: int, swaps_static: bool) -> float:
    """The least time of a sub-array's turn. Static tensors of others leave and return for nothing."""
    if excess <= 0:
        return probe.seconds_before + probe.seconds_after
    items = (probe.feature_maps, probe.own_static) if swaps_static else (probe.feature_maps,)
    return max(
        first * probe.seconds_before
        + second * probe.seconds_after
        + _cover(items, excess, 1 - first, 1 - second, second)
        for first in _SHARES
        for second in _SHARES
    )


def _cover(
    all_items: Sequence[_Items], excess: int, out_price: float, in_price: float, compute_price: float
) -> float:
    """The least that covering ``excess`` bytes costs at given prices of seconds, bytes taken in part."""
    if excess <= 0:
        return 0.0
    sizes = np.concatenate([items.sizes for items in all_items])
    costs = np.concatenate(
        [
            np.minimum(
                out_price * items.out_seconds + in_price * items.in_seconds,
                compute_price * items.again_seconds if compute_price else _never(items),
            )
            for items in all_items
        ]
    )
    cheapest_first = np.argsort(costs / sizes)
    covered = np.cumsum(sizes[cheapest_first])
    last = int(np.searchsorted(covered, excess))
    if last == len(covered):
        return math.inf
    whole = float(costs[cheapest_first[:last]].sum())
    at = cheapest_first[last]
    left = excess - (float(covered[last - 1]) if last else 0.0)
    return whole + float(costs[at] / sizes[at]) * left


def _never(items: _Items) -> _Floats:
    """Costs where compute is free: nothing for what can be recomputed, infinite for the rest."""
    return np.where(np.isinf(items.again_seconds), math.inf, 0.0)


def _spread(num_bytes: int, link_seconds_per_byte: float) -> _Items:
    """Static tensors of all sub-arrays as one item."""
    if not num_bytes:
        return _EMPTY
    return _Items(
        np.asarray([float(num_bytes)]),
        np.zeros(1),
        np.asarray([num_bytes * link_seconds_per_byte]),
        np.full(1, math.inf),
    )


@remembered
def _step_probes(facts: Facts) -> _StepProbes:
    gaps = find_gaps([facts], with_static=True)
    static = [gap for gap in gaps if gap.is_static]
    feature_maps = [gap for gap in gaps if not gap.is_static]
    records = facts.profile.tensors
    return _StepProbes(
        tuple(
            _Probe(
                needed,
                _items(facts, [gap for gap in feature_maps if gap.last < rank < gap.first]),
                _items(facts, [gap for gap in static if not gap.first <= rank <= gap.last]),
                facts.start_seconds[rank],
                facts.start_seconds[-1] - facts.start_seconds[rank],
            )
            for rank, needed in _crowded(facts)
        ),
        sum(tensor.memory_size for tensor in facts.tensors if tensor.byte_class.is_static),
        sum(gap.size_bytes for gap in static),
        min((records[gap.tensor].swap_in_seconds / gap.size_bytes for gap in static), default=0.0),
        facts.start_seconds[-1],
    )


def _crowded(facts: Facts) -> list[tuple[int, int]]:
    """The ranks that need the most in each stretch of a step, and how much, without static tensors."""
    count = len(facts.nodes)
    steps = np.zeros(count + 1, np.int64)
    for tensor in facts.tensors:
        if not tensor.byte_class.is_static:
            steps[tensor.lifetime[0]] += tensor.memory_size
            steps[tensor.lifetime[1] + 1] -= tensor.memory_size
    needed = np.cumsum(steps[:-1]) + np.asarray([node.workspace_bytes for node in facts.nodes], np.int64)
    cuts = sorted({count * stretch // _NUM_PROBES for stretch in range(_NUM_PROBES + 1)})
    ranks = [begin + int(needed[begin:end].argmax()) for begin, end in pairwise(cuts)]
    return [(rank, int(needed[rank])) for rank in ranks]


def _items(facts: Facts, gaps: Sequence[Gap]) -> _Items:
    records, nodes = facts.profile.tensors, facts.profile.nodes
    again = []
    for gap in gaps:
        created_at = facts.tensors[gap.tensor].created_at
        if gap.can_recompute and created_at is not None:
            again.append(nodes[created_at].seconds / len(nodes[created_at].creates))
        else:
            again.append(math.inf)
    return _Items(
        np.asarray([float(gap.size_bytes) for gap in gaps]),
        # A static tensor leaves after its last use, in the turn before.
        np.asarray([0.0 if gap.is_static else records[gap.tensor].swap_out_seconds for gap in gaps]),
        np.asarray([records[gap.tensor].swap_in_seconds for gap in gaps]),
        np.asarray(again),
    )


_EMPTY = _Items(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
