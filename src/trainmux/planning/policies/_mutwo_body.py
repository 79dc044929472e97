"""The body of a pair while it is being scheduled: who runs when, and the bytes needed at each node.

A body is a row of stages. Each has a fixed row of nodes, for a pair the backward pass and update of one
sub-array, and a movable row, the forward pass of the other, whose nodes the multiplexer puts in front of
fixed ones. Bytes are booked at nodes, not at positions: what is taken just before a node runs, what is given
back just after it, what it needs besides while it runs. So an order is evaluated in one pass over arrays,
whatever has been moved (Algorithm G, corrected): `needed` and `start_times` cost a few numpy operations.

Nodes are numbered through all sub-arrays, positions are places in the body.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainmux.ir import ByteClass, Multiplexing
from trainmux.planning._facts import Facts, facts_of
from trainmux.planning._policy import Node, Task

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

BODY_END = -1
"""In place of a node: a tensor is released when the body ends, where all lanes join."""
_ROUNDING = 1e-9


@dataclass
class Stage:
    """A part of the body. Its first node stands at position ``begin``.

    ``cuts`` are the places in the fixed row that movable nodes stand in front of, rising. ``ends`` says for
    each how many movable nodes have run when that fixed node's turn comes; all others run at the stage's
    end. ``wants`` are the seconds of movable nodes that a cut needs to hide copies.
    """

    begin: int
    fixed: Ints
    movable: Ints
    movable_starts: list[float]
    cuts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    wants: list[float] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.begin + len(self.fixed) + len(self.movable)

    def places(self) -> tuple[Ints, Ints]:
        """The positions of fixed and of movable nodes."""
        ends: Ints = np.asarray([0, *self.ends, len(self.movable)], dtype=np.int64)
        counts: Ints = ends[1:] - ends[:-1]
        gaps = np.repeat(np.asarray([*self.cuts, len(self.fixed)], dtype=np.int64), counts)
        before = np.searchsorted(gaps, np.arange(len(self.fixed)), side="right")
        fixed = self.begin + np.arange(len(self.fixed)) + before
        return fixed, self.begin + np.arange(len(self.movable)) + gaps

    def num_before(self, cut: int) -> int:
        """How many movable nodes have run when the fixed node at ``cut`` has its turn."""
        index = bisect_left(self.cuts, cut + 1)
        return self.ends[index - 1] if index else 0

    def num_at(self, cut: int) -> int:
        """How many movable nodes stand just in front of the fixed node at ``cut``."""
        return self.num_before(cut) - self.num_before(cut - 1)

    def add_forward_nodes(self, cut: int, count: int) -> None:
        """Put the next ``count`` movable nodes in front of the fixed node at ``cut``; there must be so many.

        Cuts behind it that lose nodes take later ones, as many as they want, where there are any (the
        paper's ``adjust_graph``).
        """
        end = self.num_before(cut) + count
        index = bisect_left(self.cuts, cut)
        if index < len(self.cuts) and self.cuts[index] == cut:
            self.ends[index] = end
        else:
            self.cuts.insert(index, cut)
            self.ends.insert(index, end)
            self.wants.insert(index, 0.0)
        starts, wants, ends, count = self.movable_starts, self.wants, self.ends, len(self.movable)
        for later in range(index + 1, len(ends)):
            wanted = bisect_left(starts, starts[end] + wants[later])
            if wanted > end:
                end = wanted if wanted < count else count
            if end <= ends[later]:
                break
            ends[later] = end

    def want(self, cut: int, seconds: float) -> None:
        """Note that movable nodes at ``cut``, where there are some, hide copies of so many seconds more."""
        index = bisect_left(self.cuts, cut)
        if index < len(self.cuts) and self.cuts[index] == cut:
            self.wants[index] += seconds * (1 - _ROUNDING)


@dataclass(frozen=True)
class BodyState:
    """A copy of all that a trial may change."""

    stages: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]], ...]
    order: Ints
    place: Ints
    taken: Ints
    given: Ints
    beyond: Ints
    recompute_seconds: Floats
    stall_seconds: Floats
    base_bytes: int


class Body:
    """The order of a pair's nodes and the bytes booked at them.

    ``order`` holds node numbers by position, ``place`` positions by node number. By node number: ``taken``
    bytes are there from the node's turn on, ``given`` bytes are gone after it, ``beyond`` are needed only
    while it or a recomputation before it runs. ``recompute_seconds`` run just before a node and
    ``stall_seconds`` are waited for a copy there. ``base_bytes`` are there when the body begins.
    """

    def __init__(self, task: Task, all_facts: tuple[Facts, ...] | None = None) -> None:
        self.task = task
        self.all_facts = all_facts or tuple(facts_of(profile) for profile in task.profiles)
        self.first = [0]
        for facts in self.all_facts:
            self.first.append(self.first[-1] + len(facts.nodes))
        count = self.first[-1]
        self.nodes: list[Node] = [
            (sub_array, node.rank) for sub_array, facts in enumerate(self.all_facts) for node in facts.nodes
        ]
        self.seconds: Floats = np.asarray(
            [node.seconds for facts in self.all_facts for node in facts.nodes], dtype=np.float64
        )
        self.workspace: Ints = np.asarray(
            [node.workspace_bytes for facts in self.all_facts for node in facts.nodes], dtype=np.int64
        )
        self.stages = self._stages()
        self.stage_of: Ints = np.zeros(count, dtype=np.int64)
        self.order: Ints = np.zeros(count, dtype=np.int64)
        self.place: Ints = np.zeros(count, dtype=np.int64)
        for index, stage in enumerate(self.stages):
            self.stage_of[stage.fixed] = self.stage_of[stage.movable] = index
            self.arrange(stage)
        self.taken: Ints = np.zeros(count, dtype=np.int64)
        self.given: Ints = np.zeros(count, dtype=np.int64)
        self.created: Ints = np.zeros(count, dtype=np.int64)
        self.beyond: Ints = self.workspace.copy()
        self.recompute_seconds: Floats = np.zeros(count)
        self.stall_seconds: Floats = np.zeros(count)
        self.base_bytes = 0
        for sub_array, facts in enumerate(self.all_facts):
            self._book_tensors(sub_array, facts)

    def number(self, sub_array: int, rank: int) -> int:
        """The number of a node."""
        return self.first[sub_array] + rank

    def arrange(self, stage: Stage) -> None:
        """Take over the order of a stage whose movable nodes have been moved."""
        fixed, movable = stage.places()
        self.place[stage.fixed] = fixed
        self.place[stage.movable] = movable
        self.order[fixed] = stage.fixed
        self.order[movable] = stage.movable

    def needed(self) -> Ints:
        """Bytes needed at each position: tensors that are there, and what is needed beyond while it runs."""
        change = self.taken[self.order]
        change[1:] -= self.given[self.order[:-1]]
        needed: Ints = np.cumsum(change)
        needed += self.beyond[self.order]
        needed += self.base_bytes
        return needed

    def start_times(self) -> Floats:
        """When each position's turn comes, recomputations and stalls before it first; one entry more."""
        spent = self.seconds + self.recompute_seconds
        spent += self.stall_seconds
        times = np.zeros(len(spent) + 1)
        np.cumsum(spent[self.order], out=times[1:])
        return times

    def take_out(self, size_bytes: int, release: int, prompt: int) -> None:
        """Book a tensor's absence: gone just before node ``release``, back just before node ``prompt``."""
        self.taken[prompt] += size_bytes
        if release != BODY_END:
            self.taken[release] -= size_bytes
        if release == BODY_END or self.place[release] > self.place[prompt]:
            self.base_bytes -= size_bytes

    def drop(self, size_bytes: int, last_use: int, before: int) -> None:
        """Book a tensor's absence: gone just after node ``last_use``, back just before node ``before``."""
        self.given[last_use] += size_bytes
        self.taken[before] += size_bytes
        if self.place[last_use] > self.place[before]:
            self.base_bytes -= size_bytes

    def set_recompute(self, before: int, seconds: float, beyond_bytes: int) -> None:
        """What recomputations just before a node take: time, and bytes beyond what they keep.

        They are over when the node takes the bytes of what it creates.
        """
        self.recompute_seconds[before] = seconds
        self.beyond[before] = max(int(self.workspace[before]), beyond_bytes - int(self.created[before]))

    def state(self) -> BodyState:
        """A copy to go back to."""
        return BodyState(
            tuple((tuple(s.cuts), tuple(s.ends), tuple(s.wants)) for s in self.stages),
            self.order.copy(),
            self.place.copy(),
            self.taken.copy(),
            self.given.copy(),
            self.beyond.copy(),
            self.recompute_seconds.copy(),
            self.stall_seconds.copy(),
            self.base_bytes,
        )

    def go_back(self, state: BodyState) -> None:
        """Be again as when ``state`` was copied."""
        for stage, (cuts, ends, wants) in zip(self.stages, state.stages, strict=True):
            stage.cuts, stage.ends, stage.wants = list(cuts), list(ends), list(wants)
        self.order[:] = state.order
        self.place[:] = state.place
        self.taken[:] = state.taken
        self.given[:] = state.given
        self.beyond[:] = state.beyond
        self.recompute_seconds[:] = state.recompute_seconds
        self.stall_seconds[:] = state.stall_seconds
        self.base_bytes = state.base_bytes

    def _stages(self) -> list[Stage]:
        """A ring of two has two stages with a movable row each; any other body is one fixed row."""
        forward = [
            np.arange(first, first + facts.num_forward, dtype=np.int64)
            for first, facts in zip(self.first, self.all_facts, strict=False)
        ]
        backward = [
            np.arange(first + facts.num_forward, first + len(facts.nodes), dtype=np.int64)
            for first, facts in zip(self.first, self.all_facts, strict=False)
        ]
        nobody = np.zeros(0, dtype=np.int64)
        if self.task.multiplexing is Multiplexing.TURNS:
            return [Stage(0, np.arange(self.first[-1], dtype=np.int64), nobody, [0.0])]
        if len(forward) == 1:
            return [Stage(0, np.concatenate([backward[0], forward[0]]), nobody, [0.0])]
        stages = []
        begin = 0
        for sub_array, fixed in enumerate(backward):
            other = (sub_array + 1) % len(backward)
            starts = self.all_facts[other].start_seconds[: len(forward[other]) + 1]
            stages.append(Stage(begin, fixed, forward[other], list(starts)))
            begin = stages[-1].end
        return stages

    def _book_tensors(self, sub_array: int, facts: Facts) -> None:
        is_ring = self.task.multiplexing is Multiplexing.RING
        for tensor in facts.tensors:
            if tensor.byte_class.is_static:
                self.base_bytes += tensor.memory_size
                continue
            begin, end = (self.number(sub_array, rank) for rank in tensor.lifetime)
            self.taken[begin] += tensor.memory_size
            self.created[begin] += tensor.memory_size
            is_result = tensor.byte_class is ByteClass.RESULT
            belongs_to_next = is_ring and sub_array == 0 and tensor.lifetime[0] < facts.num_forward
            if is_result and not belongs_to_next:
                continue  # stays to the end of the body
            self.given[end] += tensor.memory_size
            if self.place[begin] > self.place[end]:
                self.base_bytes += tensor.memory_size
