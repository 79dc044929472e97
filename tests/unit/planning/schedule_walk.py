"""A schedule carried out on paper: which version of which tensor is on the device, and how many bytes.

Written from the meaning of the records in `trainmux.ir`, without any of the planner's code. The body is
walked three times, action by action, so that what one pass leaves for the next is there; in a ring the first
sub-array's forward pass comes before. Every read is checked to find the value that a step without a plan
would have found.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainmux.ir import ByteClass, Multiplexing, Phase, Profile, ProfiledNode, Recomputation, Schedule, Swap

Key = tuple[int, int]
Version = tuple[int, int]
"""The step in which a value was made (for a static tensor: which step it is) and how often it was changed."""


def walk(profiles: Sequence[Profile], schedule: Schedule) -> list[int]:
    """Bytes needed at each position of the body once it repeats itself; asserts that every value is right."""
    walker = _Walker(profiles, schedule)
    order = schedule.order
    if schedule.multiplexing is Multiplexing.RING:
        skipped: list[Key] = []
        for node in order:
            if node[0] == 0 and node[1] < walker.num_forward[0]:
                walker.turn(node, skipped)
                skipped = []
            else:
                skipped.append(node)
    for _ in range(3):
        peaks = [walker.turn(node, []) for node in order]
        walker.end_body()
    return peaks


class _Walker:
    def __init__(self, profiles: Sequence[Profile], schedule: Schedule) -> None:
        self.profiles = profiles
        self.schedule = schedule
        self.num_forward = [sum(node.phase is Phase.FORWARD for node in p.nodes) for p in profiles]
        self.steps = [0] * len(profiles)
        self.there: dict[Key, Version] = {}
        self.on_host: dict[Key, Version] = {}
        self.live_bytes = 0
        self.swaps: dict[Key, Swap] = {(swap.sub_array, swap.tensor): swap for swap in schedule.swaps}
        self.recomputes = {(record.sub_array, record.tensor): record for record in schedule.recomputes}
        assert len(self.swaps) == len(schedule.swaps)
        assert len(self.recomputes) == len(schedule.recomputes)
        assert not self.swaps.keys() & self.recomputes.keys()
        for sub_array, profile in enumerate(profiles):
            for tensor, record in enumerate(profile.tensors):
                if record.byte_class.is_static:
                    self.put((sub_array, tensor), (0, 0))

    def put(self, key: Key, version: Version) -> None:
        assert key not in self.there, f"{key} is on the device already"
        self.there[key] = version
        self.live_bytes += self.profiles[key[0]].tensors[key[1]].size_bytes

    def free(self, key: Key) -> None:
        del self.there[key]
        self.live_bytes -= self.profiles[key[0]].tensors[key[1]].size_bytes

    def turn(self, node: Key, skipped: Sequence[Key]) -> int:
        """Let a node have its turn; releases in front of ``skipped`` ones happen here. Returns the peak."""
        sub_array, rank = node
        for key, swap in self.swaps.items():
            if swap.release_before in (node, *skipped) and key in self.there and key in self.on_host:
                self.free(key)
        for key, swap in self.swaps.items():
            if swap.prefetch_prompt == node and key in self.on_host:
                self.put(key, self.on_host.pop(key))
        peak = self.live_bytes
        again = [record for record in self.recomputes.values() if record.before == node]
        for record in sorted(again, key=lambda record: record.nodes[-1]):
            peak = max(peak, self.recompute(record))
        kernel = self.profiles[sub_array].nodes[rank]
        for tensor in (*kernel.reads, *kernel.changes):
            assert self.there[sub_array, tensor] == self.expected(sub_array, rank, tensor), (node, tensor)
        for tensor in kernel.creates:
            self.put((sub_array, tensor), (self.steps[sub_array], 0))
        peak = max(peak, self.live_bytes + kernel.workspace_bytes)
        for tensor in kernel.changes:
            step, version = self.there[sub_array, tensor]
            self.there[sub_array, tensor] = (step, version + 1)
        for key, swap in self.swaps.items():
            if swap.offload_after == node:
                self.on_host[key] = self.there[key]
        self.free_unused(node, kernel)
        if rank == len(self.profiles[sub_array].nodes) - 1:
            self.end_step(sub_array)
        return peak

    def free_unused(self, node: Key, kernel: ProfiledNode) -> None:
        """Free what no later node of this step uses, and what is dropped after its last forward use."""
        sub_array, rank = node
        nodes, num_forward = self.profiles[sub_array].nodes, self.num_forward[sub_array]
        for tensor in dict.fromkeys((*kernel.reads, *kernel.creates, *kernel.changes)):
            byte_class = self.profiles[sub_array].tensors[tensor].byte_class
            if byte_class.is_static or byte_class is ByteClass.RESULT:
                continue
            later = [r for r in range(rank + 1, len(nodes)) if tensor in (*nodes[r].reads, *nodes[r].changes)]
            is_last_forward = rank < num_forward and not any(r < num_forward for r in later)
            if not later or ((sub_array, tensor) in self.recomputes and is_last_forward):
                self.free((sub_array, tensor))

    def recompute(self, record: Recomputation) -> int:
        """Run nodes again; returns the most bytes on the device meanwhile."""
        nodes, tensors = self.profiles[record.sub_array].nodes, self.profiles[record.sub_array].tensors
        made: dict[int, int] = {}
        peak = self.live_bytes
        assert list(record.nodes) == sorted(record.nodes)
        for index, rank in enumerate(record.nodes):
            assert nodes[rank].is_repeatable
            assert not nodes[rank].changes
            for tensor in nodes[rank].reads:
                if tensor not in made:
                    expected = self.expected(record.sub_array, rank, tensor)
                    assert self.there[record.sub_array, tensor] == expected, (record, rank, tensor)
            made |= {tensor: tensors[tensor].size_bytes for tensor in nodes[rank].creates}
            peak = max(peak, self.live_bytes + sum(made.values()) + nodes[rank].workspace_bytes)
            needed = {tensor for later in record.nodes[index + 1 :] for tensor in nodes[later].reads}
            made = {tensor: size for tensor, size in made.items() if tensor in {*needed, record.tensor}}
        assert list(made) == [record.tensor]
        self.put((record.sub_array, record.tensor), (self.steps[record.sub_array], 0))
        return peak

    def expected(self, sub_array: int, rank: int, tensor: int) -> Version:
        """What a step without a plan finds: this step's value, changed by every rank before this one."""
        before = self.profiles[sub_array].nodes[:rank]
        return self.steps[sub_array], sum(tensor in node.changes for node in before)

    def end_step(self, sub_array: int) -> None:
        """Static tensors begin a new step; results of the ring's first forward pass go with theirs."""
        self.steps[sub_array] += 1
        for key in [key for key in self.there if key[0] == sub_array]:
            if self.profiles[sub_array].tensors[key[1]].byte_class.is_static:
                self.there[key] = (self.steps[sub_array], 0)
            elif self.belongs_to_next(key):
                self.free(key)

    def end_body(self) -> None:
        """All other results go with the body."""
        for key in list(self.there):
            is_result = self.profiles[key[0]].tensors[key[1]].byte_class is ByteClass.RESULT
            if is_result and not self.belongs_to_next(key):
                self.free(key)

    def belongs_to_next(self, key: Key) -> bool:
        """Whether it is a result that the ring's first sub-array makes for its next step."""
        sub_array, tensor = key
        if self.profiles[sub_array].tensors[tensor].byte_class is not ByteClass.RESULT or sub_array != 0:
            return False
        maker = next(rank for rank, node in enumerate(self.profiles[0].nodes) if tensor in node.creates)
        return self.schedule.multiplexing is Multiplexing.RING and maker < self.num_forward[0]
