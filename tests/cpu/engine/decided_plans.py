"""Programs whose decisions are made by hand: whatever can be swapped or is soon recomputed is, or nothing.

Policies decide on as little as a budget asks for. Of models as small as those of the tests that is next to
nothing; here it is as much as there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.random_steps import split_passes

from trainmux.ir import (
    ByteClass,
    Multiplexing,
    Offload,
    Phase,
    Prefetch,
    Profile,
    Program,
    Recomputation,
    Recompute,
    Schedule,
    Swap,
    verify,
)
from trainmux.planning import rewrite

_STATE = (ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE, ByteClass.BUFFER)
_AHEAD = 2
"""Nodes that a copy has time for, where there are so many."""
_MOST_NODES = 12
"""Nodes that are run again for one feature map: those of late layers would take the whole forward pass."""

Node = tuple[int, int]


def decided(
    profiles: Sequence[Profile],
    multiplexing: Multiplexing,
    *,
    swaps: bool = False,
    recomputes: bool = False,
    with_static: bool = False,
) -> Program:
    """All feature maps decided on, and with ``with_static`` parameters and optimizer state swapped as well.

    With both ``swaps`` and ``recomputes`` every other feature map is swapped, others if they take long.
    """
    order = _plain_order(profiles, multiplexing)
    away: list[Swap] = []
    again: list[Recomputation] = []
    for sub_array, profile in enumerate(profiles):
        for number, (tensor, last, first) in enumerate(_idle(profile, with_static)):
            nodes = _nodes_to_remake(profile, tensor, first) if recomputes else None
            if nodes is not None and not (swaps and number % 2):
                again.append(Recomputation(sub_array, tensor, nodes, (sub_array, first)))
            elif swaps:
                begin = order.index((sub_array, last))
                length = (order.index((sub_array, first)) - begin) % len(order)
                release, back = min(_AHEAD, length), max(min(_AHEAD, length), length - _AHEAD)
                given_back, taken = (order[(begin + at) % len(order)] for at in (release, back))
                away.append(Swap(sub_array, tensor, (sub_array, last), given_back, taken))
    program = rewrite(profiles, Schedule(multiplexing, order, tuple(away), tuple(again)))
    verify(program, profiles, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)
    return program


def _plain_order(profiles: Sequence[Profile], multiplexing: Multiplexing) -> tuple[Node, ...]:
    """Whole steps one after another; in a ring each backward pass before the next forward pass."""
    halves = split_passes(profiles)
    if multiplexing is Multiplexing.TURNS:
        return tuple(node for forward, backward in halves for node in (*forward, *backward))
    following = [*halves[1:], halves[0]]
    return tuple(
        node
        for (_, backward), (forward, _) in zip(halves, following, strict=True)
        for node in (*backward, *forward)
    )


def _idle(profile: Profile, with_static: bool) -> Iterator[tuple[int, int, int]]:
    """Tensors with the ranks of the two uses between which they may be away."""
    for tensor, record in enumerate(profile.tensors):
        uses = [
            rank
            for rank, node in enumerate(profile.nodes)
            if tensor in (*node.reads, *node.creates, *node.changes)
        ]
        forward = [rank for rank in uses if profile.nodes[rank].phase is Phase.FORWARD]
        backward = uses[len(forward) :]
        if not record.size_bytes or not uses:
            continue
        if record.byte_class is ByteClass.FEATURE_MAP and forward and backward:
            if backward[0] > forward[-1] + 1:
                yield tensor, forward[-1], backward[0]
        elif with_static and record.byte_class in _STATE and tensor in profile.nodes[uses[-1]].changes:
            yield tensor, uses[-1], uses[0]


def _nodes_to_remake(profile: Profile, tensor: int, before: int) -> tuple[int, ...] | None:
    """The nodes that make a tensor out of static ones, if they may run again before ``before``."""
    creator = {made: rank for rank, node in enumerate(profile.nodes) for made in node.creates}
    changed = {tensor for node in profile.nodes[:before] for tensor in node.changes}
    if profile.nodes[before].phase is Phase.UPDATE:
        return None
    found: set[int] = set()
    waiting = [tensor]
    while waiting:
        wanted = waiting.pop()
        if wanted in changed:
            return None
        if wanted in creator and creator[wanted] not in found:
            node = profile.nodes[creator[wanted]]
            if not node.is_repeatable or node.changes:
                return None
            found.add(creator[wanted])
            waiting += node.reads
        elif wanted not in creator and not profile.tensors[wanted].byte_class.is_static:
            return None
    return tuple(sorted(found)) if 0 < len(found) <= _MOST_NODES else None


def num_decisions(program: Program) -> dict[type, int]:
    """Offloads, prefetches and recomputations in one pass through the body."""
    kinds = (Offload, Prefetch, Recompute)
    return {kind: sum(isinstance(i, kind) for i in program.body.instructions) for kind in kinds}
