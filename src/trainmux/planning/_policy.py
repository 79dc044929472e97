"""The contract of a policy: a task in, a schedule or `Infeasible` out; and the order it starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    is fixed), ``host_bytes`` for swapped tensors on the host.
    """

    profiles: tuple[Profile, ...]
    multiplexing: Multiplexing
    limit_bytes: int
    host_bytes: int


class Policy(Protocol):
    """Decides what is swapped, what is recomputed, and in which order nodes run."""

    @property
    def name(self) -> str:
        """The name that plans record."""
        ...

    def schedules(self, task: Task) -> Iterator[Schedule | None]:
        """Schedules within the task's bytes, each quicker than the one before; ``None`` while it searches.

        Raises `Infeasible` in place of the first where none is found.
        """
        ...


class Infeasible(TrainmuxError):  # noqa: N818 - an outcome that a search expects, not a fault
    """A policy found no schedule within the limit; its best is ``excess_bytes`` over it."""

    def __init__(self, message: str, *, excess_bytes: int) -> None:
        super().__init__(message)
        self.excess_bytes = excess_bytes


def plain_order(profiles: Sequence[Profile], multiplexing: Multiplexing) -> tuple[Node, ...]:
    """The body without any decision.

    In turns each sub-array runs from its first to its last rank. In a ring stage ``i`` is the backward pass
    and update of sub-array ``i`` followed by the forward pass of the next one (Figure 6c).
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
        order += [(sub_array, rank) for rank in range(forward_counts[sub_array], len(profile.nodes))]
        order += [(following, rank) for rank in range(forward_counts[following])]
    return tuple(order)
