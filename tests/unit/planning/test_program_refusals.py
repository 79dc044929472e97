"""Schedules, orders and profiles that cannot be meant so are refused before anything is made of them."""

from __future__ import annotations

import dataclasses

import pytest
from steps import (
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
    RING,
    SLOPE,
    STEP,
    TOP,
    TURNS,
    UPDATE,
    WEIGHT,
    plain_order,
)

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Phase, Profile, ProfiledNode, Recomputation, Schedule, Swap
from trainmux.planning import rewrite


def refused(schedule: Schedule, *profiles: Profile) -> str:
    with pytest.raises(PlanError) as caught:
        rewrite(profiles or [STEP], schedule)
    return str(caught.value)


def schedule(
    *decisions: Swap | Recomputation, profile: Profile = STEP, multiplexing: Multiplexing = TURNS
) -> Schedule:
    swaps = tuple(each for each in decisions if isinstance(each, Swap))
    recomputes = tuple(each for each in decisions if isinstance(each, Recomputation))
    return Schedule(multiplexing, plain_order([profile], multiplexing), swaps, recomputes)


def swap(tensor: int, out: int, release: int, back: int) -> Swap:
    return Swap(0, tensor, (0, out), (0, release), (0, back))


def again(tensor: int, nodes: tuple[int, ...], before: int) -> Recomputation:
    return Recomputation(0, tensor, nodes, (0, before))


AWAY = swap(MAP, HEAD, LOSS_NODE, BACKWARD)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(Swap(1, MAP, (0, 1), (0, 2), (0, 4)), id="no such sub-array"),
        pytest.param(swap(8, HEAD, LOSS_NODE, BACKWARD), id="no such tensor"),
        pytest.param(swap(-1, HEAD, LOSS_NODE, BACKWARD), id="a negative tensor"),
        pytest.param(swap(MAP, 6, LOSS_NODE, BACKWARD), id="no such node"),
        pytest.param(Swap(0, MAP, (0, 1), (1, 2), (0, 4)), id="a node of no sub-array"),
        pytest.param(swap(MAP, HEAD, LOSS_NODE, -1), id="a negative node"),
        pytest.param(swap(MAP, HEAD, BACKWARD, LOSS_NODE), id="released behind the prefetch"),
        pytest.param(swap(MAP, LAYER, HEAD, LOSS_NODE), id="a forward use while it is away"),
        pytest.param(swap(MAP, HEAD, LOSS_NODE, UPDATE), id="a backward use while it is away"),
        pytest.param(swap(MAP, BACKWARD, UPDATE, UPDATE), id="fetched for nobody"),
        pytest.param(swap(GRADIENT, LAYER, HEAD, LOSS_NODE), id="not made yet"),
        pytest.param(swap(LOSS, LOSS_NODE, LOSS_BACKWARD, LOSS_BACKWARD), id="a result"),
        pytest.param(swap(WEIGHT, LAYER, LAYER, LAYER), id="a copy from before the update"),
        pytest.param(swap(WEIGHT, UPDATE, LAYER, HEAD), id="fetched behind its first use"),
        pytest.param(Recomputation(1, MAP, (LAYER,), (0, BACKWARD)), id="again: no such sub-array"),
        pytest.param(again(9, (LAYER,), BACKWARD), id="again: no such tensor"),
        pytest.param(again(MAP, (LAYER,), 6), id="again: before no node"),
        pytest.param(again(MAP, (LAYER, 7), BACKWARD), id="again: no such node"),
        pytest.param(again(MAP, (), BACKWARD), id="again: no nodes"),
        pytest.param(again(TOP, (HEAD, LAYER), LOSS_BACKWARD), id="again: nodes out of order"),
        pytest.param(again(MAP, (HEAD,), BACKWARD), id="again: not what the nodes make"),
        pytest.param(again(WEIGHT, (LAYER,), BACKWARD), id="again: a static tensor"),
        pytest.param(again(MAP, (LAYER, HEAD), BACKWARD), id="again: a node for nothing"),
        pytest.param(again(LOSS, (LOSS_NODE,), LOSS_BACKWARD), id="again: a result"),
        pytest.param(again(MAP, (LAYER,), LAYER), id="again: before it has run"),
        pytest.param(again(SLOPE, (LOSS_BACKWARD,), LOSS_BACKWARD), id="again: before its own node"),
        pytest.param(again(MAP, (LAYER,), UPDATE), id="again: for nobody"),
    ],
)
def test_a_decision_is_named_in_its_refusal(record: Swap | Recomputation) -> None:
    assert f"tensor {record.tensor}" in refused(schedule(record))


@pytest.mark.parametrize(
    "decisions",
    [
        pytest.param([AWAY, AWAY], id="the same swap twice"),
        pytest.param([AWAY, swap(MAP, HEAD, LOSS_BACKWARD, BACKWARD)], id="two swaps at a time"),
        pytest.param([AWAY, again(MAP, (LAYER,), LOSS_BACKWARD)], id="swapped and made again"),
        pytest.param([AWAY, again(TOP, (HEAD,), LOSS_BACKWARD)], id="a source on the host"),
    ],
)
def test_decisions_that_contradict_one_another(decisions: list[Swap | Recomputation]) -> None:
    assert "'map'" in refused(schedule(*decisions))


def test_a_recomputation_of_the_next_step_in_a_ring() -> None:
    refused(schedule(again(MASK, (LAYER,), LAYER), multiplexing=RING))


def test_a_tensor_that_changes_while_it_is_copied() -> None:
    head = dataclasses.replace(STEP.nodes[HEAD], reads=(), changes=(MAP,))
    in_place = dataclasses.replace(STEP, nodes=(STEP.nodes[LAYER], head, *STEP.nodes[LOSS_NODE:]))
    assert rewrite([in_place], schedule(AWAY)).host_bytes == 2048
    assert "'map'" in refused(schedule(swap(MAP, LAYER, LOSS_NODE, BACKWARD)), in_place)


def test_a_recomputation_would_not_make_the_same_value() -> None:
    """From an updated parameter, of what was changed in place, or by a node that may not run twice."""
    late = ProfiledNode("late", Phase.BACKWARD, (MAP,), (), (), 1.0)
    updated = dataclasses.replace(STEP, nodes=(*STEP.nodes, late))
    assert "'weight'" in refused(schedule(again(MAP, (LAYER,), 6), profile=updated), updated)
    in_place = ProfiledNode("in place", Phase.FORWARD, (), (), (MAP,), 1.0)
    changed = dataclasses.replace(STEP, nodes=(STEP.nodes[LAYER], in_place, *STEP.nodes[HEAD:]))
    refused(schedule(again(MAP, (0,), 5), profile=changed), changed)
    refused(schedule(again(MAP, (0, 1), 5), profile=changed), changed)
    refused(schedule(swap(MAP, 2, 3, 5), again(TOP, (0, 2), 4), profile=changed), changed)
    once = dataclasses.replace(
        STEP, nodes=(dataclasses.replace(STEP.nodes[LAYER], is_repeatable=False), *STEP.nodes[HEAD:])
    )
    mask = schedule(again(MASK, (LAYER,), BACKWARD))
    assert rewrite([STEP], mask)
    refused(mask, once)


@pytest.mark.parametrize(
    ("multiplexing", "ranks"),
    [
        (TURNS, (0, 1, 2, 3, 4)),
        (TURNS, (0, 2, 1, 3, 4, 5)),
        (TURNS, (0, 0, 1, 2, 3, 4, 5)),
        (TURNS, (0, 1, 2, 3, 4, 5, 0)),
        (TURNS, (6,)),
        (TURNS, (3, 4, 5, 0, 1, 2)),
        (RING, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_orders(multiplexing: Multiplexing, ranks: tuple[int, ...]) -> None:
    refused(Schedule(multiplexing, tuple((0, rank) for rank in ranks), (), ()))


def test_orders_of_several() -> None:
    refused(Schedule(TURNS, ((1, 0),), (), ()))
    for multiplexing, moved in ((TURNS, 5), (RING, 2)):
        order = list(plain_order([STEP, STEP], multiplexing))
        order.insert(6, order.pop(moved))  # into the next stage
        refused(Schedule(multiplexing, tuple(order), (), ()), STEP, STEP)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param((ProfiledNode("a", Phase.FORWARD, (9,), (), (), 1.0),), id="no such tensor"),
        pytest.param((ProfiledNode("a", Phase.FORWARD, (), (-1,), (), 1.0),), id="a negative tensor"),
        pytest.param((ProfiledNode("a", Phase.FORWARD, (MAP,), (), (), 1.0),), id="read before it is made"),
        pytest.param((ProfiledNode("a", Phase.FORWARD, (), (BATCH,), (), 1.0),), id="made though it exists"),
        pytest.param((ProfiledNode("a", Phase.FORWARD, (MAP,), (MAP,), (), 1.0),), id="made of itself"),
        pytest.param(
            (
                ProfiledNode("a", Phase.BACKWARD, (), (), (), 1.0),
                ProfiledNode("b", Phase.FORWARD, (), (), (), 1.0),
            ),
            id="forward behind backward",
        ),
    ],
)
def test_profiles_that_contradict_themselves(nodes: tuple[ProfiledNode, ...]) -> None:
    order = tuple((0, rank) for rank in range(len(nodes)))
    refused(Schedule(TURNS, order, (), ()), dataclasses.replace(STEP, nodes=nodes))


def test_no_profiles() -> None:
    with pytest.raises(PlanError):
        rewrite([], Schedule(TURNS, (), (), ()))
