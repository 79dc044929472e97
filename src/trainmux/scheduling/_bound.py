"""What no schedule can go below: compute, recomputation that is needed, and what the link allows.

When the backward pass of a sub-array begins, its feature maps are on the device, or on the host, or dropped.
Together with static tensors they are more than the limit by some excess, and for each byte of it a price is
paid: the time of a copy back on the link, or a node that runs again. A step is not shorter than the compute
lane's work and not shorter than the link's, so it is not shorter than any mixture of the two; for each of
several mixtures the cheapest way to cover the excess, bytes taken in part, is a bound, and the highest of
them is kept. Prices are the least there can be: a node that makes several tensors is paid by each in part,
and a static tensor that helps several sub-arrays too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainmux.ir import ByteClass
from trainmux.scheduling._facts import Facts

_MIXTURES = tuple(share / 16 for share in range(17))


def least_seconds(all_facts: Sequence[Facts], limit_bytes: int) -> float:
    """A time that one pass through a body of these sub-arrays takes at least; infinite where none fits.

    Holds for turns and rings, any order, and any decisions that policies can make.
    """
    compute = sum(facts.start_seconds[-1] for facts in all_facts)
    static = [
        (sub_array, tensor.tensor)
        for sub_array, facts in enumerate(all_facts)
        for tensor in facts.tensors
        if tensor.byte_class.is_static
    ]
    static_bytes = sum(all_facts[sub_array].tensors[tensor].memory_size for sub_array, tensor in static)
    static_items = [
        (
            all_facts[sub_array].tensors[tensor].memory_size,
            all_facts[sub_array].profile.tensors[tensor].swap_in_seconds / len(all_facts),
            math.inf,
        )
        for sub_array, tensor in static
        if all_facts[sub_array].tensors[tensor].byte_class is not ByteClass.BATCH
    ]
    by_facts: dict[int, list[tuple[int, float, float]]] = {}
    highest = compute
    covers: list[tuple[int, list[tuple[int, float, float]]]] = []
    for facts in all_facts:
        if id(facts) not in by_facts:
            by_facts[id(facts)] = _feature_maps(facts)
        items = by_facts[id(facts)]
        covers.append((sum(size for size, _, _ in items) + static_bytes - limit_bytes, items))
    for share in _MIXTURES:
        known: dict[tuple[int, int], float] = {}
        total = share * compute
        for excess, items in covers:
            key = (id(items), excess)
            if key not in known:
                known[key] = _cover(items + static_items, excess, share)
            total += known[key]
        highest = max(highest, total)
    return highest


def _feature_maps(facts: Facts) -> list[tuple[int, float, float]]:
    """Bytes, seconds to copy back and seconds to make again of each feature map."""
    items = []
    for tensor in facts.feature_maps:
        record = facts.tensors[tensor]
        assert record.created_at is not None
        node = facts.profile.nodes[record.created_at]
        again = node.seconds / len(node.creates) if node.is_repeatable and not node.changes else math.inf
        items.append((record.memory_size, facts.profile.tensors[tensor].swap_in_seconds, again))
    return items


def _cover(items: Sequence[tuple[int, float, float]], excess: int, share: float) -> float:
    """The least that covering ``excess`` bytes costs, a second of compute at ``share``, of the link the rest."""
    if excess <= 0:
        return 0.0
    priced = []
    for size, copying, again in items:
        if size:
            by_link = (1 - share) * copying
            by_compute = share * again if again < math.inf else math.inf
            priced.append((min(by_link, by_compute) / size, size))
    cost = 0.0
    for price, size in sorted(priced):
        taken = min(size, excess)
        cost += price * taken
        excess -= taken
        if not excess:
            return cost
    return math.inf
