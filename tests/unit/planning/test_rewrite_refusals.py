"""Schedules that cannot be meant so: each is refused, naming the record and saying why."""

from __future__ import annotations

import dataclasses

import pytest
from small_step import (
    BACKWARD,
    BATCH,
    GRADIENT,
    HEAD,
    LAYER,
    LOSS,
    LOSS_BACKWARD,
    LOSS_NODE,
    MAP,
    MASK,
    SLOPE,
    STEP,
    TOP,
    UPDATE,
    WEIGHT,
    schedule,
)

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Phase, Profile, ProfiledNode, Recomputation, Schedule, Swap
from trainmux.planning._rewrite import draft, rewrite

TURNS, RING = Multiplexing.TURNS, Multiplexing.RING


def refuse(match: str, plan: Schedule, *profiles: Profile) -> None:
    with pytest.raises(PlanError, match=match):
        rewrite(profiles or [STEP], plan)


def swap(tensor: int, out: int, release: int, back: int) -> Swap:
    return Swap(0, tensor, (0, out), (0, release), (0, back))


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (Swap(1, MAP, (0, 1), (0, 2), (0, 4)), "swap of tensor 2 of sub-array 1 .*no such tensor"),
        (Swap(0, 8, (0, 1), (0, 2), (0, 4)), "swap of tensor 8 of sub-array 0 .*no such tensor"),
        (Swap(0, -1, (0, 1), (0, 2), (0, 4)), "no such tensor"),
        (Swap(0, MAP, (0, 6), (0, 2), (0, 4)), "swap of tensor 2 'map' .*no node 6 in sub-array 0"),
        (Swap(0, MAP, (0, 1), (1, 2), (0, 4)), "no node 2 in sub-array 1"),
        (Swap(0, MAP, (0, 1), (0, 2), (0, -1)), "no node -1 in sub-array 0"),
        (swap(MAP, HEAD, BACKWARD, LOSS_NODE), "the release must come before the prefetch"),
        (swap(MAP, LAYER, HEAD, LOSS_NODE), r"swap of tensor 2 'map'.* node 1 'head' .*on the host from 0/1"),
        (swap(MAP, HEAD, LOSS_NODE, UPDATE), "node 4 'layer backward' of sub-array 0 uses it"),
        (swap(MAP, BACKWARD, UPDATE, UPDATE), "nothing uses it between the prefetch"),
        (swap(GRADIENT, LAYER, HEAD, LOSS_NODE), "tensor 7 'gradient'.*needs it on the device.*not made yet"),
        (swap(LOSS, LOSS_NODE, LOSS_BACKWARD, LOSS_BACKWARD), "it is a result, which stays"),
        (
            swap(WEIGHT, LAYER, LAYER, LAYER),
            "copy would not be the tensor .*offload it after its last change",
        ),
        (swap(WEIGHT, UPDATE, LAYER, HEAD), "node 0 'layer' of sub-array 0 uses it, but it is on the host"),
    ],
)
def test_swaps(record: Swap, match: str) -> None:
    refuse(match, schedule(TURNS, [record]))


def test_a_tensor_that_changes_while_it_is_copied() -> None:
    in_place = dataclasses.replace(
        STEP,
        nodes=(
            *STEP.nodes[:HEAD],
            dataclasses.replace(STEP.nodes[HEAD], reads=(), changes=(MAP,)),
            *STEP.nodes[LOSS_NODE:],
        ),
    )
    late = swap(MAP, HEAD, LOSS_NODE, BACKWARD)
    assert rewrite([in_place], schedule(TURNS, [late])).host_bytes == 2048
    early = swap(MAP, LAYER, LOSS_NODE, BACKWARD)
    refuse("'map'.*is changed or made anew between offload and release", schedule(TURNS, [early]), in_place)


def test_swaps_of_one_tensor_that_do_not_follow_one_another() -> None:
    one = swap(MAP, HEAD, LOSS_NODE, BACKWARD)
    refuse("swap of tensor 2 'map'", schedule(TURNS, [one, swap(MAP, HEAD, LOSS_BACKWARD, BACKWARD)]))
    refuse("it is on the host from 0/2 to 0/4", schedule(TURNS, [one, one]))
    again = Recomputation(0, MAP, (LAYER,), (0, LOSS_BACKWARD))
    refuse("on the device already where it is fetched back", schedule(TURNS, [one], [again]))


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (Recomputation(1, MAP, (0,), (0, 4)), "recomputation of tensor 2 of sub-array 1 .*no such tensor"),
        (Recomputation(0, 9, (0,), (0, 4)), "no such tensor"),
        (Recomputation(0, MAP, (0,), (0, 6)), "no node 6 in sub-array 0"),
        (Recomputation(0, MAP, (0, 7), (0, 4)), "no node 7 in sub-array 0"),
        (Recomputation(0, MAP, (), (0, 4)), "at least one"),
        (Recomputation(0, TOP, (HEAD, LAYER), (0, LOSS_BACKWARD)), "rising order"),
        (Recomputation(0, MAP, (HEAD,), (0, 4)), "none of its nodes creates the tensor"),
        (Recomputation(0, WEIGHT, (LAYER,), (0, 4)), "none of its nodes creates the tensor"),
        (Recomputation(0, MAP, (LAYER, HEAD), (0, 4)), "nothing that node 1 'head' .*leave the node out"),
        (Recomputation(0, LOSS, (LOSS_NODE,), (0, 3)), "it is a result, which stays"),
        (Recomputation(0, MAP, (LAYER,), (0, LAYER)), "node 0 'layer' of sub-array 0 has not run yet"),
        (Recomputation(0, SLOPE, (LOSS_BACKWARD,), (0, LOSS_BACKWARD)), "'loss backward' .*has not run yet"),
        (Recomputation(0, MAP, (LAYER,), (0, UPDATE)), "nothing uses it before it is made again or the step"),
    ],
)
def test_recomputations(record: Recomputation, match: str) -> None:
    refuse(match, schedule(TURNS, recomputes=[record]))


def test_a_recomputation_whose_source_is_on_the_host() -> None:
    away = swap(MAP, HEAD, LOSS_NODE, BACKWARD)
    again = Recomputation(0, TOP, (HEAD,), (0, LOSS_BACKWARD))
    refuse(
        "recomputation of tensor 4 'top' of sub-array 0 .* its source tensor 2 'map' of sub-array 0 is not "
        "available, as it is on the host from 0/2 to 0/4",
        schedule(TURNS, [away], [again]),
    )


def test_a_recomputation_that_would_read_an_updated_parameter() -> None:
    twice = dataclasses.replace(
        STEP,
        nodes=(
            *STEP.nodes,
            ProfiledNode("late", Phase.BACKWARD, (MAP,), (), (), 1.0),
        ),
    )
    order = tuple((0, rank) for rank in range(7))
    again = Recomputation(0, MAP, (LAYER,), (0, 6))
    refuse(
        "recomputation of tensor 2 'map'.* its source tensor 1 'weight' of sub-array 0 is not available, as "
        "it was changed after node 0 'layer'",
        Schedule(TURNS, order, (), (again,)),
        twice,
    )


def test_a_recomputation_of_what_was_changed_in_place() -> None:
    node = ProfiledNode("in place", Phase.FORWARD, (), (), (MAP,), 1.0)
    profile = dataclasses.replace(STEP, nodes=(STEP.nodes[LAYER], node, *STEP.nodes[HEAD:]))
    order = tuple((0, rank) for rank in range(7))
    again = Recomputation(0, MAP, (0,), (0, 5))
    refuse("changed in place after it was made", Schedule(TURNS, order, (), (again,)), profile)
    away = (Swap(0, MAP, (0, 2), (0, 3), (0, 5)),)
    top = Recomputation(0, TOP, (0, 2), (0, 4))
    refuse("which it makes on the way, was changed in place", Schedule(TURNS, order, away, (top,)), profile)
    refuse(
        "'in place'.*may not run twice",
        Schedule(TURNS, order, (), (dataclasses.replace(again, nodes=(0, 1)),)),
        profile,
    )


def test_a_node_that_may_not_run_twice() -> None:
    once = dataclasses.replace(
        STEP, nodes=(dataclasses.replace(STEP.nodes[LAYER], is_repeatable=False), *STEP.nodes[HEAD:])
    )
    again = Recomputation(0, MASK, (LAYER,), (0, BACKWARD))
    assert rewrite([STEP], schedule(TURNS, recomputes=[again]))
    refuse("node 0 'layer' of sub-array 0 may not run twice", schedule(TURNS, recomputes=[again]), once)


def test_a_recomputation_of_the_next_step_in_a_ring() -> None:
    again = Recomputation(0, MASK, (LAYER,), (0, LAYER))  # behind the update: the mask is not needed any more
    refuse("nothing uses it|not available|has not run", schedule(RING, recomputes=[again]))


@pytest.mark.parametrize(
    ("multiplexing", "order", "match"),
    [
        (TURNS, [(0, r) for r in range(5)], "node 5 of sub-array 0 is not in it"),
        (
            TURNS,
            [(0, r) for r in (0, 2, 1, 3, 4, 5)],
            "node 1 is next, but position 1 of the order has node 2",
        ),
        (TURNS, [(0, r) for r in (0, 0, 1, 2, 3, 4, 5)], "node 1 is next, but position 1 of the order has"),
        (TURNS, [(0, r) for r in (0, 1, 2, 3, 4, 5, 0)], "position 6 of the order has node 0"),
        (TURNS, [(0, 6)], "position 0 names node 6 of sub-array 0"),
        (TURNS, [(1, 0)], "position 0 names node 0 of sub-array 1"),
        (RING, [(0, r) for r in range(6)], "beginning with the backward pass, so node 3 is next"),
        (
            TURNS,
            [(0, r) for r in (3, 4, 5, 0, 1, 2)],
            "node 0 is next, but position 0 of the order has node 3",
        ),
    ],
)
def test_orders(multiplexing: Multiplexing, order: list[tuple[int, int]], match: str) -> None:
    refuse(match, Schedule(multiplexing, tuple(order), (), ()))


def test_stages_follow_one_another() -> None:
    turns = schedule(TURNS, num_sub_arrays=2).order
    mixed = (*turns[:5], turns[6], turns[5], *turns[7:])
    refuse(
        "node 5 of sub-array 0 at position 6 belongs to stage 0, and stage 1",
        Schedule(TURNS, mixed, (), ()),
        STEP,
        STEP,
    )
    ring = schedule(RING, num_sub_arrays=2).order
    late = (*ring[:2], *ring[3:7], ring[2], *ring[7:])
    refuse("belongs to stage 0, and stage 1 has begun", Schedule(RING, late, (), ()), STEP, STEP)


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ((ProfiledNode("a", Phase.FORWARD, (9,), (), (), 1.0),), "must name tensors 0 to 7, but names 9"),
        ((ProfiledNode("a", Phase.FORWARD, (MAP,), (), (), 1.0),), "uses map, which no earlier node creates"),
        ((ProfiledNode("a", Phase.FORWARD, (), (BATCH,), (), 1.0),), "batch exists already"),
        ((ProfiledNode("a", Phase.FORWARD, (MAP,), (MAP,), (), 1.0),), "no earlier node creates"),
        (
            (
                ProfiledNode("a", Phase.BACKWARD, (), (), (), 1.0),
                ProfiledNode("b", Phase.FORWARD, (), (), (), 1.0),
            ),
            r"node 1 \(b\) .* forward node behind backward ones",
        ),
    ],
)
def test_profiles_that_contradict_themselves(nodes: tuple[ProfiledNode, ...], match: str) -> None:
    order = tuple((0, rank) for rank in range(len(nodes)))
    refuse(match, Schedule(TURNS, order, (), ()), dataclasses.replace(STEP, nodes=nodes))


def test_no_profiles() -> None:
    with pytest.raises(PlanError, match="got no profiles"):
        draft([], Schedule(TURNS, (), (), ()))
