"""A scheduling problem, the contract of a policy, and the body: positions, times and bytes as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainmux.errors import TrainmuxError
from trainmux.ir import ByteClass, Multiplexing, Profile, ProfiledTensor, Schedule
from trainmux.planning._facts import Facts, Gap, facts_of, num_forward, remembered

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


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class FixedBody:
    """The nodes of a body by position, with nothing decided yet.

    ``place`` has the position of each rank by sub-array, ``places`` those of all ranks in one row. Of each
    position's node ``seconds`` is the time and ``starts`` when it begins if nothing holds it up (one entry
    more than there are nodes). ``tensors`` are the bytes of all tensors at each position, what the node
    creates included; ``workspace`` and ``created`` those of the node's workspace and of what it creates.
    """

    def __init__(
        self, profiles: Sequence[Profile], multiplexing: Multiplexing, order: Sequence[Node]
    ) -> None:
        self.profiles = tuple(profiles)
        self.multiplexing = multiplexing
        self.order = tuple(order)
        self.all_facts = tuple(map(facts_of, profiles))
        self.length = len(self.order)
        ends = list(accumulate(len(facts.nodes) for facts in self.all_facts))
        begins = [0, *ends[:-1]]
        numbers = [begins[sub_array] + rank for sub_array, rank in self.order]
        self.places: Ints = np.empty(self.length, dtype=np.int64)
        self.places[numbers] = np.arange(self.length)
        self.place = [self.places[begin:end].tolist() for begin, end in zip(begins, ends, strict=True)]
        rows = [np.concatenate(each)[numbers] for each in zip(*map(_node_rows, self.all_facts), strict=True)]
        self.seconds: Floats = rows[0]
        self.starts: Floats = np.zeros(self.length + 1)
        np.cumsum(self.seconds, out=self.starts[1:])
        self.workspace: Ints = rows[1]
        self.created: Ints = rows[2]
        self.tensors = self._tensors()

    def needed(self) -> Ints:
        """The bytes needed at each position while nothing is decided."""
        needed: Ints = self.tensors + self.workspace
        return needed

    def gap_places(self, gap: Gap) -> tuple[int, int]:
        """The positions of the uses around a gap; the second may lie before the first, in the next pass."""
        own = self.place[gap.sub_array]
        return own[gap.last], own[gap.first]

    def record(self, gap: Gap) -> ProfiledTensor:
        """The profiled tensor of a gap."""
        return self.profiles[gap.sub_array].tensors[gap.tensor]

    def plain_schedule(self) -> Schedule:
        """The order, with nothing swapped and nothing recomputed."""
        return Schedule(self.multiplexing, self.order, (), ())

    def _tensors(self) -> Ints:
        steps: Ints = np.zeros(self.length + 1, dtype=np.int64)
        base = first = 0
        ring = self.multiplexing is Multiplexing.RING
        for sub_array, facts in enumerate(self.all_facts):
            static_bytes, first_ranks, last_ranks, sizes, is_result = _spans(facts)
            base += static_bytes
            places = self.places[first : first + len(facts.nodes)]
            first += len(facts.nodes)
            begins, ends = places[first_ranks], places[last_ranks] + 1
            # A result stays to the end of the body, unless its step ends within it.
            within = ring and sub_array == 0
            stays = is_result & ~((first_ranks < facts.num_forward) & within)
            ends = np.where(stays, self.length, ends)
            np.add.at(steps, begins, sizes)
            np.subtract.at(steps, ends, sizes)
            base += int(sizes[ends <= begins].sum())
        tensors: Ints = np.cumsum(steps[:-1]) + base
        return tensors


@remembered
def plain_body(profiles: Sequence[Profile], multiplexing: Multiplexing) -> FixedBody:
    """The nodes in plain order."""
    return FixedBody(profiles, multiplexing, plain_order(profiles, multiplexing))


@remembered
def _node_rows(facts: Facts) -> tuple[Floats, Ints, Ints]:
    """Of a sub-array's nodes, by rank: seconds, workspaces, and the bytes of what they create."""
    return (
        np.asarray([node.seconds for node in facts.nodes], dtype=np.float64),
        np.asarray([node.workspace_bytes for node in facts.nodes], dtype=np.int64),
        np.asarray(facts.created_bytes, dtype=np.int64),
    )


class GapSpans:
    """The positions of the uses around gaps, as arrays, and how long each tensor is idle between them."""

    def __init__(self, body: FixedBody, gaps: Sequence[Gap]) -> None:
        places = [body.gap_places(gap) for gap in gaps]
        self._lasts: Ints = np.asarray([last for last, _ in places], dtype=np.int64)
        self._firsts: Ints = np.asarray([first for _, first in places], dtype=np.int64)
        idle = body.starts[self._firsts] - body.starts[self._lasts + 1]
        self.idle_seconds: Floats = np.where(self._lasts < self._firsts, idle, idle + body.starts[-1])

    def around_any(self, positions: Bools) -> Bools:
        """For each gap, whether its tensor is idle at one of the positions that are true."""
        so_far = np.zeros(len(positions) + 1, dtype=np.int64)
        np.cumsum(positions, out=so_far[1:])
        within = so_far[self._firsts] - so_far[self._lasts + 1]
        found: Bools = np.where(self._lasts < self._firsts, within, within + so_far[-1]) > 0
        return found


@remembered
def _spans(facts: Facts) -> tuple[int, Ints, Ints, Ints, Bools]:
    """Static bytes; of all tensors made in the step first and last ranks, sizes, and which are results."""
    records = [record for record in facts.tensors if not record.byte_class.is_static]
    return (
        sum(record.memory_size for record in facts.tensors if record.byte_class.is_static),
        np.asarray([record.lifetime[0] for record in records], dtype=np.int64),
        np.asarray([record.lifetime[1] for record in records], dtype=np.int64),
        np.asarray([record.memory_size for record in records], dtype=np.int64),
        np.asarray([record.byte_class is ByteClass.RESULT for record in records], dtype=np.bool_),
    )


def part_of(task: Task, sub_arrays: Sequence[int]) -> Task:
    """Some sub-arrays by themselves, within what the static tensors and results of the others leave."""
    limit_bytes = task.limit_bytes
    for sub_array, profile in enumerate(task.profiles):
        for tensor in profile.tensors if sub_array not in sub_arrays else ():
            if tensor.byte_class.is_static or tensor.byte_class is ByteClass.RESULT:
                limit_bytes -= tensor.size_bytes
    host_bytes = len(sub_arrays) * task.host_bytes // len(task.profiles)
    profiles = tuple(task.profiles[each] for each in sub_arrays)
    return Task(profiles, task.multiplexing, limit_bytes, host_bytes)


def infeasible(task: Task, policy: str, excess_bytes: int) -> Infeasible:
    """The refusal of a policy whose best is ``excess_bytes`` over the limit."""
    widths = ", ".join(str(profile.width) for profile in task.profiles)
    return Infeasible(
        f"sub-arrays of widths {widths} must fit into {task.limit_bytes} bytes, but {policy} needs "
        f"{excess_bytes} more; raise the budget or make the sub-arrays narrower",
        excess_bytes=excess_bytes,
    )
