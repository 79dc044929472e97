"""A hand-made plan to show: two fused sub-arrays in a ring, with swaps, recomputes and a measured pass.

The program keeps to the rules of `trainmux.ir`: each sub-array's nodes run in rank order, the backward pass
of one beside the forward pass of the other, every copy with its waits. Its clock is a small one of its own,
so that the tests of reporting depend on the types alone.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache

from sample_clock import clock

from trainmux.ir import (
    Attempt,
    ByteClass,
    Compute,
    DeviceFacts,
    Free,
    Instruction,
    Lane,
    MemoryPoint,
    Multiplexing,
    Offload,
    Part,
    Phase,
    Plan,
    Prefetch,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Program,
    Recomputation,
    Recompute,
    Schedule,
    SubArray,
    Swap,
    Timeline,
    Wait,
)

MIB = 1024 * 1024
GIB = 1024 * MIB
FIXED_BYTES = 384 * MIB
LINK_BYTES_PER_SECOND = 32e9
COPY_LATENCY_SECONDS = 8e-6
PREFETCH_AHEAD = 3
RELEASE_AFTER = 5


@dataclass(frozen=True)
class Sample:
    """Everything that a page, a text or a trace of a plan is made from."""

    plan: Plan
    program: Program
    profiles: tuple[Profile, ...]
    predicted: Timeline
    measured: Timeline
    prologue: Timeline
    epilogue: Timeline
    budget_curve: tuple[tuple[int, float], ...]


@cache
def ring_sample(num_layers: int = 12, *, seed: int = 0, layer_name: str = "blocks") -> Sample:
    """A row of ``num_layers`` transformer-like blocks, widths 4 and 3, in a ring."""
    profiles = (_profile(4, num_layers, layer_name), _profile(3, num_layers, layer_name))
    schedule = _schedule(profiles, num_layers)
    writer = _Writer(profiles, schedule)
    body = writer.body()
    predicted = clock("predicted", body, profiles, writer.memory, None)
    measured = clock("measured", body, profiles, writer.memory, random.Random(seed))
    peak = max(_total(point) for point in writer.memory)
    slab_bytes = int(peak * 1.01) // 512 * 512
    host_bytes = sum(profiles[swap.sub_array].tensors[swap.tensor].size_bytes for swap in schedule.swaps)
    prologue, epilogue = _before_and_after(profiles[0], schedule)
    program = Program(
        prologue=prologue,
        body=body,
        epilogue=epilogue,
        resident=tuple(
            (sub_array, position)
            for sub_array, profile in enumerate(profiles)
            for position, tensor in enumerate(profile.tensors)
            if tensor.byte_class.is_static
        ),
        slab_bytes=slab_bytes,
        host_bytes=host_bytes,
    )
    plan = _plan(profiles, schedule, predicted, slab_bytes + FIXED_BYTES, host_bytes)
    step = plan.step_seconds
    curve = tuple(
        (int(plan.budget_bytes * share), step * cost)
        for share, cost in (
            (0.7, float("inf")),
            (0.8, 1.34),
            (0.85, 1.19),
            (0.9, 1.1),
            (1.0, 1.0),
            (1.15, 0.972),
            (1.3, 0.955),
            (1.5, 0.951),
            (1.75, 0.951),
        )
    )
    around = [clock("predicted", part, profiles, [], None) for part in (prologue, epilogue)]
    return Sample(plan, program, profiles, predicted, measured, *around, curve)


def _before_and_after(profile: Profile, schedule: Schedule) -> tuple[Part, Part]:
    """The first sub-array's forward pass with a copy out, and its other nodes with that copy back."""
    num_forward = sum(node.phase is Phase.FORWARD for node in profile.nodes)
    swapped = next(swap.tensor for swap in schedule.swaps if swap.sub_array == 0)
    forward = [Compute(0, rank) for rank in range(num_forward)]
    others = [Compute(0, rank) for rank in range(num_forward, len(profile.nodes))]
    return Part((*forward, Offload(0, swapped)), ()), Part((Prefetch(0, swapped), *others), ())


def turns_sample() -> Sample:
    """The smallest plan there is: one member, nothing swapped, nothing recomputed, nothing else tried."""
    tensors = (_tensor("weight", ByteClass.PARAMETER, 4 * MIB), _tensor("out", ByteClass.RESULT, 512))
    nodes = (
        ProfiledNode("forward", Phase.FORWARD, (0,), (1,), (), 1e-3, 2 * MIB),
        ProfiledNode("update", Phase.UPDATE, (1,), (), (0,), 5e-4),
    )
    profile = Profile("single", "analytic", 1, DeviceFacts("cpu", 8 * GIB, GIB), tensors, nodes)
    order = ((0, 0), (0, 1))
    schedule = Schedule(Multiplexing.TURNS, order, (), ())
    writer = _Writer((profile,), schedule)
    body = writer.body()
    timeline = clock("predicted", body, (profile,), writer.memory, None)
    plan = Plan(
        policy="none",
        budget_bytes=8 * GIB,
        fixed_bytes=0,
        profiles=("single",),
        partition=(SubArray(("only",), 0),),
        schedule=schedule,
        peak_bytes=6 * MIB + 512,
        host_bytes=0,
        step_seconds=timeline.seconds,
        stall_seconds=0.0,
        recompute_seconds=0.0,
        swap_overlap=0.0,
        recompute_share=0.0,
        plain_peak_bytes=6 * MIB + 512,
    )
    program = Program(Part((), ()), body, Part((), ()), ((0, 0),), 6 * MIB + 512, 0)
    nothing = clock("predicted", Part((), ()), (profile,), [], None)
    measured = replace(timeline, source="measured")
    return Sample(plan, program, (profile,), timeline, measured, nothing, nothing, ())


def _tensor(name: str, byte_class: ByteClass, size_bytes: int) -> ProfiledTensor:
    seconds = COPY_LATENCY_SECONDS + size_bytes / LINK_BYTES_PER_SECOND
    return ProfiledTensor(name, byte_class, size_bytes, seconds, seconds, seconds * 1.08, seconds * 1.08)


def _profile(width: int, num_layers: int, layer_name: str) -> Profile:
    tensors: list[ProfiledTensor] = []
    at: dict[str, int] = {}

    def add(key: str, name: str, byte_class: ByteClass, size_bytes: int) -> int:
        at[key] = len(tensors)
        tensors.append(_tensor(name, byte_class, size_bytes))
        return at[key]

    add("tokens", "batch.tokens", ByteClass.BATCH, 256 * 1024 * width)
    add("mask", "causal_mask", ByteClass.CONSTANT, 2 * MIB)
    nodes: list[ProfiledNode] = []
    for layer in range(num_layers):
        name = f"{layer_name}.{layer}"
        weight = add(f"w{layer}", f"{name}.weight", ByteClass.PARAMETER, 7 * MIB * width)
        add(f"o{layer}", f"{name}.weight.exp_avg", ByteClass.OPTIMIZER_STATE, 14 * MIB * width)
        below = at[f"h{layer - 1}"] if layer else at["tokens"]
        mixed = add(
            f"a{layer}", f"{name}.attention.out", ByteClass.FEATURE_MAP, (34 + layer % 3) * MIB * width
        )
        scores = add(f"s{layer}", f"{name}.attention.scores", ByteClass.TEMPORARY, 6 * MIB * width)
        reads = (below, weight, at["mask"])
        seconds = (0.42 + 0.05 * (layer % 4)) * 1e-3 * width
        nodes.append(
            ProfiledNode(
                f"{name}.attention", Phase.FORWARD, reads, (mixed, scores), (), seconds, 8 * MIB * width
            )
        )
        hidden = add(f"h{layer}", f"{name}.mlp.hidden", ByteClass.FEATURE_MAP, (42 + layer % 2) * MIB * width)
        nodes.append(
            ProfiledNode(f"{name}.mlp", Phase.FORWARD, (mixed, weight), (hidden,), (), 0.55e-3 * width)
        )
    loss = add("loss", "loss", ByteClass.RESULT, 512)
    top = add("g", "loss.grad", ByteClass.GRADIENT_MAP, 8 * MIB * width)
    nodes.append(
        ProfiledNode("loss", Phase.FORWARD, (at[f"h{num_layers - 1}"],), (loss,), (), 0.12e-3 * width)
    )
    nodes.append(ProfiledNode("loss.backward", Phase.BACKWARD, (loss,), (top,), (), 0.1e-3 * width))
    above = top
    for layer in reversed(range(num_layers)):
        name = f"{layer_name}.{layer}"
        inner = add(f"gh{layer}", f"{name}.mlp.hidden.grad", ByteClass.GRADIENT_MAP, 12 * MIB * width)
        reads = (above, at[f"h{layer}"], at[f"a{layer}"])
        nodes.append(
            ProfiledNode(f"{name}.mlp.backward", Phase.BACKWARD, reads, (inner,), (), 1.05e-3 * width)
        )
        gradient = add(f"gw{layer}", f"{name}.weight.grad", ByteClass.GRADIENT, 7 * MIB * width)
        outer = add(f"gx{layer}", f"{name}.grad", ByteClass.GRADIENT_MAP, 8 * MIB * width)
        reads = (inner, at[f"a{layer}"], at[f"w{layer}"])
        nodes.append(
            ProfiledNode(
                f"{name}.attention.backward",
                Phase.BACKWARD,
                reads,
                (gradient, outer),
                (),
                0.95e-3 * width,
                10 * MIB * width,
            )
        )
        changes = (at[f"w{layer}"], at[f"o{layer}"])
        nodes.append(ProfiledNode(f"{name}.adamw", Phase.UPDATE, (gradient,), (), changes, 0.09e-3 * width))
        above = outer
    device = DeviceFacts("NVIDIA H200", 139 * GIB, 96 * GIB)
    return Profile(f"fused-{width}", "measured", width, device, tuple(tensors), tuple(nodes))


def _schedule(profiles: tuple[Profile, ...], num_layers: int) -> Schedule:
    forward = [_ranks(profile, Phase.FORWARD) for profile in profiles]
    backward = [
        [rank for rank, node in enumerate(profile.nodes) if node.phase is not Phase.FORWARD]
        for profile in profiles
    ]
    order: list[tuple[int, int]] = []
    for back, ahead in ((0, 1), (1, 0)):
        order += _interleaved([(back, r) for r in backward[back]], [(ahead, r) for r in forward[ahead]])
    swaps, recomputes = [], []
    place = {node: position for position, node in enumerate(order)}
    for sub_array, profile in enumerate(profiles):
        uses = _uses(profile)
        for position, tensor in enumerate(profile.tensors):
            if tensor.byte_class is not ByteClass.FEATURE_MAP:
                continue
            last_forward = max(r for r in uses[position] if profile.nodes[r].phase is Phase.FORWARD)
            first_backward = min(r for r in uses[position] if profile.nodes[r].phase is Phase.BACKWARD)
            layer = uses[position][0] // 2
            if layer < num_layers // 3:
                last, first = place[sub_array, last_forward], place[sub_array, first_backward]
                swaps.append(
                    Swap(
                        sub_array,
                        position,
                        (sub_array, last_forward),
                        order[min(last + RELEASE_AFTER, len(order) - 1)],
                        order[max(first - PREFETCH_AHEAD, 0)],
                        f"case 2b: idle for {12 + 3 * (num_layers - layer)} ms, hidden by the other "
                        "sub-array's forward pass and own backward nodes",
                    )
                )
            elif num_layers // 3 <= layer < 2 * num_layers // 3 and tensor.name.endswith("hidden"):
                recomputes.append(
                    Recomputation(
                        sub_array,
                        position,
                        (uses[position][0],),
                        (sub_array, first_backward),
                        "cheaper than the 1.9 ms stall that its swap would leave inside the peak interval",
                    )
                )
    return Schedule(Multiplexing.RING, tuple(order), tuple(swaps), tuple(recomputes))


def _ranks(profile: Profile, phase: Phase) -> list[int]:
    return [rank for rank, node in enumerate(profile.nodes) if node.phase is phase]


def _interleaved(long: list[tuple[int, int]], short: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = [((position + 0.5) / len(long), 0, node) for position, node in enumerate(long)]
    merged += [((position + 0.5) / len(short), 1, node) for position, node in enumerate(short)]
    return [node for _, _, node in sorted(merged)]


def _uses(profile: Profile) -> dict[int, list[int]]:
    """Ranks that create, read or change each tensor, in order."""
    uses: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(profile.nodes):
        for position in (*node.creates, *node.reads, *node.changes):
            uses[position].append(rank)
    return uses


@dataclass
class _Writer:
    """Writes the body and counts its bytes."""

    profiles: tuple[Profile, ...]
    schedule: Schedule
    instructions: list[Instruction] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)

    def body(self) -> Part:
        self.live: dict[ByteClass, int] = defaultdict(int)
        self.offloads: dict[tuple[int, int], int] = {}
        self.prefetches: dict[tuple[int, int], int] = {}
        self.last_node = -1
        swapped = {(swap.sub_array, swap.tensor): swap for swap in self.schedule.swaps}
        again = {(one.sub_array, one.tensor): one for one in self.schedule.recomputes}
        self._begin(swapped, again)
        uses = [_uses(profile) for profile in self.profiles]
        releases, prefetches, recomputes = _by_node(swapped, again)
        released: set[tuple[int, int]] = set()
        for node in self.schedule.order:
            for key in releases[node]:
                if key in self.offloads:
                    self._release(key)
                    released.add(key)
            for key in prefetches[node]:
                self._prefetch(key)
            for key in recomputes[node]:
                self._recompute(key, again[key].nodes)
            self._run(*node, uses[node[0]], swapped, again)
        for key in self.offloads:
            if key not in released:
                self._release(key)
        return Part(tuple(self.instructions), ())

    def _begin(
        self, swapped: dict[tuple[int, int], Swap], again: dict[tuple[int, int], Recomputation]
    ) -> None:
        """What is on the device already: static tensors, and in a ring what the first forward pass left."""
        first = self.schedule.order[0]
        for sub_array, profile in enumerate(self.profiles):
            in_flight = sub_array == 0 and profile.nodes[first[1]].phase is Phase.BACKWARD
            for position, tensor in enumerate(profile.tensors):
                key = (sub_array, position)
                saved = tensor.byte_class in (ByteClass.FEATURE_MAP, ByteClass.RESULT)
                if tensor.byte_class.is_static or (
                    in_flight and saved and key not in swapped and key not in again
                ):
                    self.live[tensor.byte_class] += tensor.size_bytes

    def _recompute(self, key: tuple[int, int], nodes: tuple[int, ...]) -> None:
        for node in nodes:
            self._emit(Recompute(key[0], node, (key[1],)), self._node(key[0], node).workspace_bytes)
            self.last_node = len(self.instructions) - 1

    def _run(
        self,
        sub_array: int,
        rank: int,
        uses: dict[int, list[int]],
        swapped: dict[tuple[int, int], Swap],
        again: dict[tuple[int, int], Recomputation],
    ) -> None:
        node = self._node(sub_array, rank)
        for position in (*node.reads, *node.changes):
            if (prefetch := self.prefetches.pop((sub_array, position), None)) is not None:
                self._emit(Wait(Lane.COMPUTE, prefetch))
        for position in node.creates:
            self._take((sub_array, position))
        self._emit(Compute(sub_array, rank), node.workspace_bytes)
        self.last_node = len(self.instructions) - 1
        for position in (*node.creates, *node.reads):
            key = (sub_array, position)
            tensor = self.profiles[sub_array].tensors[position]
            forward = [r for r in uses[position] if self._node(sub_array, r).phase is Phase.FORWARD]
            if key in swapped and rank == forward[-1]:
                self._emit(Wait(Lane.OUT, self.last_node))
                self._emit(Offload(*key))
                self.offloads[key] = len(self.instructions) - 1
            elif not tensor.byte_class.is_static and (
                rank == uses[position][-1] or (key in again and rank == forward[-1])
            ):
                self._give(key)

    def _node(self, sub_array: int, rank: int) -> ProfiledNode:
        return self.profiles[sub_array].nodes[rank]

    def _take(self, key: tuple[int, int]) -> None:
        tensor = self.profiles[key[0]].tensors[key[1]]
        self.live[tensor.byte_class] += tensor.size_bytes

    def _give(self, key: tuple[int, int]) -> None:
        tensor = self.profiles[key[0]].tensors[key[1]]
        self.live[tensor.byte_class] -= tensor.size_bytes
        self._emit(Free(*key))

    def _release(self, key: tuple[int, int]) -> None:
        self._emit(Wait(Lane.COMPUTE, self.offloads[key]))
        self._give(key)

    def _prefetch(self, key: tuple[int, int]) -> None:
        if self.last_node >= 0:
            self._emit(Wait(Lane.IN, self.last_node))
        if key in self.offloads:
            self._emit(Wait(Lane.IN, self.offloads[key]))
        self._take(key)
        self._emit(Prefetch(*key))
        self.prefetches[key] = len(self.instructions) - 1

    def _emit(self, instruction: Instruction, workspace_bytes: int = 0) -> None:
        if isinstance(instruction, Recompute):
            for position in instruction.keeps:
                self._take((instruction.sub_array, position))
        self.instructions.append(instruction)
        by_class = tuple((name, self.live[name]) for name in ByteClass if self.live[name])
        self.memory.append(MemoryPoint(len(self.instructions) - 1, by_class, workspace_bytes))


_Keys = dict[tuple[int, int], list[tuple[int, int]]]


def _by_node(
    swapped: dict[tuple[int, int], Swap], again: dict[tuple[int, int], Recomputation]
) -> tuple[_Keys, _Keys, _Keys]:
    """What is given back, fetched and made again before each node."""
    releases, prefetches, recomputes = defaultdict(list), defaultdict(list), defaultdict(list)
    for key, swap in swapped.items():
        releases[swap.release_before].append(key)
        prefetches[swap.prefetch_prompt].append(key)
    for key, one in again.items():
        recomputes[one.before].append(key)
    return releases, prefetches, recomputes


def _total(point: MemoryPoint) -> int:
    return sum(size for _, size in point.bytes_by_class) + point.workspace_bytes


def _plan(
    profiles: tuple[Profile, ...], schedule: Schedule, predicted: Timeline, peak_bytes: int, host_bytes: int
) -> Plan:
    step = predicted.seconds
    budget_bytes = int(peak_bytes * 1.06)

    def tried(
        policy: str, widths: tuple[int, ...], how: Multiplexing, cost: float, memory: float, why: str
    ) -> Attempt:
        return Attempt(
            policy,
            widths,
            how,
            step * cost,
            int(peak_bytes * memory),
            predicted.stall_seconds * cost**3,
            predicted.recompute_seconds * cost,
            why,
        )

    turns, ring = Multiplexing.TURNS, Multiplexing.RING
    return Plan(
        policy="mutwo",
        budget_bytes=budget_bytes,
        fixed_bytes=FIXED_BYTES,
        profiles=tuple(profile.fingerprint for profile in profiles),
        partition=(
            SubArray(("lr=1e-4", "lr=2e-4", "lr=5e-4", "lr=1e-3"), 0),
            SubArray(("lr=2e-3", "lr=5e-3", "lr=1e-2"), 1),
        ),
        schedule=schedule,
        peak_bytes=peak_bytes,
        host_bytes=host_bytes,
        step_seconds=step,
        stall_seconds=predicted.stall_seconds,
        recompute_seconds=predicted.recompute_seconds,
        swap_overlap=predicted.hidden_copy_seconds / predicted.copy_seconds,
        recompute_share=predicted.recompute_seconds / predicted.compute_seconds,
        attempts=(
            tried(
                "none", (7,), turns, float("inf"), 1.72, "does not fit: needs 6.12 GiB more than the budget"
            ),
            tried("none", (2, 2, 2, 1), turns, 1.31, 0.71, "31.0% slower"),
            tried("capuchin", (7,), turns, 1.18, 1.05, "18.0% slower: 21.4 ms of stalls at the peak"),
            tried("recompute_only", (7,), turns, 1.22, 1.04, "22.0% slower"),
            tried("mutwo", (4, 3), ring, 1.0, 1.0, ""),
            tried("mutwo", (2, 2, 2, 1), ring, 1.09, 0.93, "9.0% slower"),
            tried("mutwo", (1,) * 7, ring, 1.44, 0.66, "44.0% slower: width 1 does not fill the device"),
        ),
        plain_peak_bytes=budget_bytes * 5 // 4,
        num_left_out=1234,
    )
