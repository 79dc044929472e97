"""The contract of a policy: what it is given, what it returns, how it gives up; and where it starts from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from trainmux.errors import PlanError, TrainmuxError
from trainmux.ir import ByteClass, Multiplexing, Profile, Recomputation, Schedule, Swap
from trainmux.planning._facts import Facts, facts_of, num_forward
from trainmux.planning._recompute import recomp_memory

Node = tuple[int, int]
"""A node of a body: (sub-array, rank)."""


@dataclass(frozen=True)
class Task:
    """What is to be scheduled: one profile per sub-array, and how they share the device.

    ``limit_bytes`` is for all tensors and workspaces of all sub-arrays on the device (the budget less what
    is fixed), ``host_bytes`` for swapped tensors on the host. ``worth_seconds`` is what is to be had within
    the same limit without any decision: a policy that searches need not work on what stays far above it.
    """

    profiles: tuple[Profile, ...]
    multiplexing: Multiplexing
    limit_bytes: int
    host_bytes: int
    worth_seconds: float = math.inf


class Policy(Protocol):
    """Decides what is swapped, what is recomputed, and in which order nodes run."""

    @property
    def name(self) -> str:
        """What the policy is called in plans."""
        ...

    def schedule(self, task: Task) -> Schedule:
        """A schedule within the task's bytes; raises `Infeasible` where it finds none."""
        ...


class Infeasible(TrainmuxError):  # noqa: N818 - an outcome that a search expects, not a fault
    """A policy found no schedule within the limit; its best is ``excess_bytes`` over it."""

    def __init__(self, message: str, *, excess_bytes: int) -> None:
        super().__init__(message)
        self.excess_bytes = excess_bytes


def plain_order(
    profiles: Sequence[Profile], multiplexing: Multiplexing, *, interleaved: bool = False
) -> tuple[Node, ...]:
    """The body without any decision.

    In turns each sub-array runs from its first to its last rank. In a ring stage ``i`` is the backward pass
    and update of sub-array ``i`` followed by the forward pass of the next one (Figure 6c); ``interleaved``
    spreads that forward pass evenly, by time, over the backward pass instead.
    """
    forward_counts = [num_forward(profile) for profile in profiles]
    if multiplexing is Multiplexing.TURNS:
        return tuple(
            (sub_array, rank)
            for sub_array, profile in enumerate(profiles)
            for rank in range(len(profile.nodes))
        )
    order: list[Node] = []
    for sub_array, profile in enumerate(profiles):
        following = (sub_array + 1) % len(profiles)
        backward = [(sub_array, rank) for rank in range(forward_counts[sub_array], len(profile.nodes))]
        forward = [(following, rank) for rank in range(forward_counts[following])]
        if interleaved and following != sub_array:
            order += _spread(profiles, backward, forward)
        else:
            order += backward + forward
    return tuple(order)


def live_bytes(
    task: Task,
    order: Sequence[Node],
    swaps: Sequence[Swap] = (),
    recomputes: Sequence[Recomputation] = (),
) -> list[int]:
    """Device bytes needed at each node of a body: tensors, workspace, and recomputations just before it.

    One pass over everything; policies that ask again and again keep books instead. In a body that repeats
    itself memory wraps around: what the end leaves behind is there at the beginning.
    """
    all_facts = [facts_of(profile) for profile in task.profiles]
    place = {node: position for position, node in enumerate(order)}
    steps = [0] * (len(order) + 1)

    def add(begin: int, end: int, amount: int) -> None:
        """Add from ``begin`` up to, not including, ``end``; around the body's end where it is not larger."""
        steps[begin] += amount
        if end <= begin:
            steps[len(order)] -= amount
            steps[0] += amount
        steps[end] -= amount

    for sub_array, facts in enumerate(all_facts):
        for tensor in facts.tensors:
            begin, end = resident_span(facts, tensor.tensor, sub_array, place, task.multiplexing)
            add(begin, end, tensor.memory_size)
    for swap in swaps:
        size = task.profiles[swap.sub_array].tensors[swap.tensor].size_bytes
        if swap.release_before != swap.prefetch_prompt:
            add(place[swap.release_before], place[swap.prefetch_prompt], -size)
    for recompute in recomputes:
        facts = all_facts[recompute.sub_array]
        last_fw = facts.tensors[recompute.tensor].last_fw_access
        if last_fw is None:
            raise PlanError(
                f"a recomputed tensor must be used in the forward pass, but {recompute.tensor} of sub-array "
                f"{recompute.sub_array} is not; recompute feature maps only"
            )
        gone = (place[recompute.sub_array, last_fw] + 1) % len(order)
        if gone != place[recompute.before]:
            add(gone, place[recompute.before], -facts.tensors[recompute.tensor].memory_size)
    tensors = list(accumulate(steps))[:-1]
    peaks = recompute_peaks(all_facts, recomputes)
    needed = []
    for position, (sub_array, rank) in enumerate(order):
        record = all_facts[sub_array].nodes[rank]
        beyond = max(record.workspace_bytes, peaks.get((sub_array, rank), 0) - record.created_bytes)
        needed.append(tensors[position] + beyond)
    return needed


def resident_span(
    facts: Facts, tensor: int, sub_array: int, place: Mapping[Node, int], multiplexing: Multiplexing
) -> tuple[int, int]:
    """Where in a body a tensor is on the device if it is neither swapped nor recomputed.

    From the first position up to, not including, the second; around the body's end where the second is not
    larger. A result stays until the step's end: that of the body, or, made by a forward pass that belongs to
    the next step, that of its sub-array.
    """
    record = facts.tensors[tensor]
    if record.byte_class.is_static:
        return 0, len(place)
    begin, end = record.lifetime
    if record.byte_class is ByteClass.RESULT:
        belongs_to_next = multiplexing is Multiplexing.RING and sub_array == 0 and begin < facts.num_forward
        return place[sub_array, begin], place[sub_array, end] + 1 if belongs_to_next else len(place)
    return place[sub_array, begin], place[sub_array, end] + 1


def recompute_peaks(all_facts: Sequence[Facts], recomputes: Sequence[Recomputation]) -> dict[Node, int]:
    """For each node that recomputations run before: the most bytes they need at once beyond what they keep.

    What they keep counts as there from the first of them on, so this holds whichever runs first.
    """
    peaks: dict[Node, int] = {}
    for recompute in recomputes:
        facts = all_facts[recompute.sub_array]
        beyond = recomp_memory(facts, recompute.tensor, recompute.nodes)
        beyond -= facts.tensors[recompute.tensor].memory_size
        peaks[recompute.before] = max(beyond, peaks.get(recompute.before, 0))
    return peaks


def _spread(profiles: Sequence[Profile], backward: Sequence[Node], forward: Sequence[Node]) -> list[Node]:
    """Both rows in one, each node where its middle lies as a share of its own row's time."""

    def middles(row: Sequence[Node]) -> list[float]:
        seconds = [profiles[sub_array].nodes[rank].seconds for sub_array, rank in row]
        total = sum(seconds)
        if total <= 0:
            return [(position + 0.5) / len(row) for position in range(len(row))]
        return [
            (start + own / 2) / total
            for start, own in zip(accumulate(seconds, initial=0.0), seconds, strict=False)
        ]

    keyed = [
        (middle, which, position, node)
        for which, row in enumerate((backward, forward))
        for position, (middle, node) in enumerate(zip(middles(row), row, strict=True))
    ]
    return [node for *_, node in sorted(keyed)]
