"""Profiles and the order of a schedule, looked through once and checked: the rest relies on them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Phase, Profile, Recomputation, Schedule, Swap

Key = tuple[int, int]
"""A tensor: its sub-array and its position in the sub-array's profile."""


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
    views: dict[int, StepView] = {}
    for sub_array, profile in enumerate(profiles):
        if id(profile) not in views:
            views[id(profile)] = _view(profile, sub_array)
    return tuple(views[id(profile)] for profile in profiles)


def _view(profile: Profile, sub_array: int) -> StepView:
    num_tensors = len(profile.tensors)
    made_by = [-1 if tensor.byte_class.is_static else len(profile.nodes) for tensor in profile.tensors]
    changed_by: list[list[int]] = [[] for _ in profile.tensors]
    num_forward = 0
    for rank, node in enumerate(profile.nodes):
        where = f"node {rank} ({node.name}) of the profile of sub-array {sub_array}"
        for tensor in (*node.reads, *node.changes, *node.creates):
            if not 0 <= tensor < num_tensors:
                raise PlanError(
                    f"{where} must name tensors 0 to {num_tensors - 1}, but names {tensor}; profile anew"
                )
        for tensor in (*node.reads, *node.changes):
            if made_by[tensor] >= rank:
                raise PlanError(
                    f"{where} must use tensors that exist, but uses {profile.tensors[tensor].name}, which no "
                    "earlier node creates; profile anew"
                )
        for tensor in node.creates:
            if made_by[tensor] < len(profile.nodes):
                raise PlanError(
                    f"{where} must create new tensors, but {profile.tensors[tensor].name} exists already; "
                    "profile anew"
                )
            made_by[tensor] = rank
        for tensor in node.changes:
            changed_by[tensor].append(rank)
        if node.phase is Phase.FORWARD:
            if num_forward < rank:
                raise PlanError(f"{where} is a forward node behind backward ones; profile anew")
            num_forward += 1
    return StepView(profile, num_forward, tuple(made_by), tuple(tuple(ranks) for ranks in changed_by))


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
