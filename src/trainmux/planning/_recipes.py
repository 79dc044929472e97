"""How a recomputation is carried out, and whether it makes the same values again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import Recomputation
from trainmux.planning._views import StepView, describe_node, describe_recomputation, describe_tensor


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


def recipe(record: Recomputation, views: Sequence[StepView]) -> Recipe:
    """How ``record`` is carried out. Refused with `PlanError`: nodes that cannot make the tensor again."""
    view = views[record.sub_array]
    nodes = view.profile.nodes
    if list(record.nodes) != sorted(set(record.nodes)) or not record.nodes:
        raise PlanError(
            f"{describe_recomputation(record, views)}: nodes must be ranks in rising order, at least one"
        )
    if view.made_by[record.tensor] not in record.nodes:
        raise PlanError(
            f"{describe_recomputation(record, views)}: none of its nodes creates the tensor; list the node "
            "that does, or swap the tensor instead"
        )
    made_in: dict[int, int] = {}
    for index, rank in enumerate(record.nodes):
        if not nodes[rank].is_repeatable or nodes[rank].changes:
            raise PlanError(
                f"{describe_recomputation(record, views)}: {describe_node(record.sub_array, rank, views)} "
                "may not run twice; recompute from what it made, or swap the tensor instead"
            )
        made_in.update(dict.fromkeys(nodes[rank].creates, index))
    needed_until = {record.tensor: len(record.nodes)}
    steps = []
    for index, rank in reversed(list(enumerate(record.nodes))):
        products = tuple(tensor for tensor in nodes[rank].creates if tensor in needed_until)
        if not products:
            raise PlanError(
                f"{describe_recomputation(record, views)}: nothing that "
                f"{describe_node(record.sub_array, rank, views)} makes is needed; leave the node out"
            )
        reads = dict.fromkeys(nodes[rank].reads)
        own = tuple(tensor for tensor in reads if tensor in made_in)
        for tensor in own:
            needed_until.setdefault(tensor, index)
        sources = tuple(tensor for tensor in reads if tensor not in made_in)
        steps.append(RecipeStep(rank, sources, own, products))
    return Recipe(tuple(reversed(steps)), needed_until)


def check_values(record: Recomputation, made: Recipe, views: Sequence[StepView], num_run: int) -> None:
    """Refuse a recomputation that would not make the value the step had when ``num_run`` nodes have run."""
    view = views[record.sub_array]
    last = made.steps[-1].node
    if last >= num_run:
        raise PlanError(
            f"{describe_recomputation(record, views)}: {describe_node(record.sub_array, last, views)} has "
            "not run yet in this step; recompute behind it"
        )
    if view.is_changed(record.tensor, 0, num_run):
        raise PlanError(
            f"{describe_recomputation(record, views)}: the tensor was changed in place after it was made; "
            "swap it instead"
        )
    for step in made.steps:
        for tensor in step.sources:
            if view.is_changed(tensor, step.node, num_run):
                raise PlanError(
                    f"{describe_recomputation(record, views)}: its source "
                    f"{describe_tensor((record.sub_array, tensor), views)} is not available, as it was "
                    f"changed after {describe_node(record.sub_array, step.node, views)} had read it; "
                    "recompute before the change"
                )
        for tensor in step.own:
            if view.is_changed(tensor, 0, num_run):
                raise PlanError(
                    f"{describe_recomputation(record, views)}: "
                    f"{describe_tensor((record.sub_array, tensor), views)}, which it makes on the way, was "
                    "changed in place; keep it or swap it, and recompute from there"
                )
