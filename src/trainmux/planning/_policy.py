"""The contract of a policy: a task in, a schedule or `Infeasible` out; and the order it starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from trainmux.errors import TrainmuxError
from trainmux.ir import Multiplexing, Profile, Schedule
from trainmux.planning._facts import num_forward

Node = tuple[int, int]
"""A node of a body: (sub-array, rank)."""


@dataclass(frozen=True)
class Task:
    """A scheduling problem: one profile per sub-array, and how they share the device.

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
        """The name that plans record."""
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
