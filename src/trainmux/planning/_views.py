"""A schedule's order and its decisions, looked through once and checked against the facts of its profiles."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Multiplexing, Recomputation, Schedule
from trainmux.planning._facts import Facts, Key


def refuse(key: Key, all_facts: Sequence[Facts], why: str) -> NoReturn:
    """Refuse the decisions about a tensor, which need not exist."""
    tensors = all_facts[key[0]].profile.tensors if 0 <= key[0] < len(all_facts) else ()
    name = f" {tensors[key[1]].name!r}" if 0 <= key[1] < len(tensors) else ""
    raise PlanError(f"the schedule must not move tensor {key[1]}{name} of sub-array {key[0]} so: {why}")


def positions_in_body(all_facts: Sequence[Facts], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """For each sub-array, by rank, the position of the node in the body; refused: an order that is not one.

    Each node runs once, each sub-array's nodes run in rank order (in a ring the first one's forward pass
    comes behind its backward pass and update), and stages follow one another.
    """
    positions = [[-1] * len(facts.nodes) for facts in all_facts]
    waiting = [deque(range(len(facts.nodes))) for facts in all_facts]
    is_ring = schedule.multiplexing is Multiplexing.RING
    if is_ring:
        waiting[0].rotate(-all_facts[0].num_forward)
    stage = 0
    for position, (sub_array, rank) in enumerate(schedule.order):
        own_stage = -1
        if 0 <= sub_array < len(waiting) and waiting[sub_array] and waiting[sub_array][0] == rank:
            positions[sub_array][waiting[sub_array].popleft()] = position
            is_ahead = is_ring and rank < all_facts[sub_array].num_forward
            own_stage = (sub_array - 1) % len(all_facts) if is_ahead else sub_array
        if own_stage < stage:
            raise PlanError(
                "the nodes of each sub-array must run once each in rank order, a ring's first sub-array from "
                "the backward pass on, and stages must follow one another, but position "
                f"{position} of the order has node {rank} of sub-array {sub_array}"
            )
        stage = own_stage
    if any(waiting):
        raise PlanError(f"the order must name every node once, but it lacks {list(map(list, waiting))}")
    return tuple(tuple(row) for row in positions)


def check_names(key: Key, nodes: Iterable[tuple[int, int]], all_facts: Sequence[Facts]) -> None:
    """Refuse decisions about a result, or that name a tensor or nodes that do not exist."""
    tensors = all_facts[key[0]].tensors if 0 <= key[0] < len(all_facts) else ()
    if not 0 <= key[1] < len(tensors):
        refuse(key, all_facts, "there is no such tensor; plan for the profiles that are passed")
    if tensors[key[1]].byte_class is ByteClass.RESULT:
        refuse(key, all_facts, "it is a result, which stays to the end of its step; leave it there")
    for sub_array, rank in nodes:
        if not (0 <= sub_array < len(all_facts) and 0 <= rank < len(all_facts[sub_array].nodes)):
            refuse(key, all_facts, f"there is no node {rank} in sub-array {sub_array}; plan for the profiles")


@dataclass(frozen=True)
class RecipeStep:
    """One node that runs again. ``sources`` it reads from outside, ``own`` are made by earlier steps.

    ``products`` are those of its outputs that a later step or the recomputation itself is for.
    """

    node: int
    sources: tuple[int, ...]
    own: tuple[int, ...]
    products: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """The steps in order, and for each product the last step that reads it (the tensor wanted: past all)."""

    steps: tuple[RecipeStep, ...]
    needed_until: dict[int, int]


def recipe(record: Recomputation, all_facts: Sequence[Facts]) -> Recipe:
    """How ``record`` is carried out. Refused with `PlanError`: nodes that cannot make the tensor again."""
    key = (record.sub_array, record.tensor)
    check_names(key, [record.before, *((record.sub_array, rank) for rank in record.nodes)], all_facts)
    facts = all_facts[record.sub_array]
    if list(record.nodes) != sorted(set(record.nodes)) or facts.made_by[record.tensor] not in record.nodes:
        refuse(key, all_facts, f"nodes {record.nodes} must rise and create it; correct them, or swap it")
    made_in = {tensor for rank in record.nodes for tensor in facts.nodes[rank].creates}
    needed_until = {record.tensor: len(record.nodes)}
    steps = []
    for index, rank in reversed(list(enumerate(record.nodes))):
        node = facts.nodes[rank]
        products = tuple(tensor for tensor in node.creates if tensor in needed_until)
        if not products or not node.is_repeatable or node.changes:
            refuse(key, all_facts, f"node {rank} may not run twice, or makes nothing needed; leave it out")
        reads = dict.fromkeys(node.reads)
        own = tuple(tensor for tensor in reads if tensor in made_in)
        for tensor in own:
            needed_until.setdefault(tensor, index)
        sources = tuple(tensor for tensor in reads if tensor not in made_in)
        steps.append(RecipeStep(rank, sources, own, products))
    return Recipe(tuple(reversed(steps)), needed_until)


def check_values(key: Key, made: Recipe, all_facts: Sequence[Facts], num_run: int) -> None:
    """Refuse a recomputation that would not make the value the step had when ``num_run`` nodes have run."""
    if made.steps[-1].node >= num_run:
        refuse(key, all_facts, f"node {made.steps[-1].node} has not run yet; recompute behind it")
    used = [(key[1], 0)]
    for step in made.steps:
        used += [(tensor, step.node) for tensor in step.sources]
        used += [(tensor, 0) for tensor in step.own]
    tensors = all_facts[key[0]].tensors
    for tensor, since in used:
        if any(since <= rank < num_run for rank in tensors[tensor].changed_at):
            name = all_facts[key[0]].profile.tensors[tensor].name
            refuse(key, all_facts, f"{name!r} has changed by then; recompute before that, or swap it")
