"""A schedule and its profiles, looked through once and checked: the order, and how to recompute a tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Profile, Recomputation, Schedule, Swap
from trainmux.planning._facts import Facts, Key, facts_of, remembered


@dataclass(frozen=True)
class StepView:
    """One sub-array's step: the profile, and for each tensor who makes and who changes it.

    ``made_by`` is a rank, -1 for a tensor that is there before the step; ``changed_by`` are ranks in order.
    The first ``num_forward`` nodes are the forward pass.
    """

    profile: Profile
    num_forward: int
    made_by: tuple[int, ...]
    changed_by: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.profile.nodes)

    def is_changed(self, tensor: int, from_rank: int, before_rank: int) -> bool:
        """Whether a node of rank ``from_rank`` up to, not including, ``before_rank`` changes the tensor."""
        ranks = self.changed_by[tensor]
        first = bisect_left(ranks, from_rank)
        return first < len(ranks) and ranks[first] < before_rank


def view_profiles(profiles: Sequence[Profile]) -> tuple[StepView, ...]:
    """One view per sub-array. A profile that contradicts itself is refused with `PlanError`."""
    return tuple(_view(facts_of(profile)) for profile in profiles)


@remembered
def _view(facts: Facts) -> StepView:
    return StepView(
        facts.profile,
        facts.num_forward,
        tuple(-1 if tensor.created_at is None else tensor.created_at for tensor in facts.tensors),
        tuple(tensor.changed_at for tensor in facts.tensors),
    )


def positions_in_body(views: Sequence[StepView], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """For each sub-array, by rank, the position of the node in the body; refused: an order that is not one.

    Each node runs once, each sub-array's nodes run in rank order (in a ring the first one's forward pass
    comes behind its backward pass and update), and stages follow one another.
    """
    positions = [[-1] * view.num_nodes for view in views]
    is_ring = schedule.multiplexing is Multiplexing.RING
    next_rank = [views[0].num_forward if is_ring and s == 0 else 0 for s in range(len(views))]
    stage = 0
    for position, (sub_array, rank) in enumerate(schedule.order):
        if not (0 <= sub_array < len(views) and 0 <= rank < views[sub_array].num_nodes):
            raise PlanError(
                f"the order must name nodes of {len(views)} sub-arrays, but position {position} names node "
                f"{rank} of sub-array {sub_array}; plan for these profiles"
            )
        view = views[sub_array]
        expected = next_rank[sub_array] % view.num_nodes
        if rank != expected or positions[sub_array][rank] != -1:
            raise PlanError(
                f"the nodes of sub-array {sub_array} must run once each in rank order"
                f"{', beginning with the backward pass' if is_ring and sub_array == 0 else ''}, so node "
                f"{expected} is next, but position {position} of the order has node {rank}"
            )
        next_rank[sub_array] += 1
        positions[sub_array][rank] = position
        is_forward = rank < view.num_forward
        own_stage = (sub_array - 1) % len(views) if is_ring and is_forward else sub_array
        if own_stage < stage:
            raise PlanError(
                f"stages of the body must follow one another, but node {rank} of sub-array {sub_array} at "
                f"position {position} belongs to stage {own_stage}, and stage {stage} has begun"
            )
        stage = own_stage
    missing = [(s, row.index(-1)) for s, row in enumerate(positions) if -1 in row]
    if missing:
        raise PlanError(
            f"the order must name every node once, but node {missing[0][1]} of sub-array {missing[0][0]} is "
            "not in it"
        )
    return tuple(tuple(row) for row in positions)


def describe_swap(swap: Swap, views: Sequence[StepView]) -> str:
    """A swap in words, for messages; safe for one that names nothing."""
    return (
        f"swap of {describe_tensor((swap.sub_array, swap.tensor), views)} (offload after "
        f"{_pair(swap.offload_after)}, release before {_pair(swap.release_before)}, prefetch before "
        f"{_pair(swap.prefetch_prompt)})"
    )


def describe_recomputation(record: Recomputation, views: Sequence[StepView]) -> str:
    """A recomputation in words, for messages; safe for one that names nothing."""
    nodes = ", ".join(str(rank) for rank in record.nodes)
    return (
        f"recomputation of {describe_tensor((record.sub_array, record.tensor), views)} (nodes {nodes}, "
        f"before {_pair(record.before)})"
    )


def describe_tensor(key: Key, views: Sequence[StepView]) -> str:
    """A tensor in words; safe for one that does not exist."""
    sub_array, tensor = key
    known = 0 <= sub_array < len(views) and 0 <= tensor < len(views[sub_array].profile.tensors)
    name = f" {views[sub_array].profile.tensors[tensor].name!r}" if known else ""
    return f"tensor {tensor}{name} of sub-array {sub_array}"


def describe_node(sub_array: int, rank: int, views: Sequence[StepView]) -> str:
    """A node in words."""
    return f"node {rank} {views[sub_array].profile.nodes[rank].name!r} of sub-array {sub_array}"


def _pair(node: tuple[int, int]) -> str:
    return f"{node[0]}/{node[1]}"


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
