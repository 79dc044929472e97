"""A schedule carried out on paper: which version of which tensor is on the device, and how many bytes that is.

Written from the meaning of the records in `trainmux.ir`, without any of the planner's code: two passes through
the body are walked, action by action, so that what one pass leaves for the next is there. Every read is
checked to find the value that a step without a plan would have found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmux.ir import ByteClass, Multiplexing, Phase, Profile, Recomputation, Schedule

Key = tuple[int, int]


@dataclass
class Walk:
    """The device while a schedule is walked. ``peaks`` are bytes by position of the last pass."""

    profiles: Sequence[Profile]
    schedule: Schedule
    versions: dict[Key, tuple[int, int]] = field(default_factory=dict)
    on_host: dict[Key, tuple[int, int]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    live_bytes: int = 0
    peaks: list[int] = field(default_factory=list)

    def size(self, key: Key) -> int:
        return self.profiles[key[0]].tensors[key[1]].size_bytes

    def put(self, key: Key, version: tuple[int, int]) -> None:
        assert key not in self.versions, f"{key} is on the device already"
        self.versions[key] = version
        self.live_bytes += self.size(key)

    def free(self, key: Key) -> None:
        del self.versions[key]
        self.live_bytes -= self.size(key)


def walk(profiles: Sequence[Profile], schedule: Schedule) -> list[int]:
    """Bytes needed at each position of the body once it repeats itself; asserts that every value is right."""
    state = Walk(profiles, schedule)
    for sub_array, profile in enumerate(profiles):
        state.steps.append(0)
        for tensor, record in enumerate(profile.tensors):
            if record.byte_class.is_static:
                state.put((sub_array, tensor), (0, 0))
    is_ring = schedule.multiplexing is Multiplexing.RING
    swaps = {(swap.sub_array, swap.tensor): swap for swap in schedule.swaps}
    recomputed = {(record.sub_array, record.tensor): record for record in schedule.recomputes}
    assert len(swaps) == len(schedule.swaps)
    assert len(recomputed) == len(schedule.recomputes)
    assert not swaps.keys() & recomputed.keys()
    # The first passes lack what an earlier one would have left; the ring's first forward pass comes before.
    passes = [_forward_only(profiles, schedule)] if is_ring else []
    passes += [list(schedule.order)] * 3
    for order in passes:
        state.peaks = []
        for node in order:
            _turn(state, node, swaps, recomputed, order is passes[0] and is_ring)
        if not is_ring:
            for key in [key for key in state.versions if _class(state, key) is ByteClass.RESULT]:
                state.free(key)
        else:
            first_forward = set(range(_num_forward(profiles[0])))
            for key in [key for key in state.versions if _class(state, key) is ByteClass.RESULT]:
                maker = next(r for r, n in enumerate(profiles[key[0]].nodes) if key[1] in n.creates)
                if key[0] != 0 or maker not in first_forward:
                    state.free(key)
    return state.peaks


def _forward_only(profiles: Sequence[Profile], schedule: Schedule) -> list[Key]:
    return [node for node in schedule.order if node[0] == 0 and node[1] < _num_forward(profiles[0])]


def _num_forward(profile: Profile) -> int:
    return sum(node.phase is Phase.FORWARD for node in profile.nodes)


def _class(state: Walk, key: Key) -> ByteClass:
    return state.profiles[key[0]].tensors[key[1]].byte_class


def _turn(state: Walk, node: Key, swaps: dict, recomputed: dict, is_prologue: bool) -> None:
    sub_array, rank = node
    before_node = state.live_bytes
    order = list(state.schedule.order)
    if is_prologue:
        # What stands in front of nodes that are left out comes in front of the next one that is there.
        here = order.index(node)
        turns = [node]
        while here > 0 and not (order[here - 1][0] == 0 and order[here - 1][1] < _num_forward(state.profiles[0])):
            here -= 1
            turns.append(order[here])
    else:
        turns = [node]
    highest = 0
    for key, swap in swaps.items():
        if swap.release_before in turns and key in state.versions and key in state.on_host:
            state.free(key)
    for key, swap in swaps.items():
        if swap.prefetch_before == node and key in state.on_host and not is_prologue:
            state.put(key, state.on_host.pop(key))
    highest = max(highest, state.live_bytes)
    again = [record for record in recomputed.values() if record.before == node and not is_prologue]
    for record in sorted(again, key=lambda record: max(record.nodes)):
        highest = max(highest, _recompute(state, record))
    record = state.profiles[sub_array].nodes[rank]
    for read in (*record.reads, *record.changes):
        assert state.versions[sub_array, read] == _expected(state, sub_array, rank, read), (node, read)
    for made in record.creates:
        state.put((sub_array, made), (state.steps[sub_array], 0))
    highest = max(highest, state.live_bytes + record.workspace_bytes)
    for changed in record.changes:
        step, version = state.versions[sub_array, changed]
        state.versions[sub_array, changed] = (step, version + 1)
    _after(state, node, swaps, recomputed)
    if rank == len(state.profiles[sub_array].nodes) - 1:
        state.steps[sub_array] += 1
        _end_of_step(state, sub_array)
    state.peaks.append(highest)
    assert before_node >= 0


def _end_of_step(state: Walk, sub_array: int) -> None:
    """Static tensors keep counting; results of the ring's first forward pass go with its step."""
    for key in list(state.versions):
        if key[0] != sub_array:
            continue
        if _class(state, key).is_static:
            state.versions[key] = (state.steps[sub_array], 0)
        elif (
            _class(state, key) is ByteClass.RESULT
            and sub_array == 0
            and state.schedule.multiplexing is Multiplexing.RING
        ):
            maker = next(r for r, n in enumerate(state.profiles[0].nodes) if key[1] in n.creates)
            if maker < _num_forward(state.profiles[0]):
                state.free(key)


def _expected(state: Walk, sub_array: int, rank: int, tensor: int) -> tuple[int, int]:
    """The version a step without a plan would find: this step's, changed by every rank before this one."""
    changes = sum(tensor in node.changes for node in state.profiles[sub_array].nodes[:rank])
    return state.steps[sub_array], changes


def _after(state: Walk, node: Key, swaps: dict, recomputed: dict) -> None:
    sub_array, rank = node
    profile = state.profiles[sub_array]
    for key, swap in swaps.items():
        if swap.offload_after == node:
            state.on_host[key] = state.versions[key]
    touched = profile.nodes[rank]
    for tensor in dict.fromkeys((*touched.reads, *touched.creates, *touched.changes)):
        key = (sub_array, tensor)
        kind = _class(state, key)
        if kind.is_static or kind is ByteClass.RESULT:
            continue
        later = [
            other
            for other in range(rank + 1, len(profile.nodes))
            if tensor in (*profile.nodes[other].reads, *profile.nodes[other].changes)
        ]
        is_last_forward = rank < _num_forward(profile) and not any(r < _num_forward(profile) for r in later)
        if not later or (key in recomputed and is_last_forward):
            state.free(key)


def _recompute(state: Walk, record: Recomputation) -> int:
    """Run the nodes again; returns the most bytes on the device meanwhile."""
    profile = state.profiles[record.sub_array]
    extra: dict[int, int] = {}
    highest = state.live_bytes
    assert list(record.nodes) == sorted(record.nodes)
    for place, rank in enumerate(record.nodes):
        node = profile.nodes[rank]
        assert node.is_repeatable
        assert not node.changes
        for read in node.reads:
            if read in extra:
                continue
            version = state.versions[record.sub_array, read]
            assert version == _expected(state, record.sub_array, rank, read), (record, rank, read)
        for made in node.creates:
            extra[made] = profile.tensors[made].size_bytes
        highest = max(highest, state.live_bytes + sum(extra.values()) + node.workspace_bytes)
        needed = {read for later in record.nodes[place + 1 :] for read in profile.nodes[later].reads}
        extra = {made: size for made, size in extra.items() if made in needed or made == record.tensor}
    assert list(extra) == [record.tensor]
    state.put((record.sub_array, record.tensor), (state.steps[record.sub_array], 0))
    return highest
