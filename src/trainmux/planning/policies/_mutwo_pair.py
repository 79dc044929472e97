"""A pair under way: body, copy lanes and lineages together, what is over the limit, and a way back.

Every decision is tried on the state itself and then kept or taken back (the paper's SwapOverhead edits the
schedule even when the recomputation wins).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainmux.ir import Multiplexing
from trainmux.planning._facts import facts_of
from trainmux.planning._policy import Task
from trainmux.planning._recompute import Lineage, recomp_memory
from trainmux.planning.policies._mutwo_body import Body, BodyState, Floats, Ints
from trainmux.planning.policies._mutwo_copies import Key, LaneIn, LaneOut, LaneState

_TOLERANCE = 1e-9
"""Times that differ by less than this share of the body's are equal."""


@dataclass(frozen=True)
class Recomputed:
    """A recomputation as booked: before which node, for how long, with how many bytes beyond its result."""

    before: int
    seconds: float
    beyond_bytes: int


@dataclass(frozen=True)
class PairState:
    """A copy of all that a trial may change."""

    body: BodyState
    lanes_in: tuple[LaneState, ...]
    recomputed: dict[Key, Recomputed]
    at_node: dict[int, tuple[Key, ...]]


class Pair:
    """One or two sub-arrays while they are scheduled.

    ``limit`` are the bytes there are. Copies take the time they take alone, or, where the other sub-array's
    copies run the other way, both at once.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.limit = task.limit_bytes
        self.all_facts = tuple(facts_of(profile) for profile in task.profiles)
        self.body = Body(task, self.all_facts)
        self.lineages = tuple(Lineage(facts) for facts in self.all_facts)
        self.tolerance = _TOLERANCE * float(self.body.seconds.sum())
        self.lanes_in = [LaneIn(stage, self.tolerance) for stage in range(len(self.body.stages))]
        self.lane_out = LaneOut(self.tolerance)
        self.recomputed: dict[Key, Recomputed] = {}
        self._at_node: dict[int, tuple[Key, ...]] = {}
        self._costs: dict[Key, tuple[frozenset[int], float, int]] = {}
        self._is_duplex = task.multiplexing is Multiplexing.RING and len(task.profiles) > 1

    def size(self, key: Key) -> int:
        return self.all_facts[key[0]].tensors[key[1]].memory_size

    def swap_in_seconds(self, key: Key) -> float:
        tensor = self.task.profiles[key[0]].tensors[key[1]]
        return tensor.swap_in_duplex_seconds if self._is_duplex else tensor.swap_in_seconds

    def swap_out_seconds(self, key: Key) -> float:
        tensor = self.task.profiles[key[0]].tensors[key[1]]
        return tensor.swap_out_duplex_seconds if self._is_duplex else tensor.swap_out_seconds

    def last_fw_access(self, key: Key) -> int:
        """The number of the node."""
        rank = self.all_facts[key[0]].tensors[key[1]].last_fw_access
        assert rank is not None
        return self.body.number(key[0], rank)

    def first_bw_access(self, key: Key) -> int:
        """The number of the node."""
        rank = self.all_facts[key[0]].tensors[key[1]].first_bw_access
        assert rank is not None
        return self.body.number(key[0], rank)

    def over(self, needed: Ints) -> Ints:
        """The positions that need more than there is, rising."""
        return np.nonzero(needed > self.limit)[0]

    def excess(self, needed: Ints) -> int:
        """By how much, over all positions together."""
        return int(np.maximum(needed - self.limit, 0).sum())

    def allowed(self, needed: Ints) -> Ints:
        """By node number, what each may need for a change to be safe: the limit, or no more than now."""
        allowed = np.empty_like(needed)
        allowed[self.body.order] = np.maximum(needed, self.limit)
        return allowed

    def lay_out(self, stage: int) -> Floats:
        """Find the prompts of a stage anew; returns when each position's turn comes."""
        times = self.body.start_times()
        self.lanes_in[stage].lay_out(self.body, times)
        return times

    def recompute(self, key: Key, graphs: dict[int, frozenset[int]]) -> None:
        """Book a recomputation: ``graphs`` are the ranks to run for it and for those that grow with it."""
        sub_array = key[0]
        self.body.drop(self.size(key), self.last_fw_access(key), self.first_bw_access(key))
        for recomputed, ranks in graphs.items():
            own = (sub_array, recomputed)
            before = self.first_bw_access(own)
            if own not in self.recomputed:
                self._at_node[before] = (*self._at_node.get(before, ()), own)
            was = self.recomputed[own].seconds if own in self.recomputed else 0.0
            seconds, beyond = self._cost(own, ranks)
            self.recomputed[own] = Recomputed(before, seconds, beyond)
            there = [self.recomputed[each] for each in self._at_node[before]]
            self.body.set_recompute(
                before, sum(each.seconds for each in there), max(each.beyond_bytes for each in there)
            )
            self._use_for_stalls(before, seconds - was)
        self.lay_out(int(self.body.stage_of[self.first_bw_access(key)]))

    def keep(self, key: Key) -> None:
        """Take back the swap or recomputation of a tensor; lineages aside."""
        before = self.first_bw_access(key)
        stage = int(self.body.stage_of[before])
        if key in self.recomputed:
            del self.recomputed[key]
            self.body.drop(-self.size(key), self.last_fw_access(key), before)
            self._at_node[before] = tuple(each for each in self._at_node[before] if each != key)
            there = [self.recomputed[each] for each in self._at_node[before]]
            self.body.set_recompute(
                before,
                sum(each.seconds for each in there),
                max((each.beyond_bytes for each in there), default=0),
            )
        else:
            lane = self.lanes_in[stage]
            lane.remove(next(index for index, copy in enumerate(lane.copies) if copy.key == key), self.body)
        self.lay_out(stage)

    def _cost(self, key: Key, ranks: frozenset[int]) -> tuple[float, int]:
        """Seconds to run the ranks again, and the bytes that takes beyond the result; the last is kept."""
        known = self._costs.get(key)
        if known is None or known[0] != ranks:
            facts = self.all_facts[key[0]]
            seconds = sum(facts.nodes[rank].seconds for rank in sorted(ranks))
            known = ranks, seconds, recomp_memory(facts, key[1], ranks) - self.size(key)
            self._costs[key] = known
        return known[1], known[2]

    def read_before(self, key: Key, node: int) -> None:
        """Note that a recomputation just before ``node`` reads a swapped tensor.

        Where that is the tensor's deadline, its copy has to end before the recomputation begins, not while it
        runs: it starts earlier if memory allows for that, and stalls compute if not.
        """
        stage = int(self.body.stage_of[node])
        lane = self.lanes_in[stage]
        index = next(index for index, copy in enumerate(lane.copies) if copy.key == key)
        if lane.copies[index].deadline != node or not lane.copies[index].overlaps_recomputes:
            return
        state, allowed = self.state(), self.allowed(self.body.needed())
        lane.read_at_deadline(index)
        self.lay_out(stage)
        if lane.is_hidden.all() and (self.body.needed() <= allowed[self.body.order]).all():
            return
        self.go_back(state)
        lane.read_at_deadline(index)
        lane.stall(index, float(self.body.recompute_seconds[node]), self.body)
        self.lay_out(stage)

    def _use_for_stalls(self, before: int, seconds: float) -> None:
        """Let time that recomputation adds shorten the stalls of copies that are under way then (A.5).

        Once for all of them together: the lane runs one copy at a time.
        """
        body = self.body
        if not body.stall_seconds.any():
            return
        lane = self.lanes_in[int(body.stage_of[before])]
        place = body.place[before]
        for index, copy in enumerate(lane.copies):
            if copy.stall_seconds <= 0 or not body.place[lane.prompts[index]] <= place:
                continue
            deadline = body.place[copy.deadline]
            if place < deadline or (place == deadline and copy.overlaps_recomputes):
                used = min(seconds, copy.stall_seconds)
                lane.stall(index, -used, body)
                seconds -= used

    def state(self) -> PairState:
        """A copy to go back to."""
        return PairState(
            self.body.state(),
            tuple(lane.state() for lane in self.lanes_in),
            dict(self.recomputed),
            dict(self._at_node),
        )

    def go_back(self, state: PairState) -> None:
        """Be again as when ``state`` was copied."""
        self.body.go_back(state.body)
        for lane, own in zip(self.lanes_in, state.lanes_in, strict=True):
            lane.go_back(own)
        self.recomputed = dict(state.recomputed)
        self._at_node = dict(state.at_node)
