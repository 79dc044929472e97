"""Schedules, orders and profiles that cannot be meant so are refused before anything is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from steps import RING, STEP, TENSORS, TURNS, again, decided, plain_order, swap

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Phase, Profile, ProfiledNode, Schedule
from trainmux.planning import rewrite

AWAY = swap("map", "head", "loss", "∇layer")
AGAIN = again("map", "layer", "∇layer")
MASK = again("mask", "layer", "∇layer")

DECISIONS = {
    "no such sub-array": [replace(AWAY, sub_array=1)],
    "no such tensor": [replace(AWAY, tensor=8)],
    "a negative tensor": [replace(AWAY, tensor=-1)],
    "no such node": [replace(AWAY, offload_after=(0, 6))],
    "a node of no sub-array": [replace(AWAY, release_before=(1, 2))],
    "a negative node": [replace(AWAY, prefetch_prompt=(0, -1))],
    "released behind the prefetch": [swap("map", "head", "∇layer", "loss")],
    "a forward use while it is away": [swap("map", "layer", "head", "loss")],
    "a backward use while it is away": [swap("map", "head", "loss", "update")],
    "fetched for nobody": [swap("map", "∇layer", "update", "update")],
    "not made yet": [swap("gradient", "layer", "head", "loss")],
    "a result": [swap("loss", "loss", "∇loss", "∇loss")],
    "a copy from before the update": [swap("weight", "layer", "layer", "layer")],
    "fetched behind its first use": [swap("weight", "update", "layer", "head")],
    "again: no such sub-array": [replace(AGAIN, sub_array=1)],
    "again: no such tensor": [replace(AGAIN, tensor=9)],
    "again: before no node": [replace(AGAIN, before=(0, 6))],
    "again: no such node": [replace(AGAIN, nodes=(0, 7))],
    "again: no nodes": [again("map", "", "∇layer")],
    "again: nodes out of order": [again("top", "head layer", "∇loss")],
    "again: not what the nodes make": [again("map", "head", "∇layer")],
    "again: a static tensor": [again("weight", "layer", "∇layer")],
    "again: a node for nothing": [again("map", "layer head", "∇layer")],
    "again: a result": [again("loss", "loss", "∇loss")],
    "again: before it has run": [again("map", "layer", "layer")],
    "again: before its own node": [again("slope", "∇loss", "∇loss")],
    "again: for nobody": [again("map", "layer", "update")],
    "the same swap twice": [AWAY, AWAY],
    "two swaps at a time": [AWAY, swap("map", "head", "∇loss", "∇layer")],
    "swapped and made again": [AWAY, again("map", "layer", "∇loss")],
    "a source on the host": [AWAY, again("top", "head", "∇loss")],
}


def node(
    *, reads: str = "", creates: str = "", changes: str = "", phase: Phase = Phase.FORWARD
) -> ProfiledNode:
    rows = [tuple(TENSORS[name] for name in names.split()) for names in (reads, creates, changes)]
    return ProfiledNode("a node", phase, *rows, 1.0)


def with_nodes(*nodes: ProfiledNode) -> Profile:
    return replace(STEP, nodes=nodes)


LAYER, HEAD, *REST = STEP.nodes
CHANGED_BY_HEAD = with_nodes(LAYER, node(creates="top", changes="map"), *REST)
CHANGED = with_nodes(LAYER, node(changes="map"), HEAD, *REST)
UPDATED = with_nodes(*STEP.nodes, node(reads="map", phase=Phase.BACKWARD))
ONCE = with_nodes(replace(LAYER, is_repeatable=False), HEAD, *REST)

VALUES = {
    "changed while it is copied": (CHANGED_BY_HEAD, [swap("map", "layer", "loss", "∇layer")]),
    "again from an updated parameter": (UPDATED, [replace(AGAIN, before=(0, 6))]),
    "again without the change in place": (CHANGED, [replace(AGAIN, before=(0, 5))]),
    "again with a change in place": (CHANGED, [replace(AGAIN, nodes=(0, 1), before=(0, 5))]),
    "again from what was changed in place": (
        CHANGED,
        [
            replace(AWAY, offload_after=(0, 2), release_before=(0, 3), prefetch_prompt=(0, 5)),
            replace(AGAIN, tensor=TENSORS["top"], nodes=(0, 2), before=(0, 4)),
        ],
    ),
    "again by a node that runs once": (ONCE, [MASK]),
}

ORDERS = {
    "a node is missing": (TURNS, (0, 1, 2, 3, 4)),
    "nodes are exchanged": (TURNS, (0, 2, 1, 3, 4, 5)),
    "a node runs twice in a row": (TURNS, (0, 0, 1, 2, 3, 4, 5)),
    "a node runs once more": (TURNS, (0, 1, 2, 3, 4, 5, 0)),
    "an unknown node": (TURNS, (6,)),
    "a ring's order in turns": (TURNS, (3, 4, 5, 0, 1, 2)),
    "an order of turns in a ring": (RING, (0, 1, 2, 3, 4, 5)),
}

PROFILES = {
    "no such tensor": [ProfiledNode("a node", Phase.FORWARD, (9,), (), (), 1.0)],
    "a negative tensor": [ProfiledNode("a node", Phase.FORWARD, (), (-1,), (), 1.0)],
    "read before it is made": [node(reads="map")],
    "made though it exists": [node(creates="batch")],
    "made of itself": [node(reads="map", creates="map")],
    "forward behind backward": [node(phase=Phase.BACKWARD), node()],
}


def moved_into_the_next_stage(multiplexing: Multiplexing, at: int) -> Schedule:
    order = list(plain_order([STEP, STEP], multiplexing))
    order.insert(6, order.pop(at))
    return Schedule(multiplexing, tuple(order), (), ())


def in_order(ranks: Sequence[int], multiplexing: Multiplexing = TURNS) -> Schedule:
    return Schedule(multiplexing, tuple((0, rank) for rank in ranks), (), ())


REFUSED = {
    "no profiles": ([], in_order([])),
    "an order of another sub-array": ([STEP], Schedule(TURNS, ((1, 0),), (), ())),
    "turns that overlap": ([STEP, STEP], moved_into_the_next_stage(TURNS, 5)),
    "stages that overlap": ([STEP, STEP], moved_into_the_next_stage(RING, 2)),
    "again: in the next step of a ring": (
        [STEP],
        decided(again("mask", "layer", "layer"), multiplexing=RING),
    ),
    **{name: ([STEP], decided(*each)) for name, each in DECISIONS.items()},
    **{name: ([profile], decided(*each, profile=profile)) for name, (profile, each) in VALUES.items()},
    **{name: ([STEP], in_order(ranks, multiplexing)) for name, (multiplexing, ranks) in ORDERS.items()},
    **{
        f"profile: {name}": ([with_nodes(*each)], in_order(range(len(each))))
        for name, each in PROFILES.items()
    },
}


@pytest.mark.parametrize(("profiles", "schedule"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(profiles: list[Profile], schedule: Schedule) -> None:
    with pytest.raises(PlanError):
        rewrite(profiles, schedule)


def test_what_most_of_them_vary_is_right() -> None:
    for profile, decision in ((STEP, AWAY), (CHANGED_BY_HEAD, AWAY), (STEP, AGAIN), (STEP, MASK)):
        assert rewrite([profile], decided(decision)).body.instructions
