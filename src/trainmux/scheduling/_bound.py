"""What no schedule can go below: compute, recomputation that is needed, and what the link allows.

When the backward pass of a sub-array begins, its feature maps are on the device, or on the host, or dropped.
Together with static tensors they are more than the limit by some excess, and for each byte of it a price is
paid: the time of copies on the link, or a node that runs again. A step is not shorter than the compute lane's
work and not shorter than the link's, so it is not shorter than any mixture of the two; for each of several
mixtures the cheapest way to cover the excess, bytes taken in part, is a bound, and the highest of them is
kept. Prices are the least there can be: a node that makes several tensors is paid by each in part, and a
static tensor that helps several sub-arrays too.

In turns there is more to say. What is on the host when a backward pass begins was copied out during the same
sub-array's forward pass and is copied back during the backward pass, and these follow one another: each of
the two is mixed with the link by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainmux.ir import ByteClass, Multiplexing
from trainmux.scheduling._facts import Facts

_SHARES = tuple(share / 8 for share in range(9))


@dataclass(frozen=True)
class _Item:
    """Bytes that can be given up: seconds to copy them out and back, or to make them again."""

    size: int
    out_seconds: float
    in_seconds: float
    again_seconds: float


def least_seconds(all_facts: Sequence[Facts], multiplexing: Multiplexing, limit_bytes: int) -> float:
    """A time that one pass through a body of these sub-arrays takes at least; infinite where none fits.

    Holds for any order and any decisions that policies can make.
    """
    static_bytes = sum(
        tensor.memory_size for facts in all_facts for tensor in facts.tensors if tensor.byte_class.is_static
    )
    own = {id(facts): _feature_maps(facts) for facts in all_facts}
    static = {id(facts): _static(facts) for facts in all_facts}
    excesses = [sum(item.size for item in own[id(f)]) + static_bytes - limit_bytes for f in all_facts]
    shared = [
        _Item(item.size, 0.0, item.in_seconds / len(all_facts), math.inf)
        for facts in all_facts
        for item in static[id(facts)]
    ]
    bound = sum(facts.start_seconds[-1] for facts in all_facts)
    for share in _SHARES:
        total = 0.0
        known: dict[tuple[int, int], float] = {}
        for facts, excess in zip(all_facts, excesses, strict=True):
            key = (id(facts), excess)
            if key not in known:
                items = [*own[id(facts)], *shared]
                known[key] = share * facts.start_seconds[-1] + _cover(items, excess, 0.0, 1 - share, share)
            total += known[key]
        bound = max(bound, total)
    if multiplexing is Multiplexing.TURNS:
        bound = max(bound, _in_turns(all_facts, excesses, own, static))
    return bound


def _in_turns(
    all_facts: Sequence[Facts],
    excesses: Sequence[int],
    own: dict[int, list[_Item]],
    static: dict[int, list[_Item]],
) -> float:
    """The sum over sub-arrays of what each forward and backward pass takes at least."""
    bounds: dict[int, float] = {}
    total = 0.0
    for facts, excess in zip(all_facts, excesses, strict=True):
        if id(facts) not in bounds:
            # Its own static tensors come back in the backward pass; those of others at any time, for nothing.
            others = sum(item.size for other in all_facts if other is not facts for item in static[id(other)])
            others += sum(item.size for item in static[id(facts)]) * (
                sum(other is facts for other in all_facts) - 1
            )
            items = [
                *own[id(facts)],
                *(_Item(i.size, 0.0, i.in_seconds, math.inf) for i in static[id(facts)]),
            ]
            forward = facts.start_seconds[facts.num_forward]
            backward = facts.start_seconds[-1] - forward
            bounds[id(facts)] = max(
                first * forward
                + second * backward
                + _cover(items, excess - others, 1 - first, 1 - second, second)
                for first in _SHARES
                for second in _SHARES
            )
        total += bounds[id(facts)]
    return total


def _feature_maps(facts: Facts) -> list[_Item]:
    items = []
    for tensor in facts.feature_maps:
        record, copies = facts.tensors[tensor], facts.profile.tensors[tensor]
        assert record.created_at is not None
        node = facts.profile.nodes[record.created_at]
        again = node.seconds / len(node.creates) if node.is_repeatable and not node.changes else math.inf
        items.append(_Item(record.memory_size, copies.swap_out_seconds, copies.swap_in_seconds, again))
    return items


def _static(facts: Facts) -> list[_Item]:
    """Static tensors that the backward pass or the update needs have to come back; others cost nothing."""
    items = []
    for record in facts.tensors:
        if record.byte_class.is_static and record.byte_class is not ByteClass.BATCH:
            seconds = facts.profile.tensors[record.tensor].swap_in_seconds
            is_needed = record.first_bw_access is not None
            items.append(_Item(record.memory_size, 0.0, seconds if is_needed else 0.0, math.inf))
    return items


def _cover(
    items: Iterable[_Item], excess: int, out_price: float, in_price: float, compute_price: float
) -> float:
    """The least that covering ``excess`` bytes costs at given prices of seconds, bytes taken in part."""
    if excess <= 0:
        return 0.0
    priced = []
    for item in items:
        if item.size:
            price = out_price * item.out_seconds + in_price * item.in_seconds
            if item.again_seconds < math.inf:
                price = min(price, compute_price * item.again_seconds)
            priced.append((price / item.size, item.size))
    cost = 0.0
    for price, size in sorted(priced):
        taken = min(size, excess)
        cost += price * taken
        excess -= taken
        if not excess:
            return cost
    return math.inf
