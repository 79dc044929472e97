"""A plan to show: two fused sub-arrays in a ring, with swaps, recomputes and a measured pass."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from trainmux.ir import (
    Attempt,
    ByteClass,
    DeviceFacts,
    Multiplexing,
    Phase,
    Plan,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Program,
    Recomputation,
    Schedule,
    SubArray,
    Swap,
    Timeline,
)
from trainmux.planning import timeline
from trainmux.planning._rewrite import draft, place

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
    program = place(profiles, draft(profiles, schedule))
    predicted = timeline(program.body, profiles)
    plan = _plan(profiles, schedule, predicted, program.slab_bytes + FIXED_BYTES, program.host_bytes)
    shares = (0.7, 0.8, 0.85, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75)
    costs = (float("inf"), 1.34, 1.19, 1.1, 1.0, 0.972, 0.955, 0.951, 0.951)
    return Sample(
        plan,
        program,
        profiles,
        predicted,
        replace(timeline(program.body, _jittered(profiles, seed)), source="measured"),
        timeline(program.prologue, profiles),
        timeline(program.epilogue, profiles),
        tuple(
            (int(plan.budget_bytes * share), plan.step_seconds * cost)
            for share, cost in zip(shares, costs, strict=True)
        ),
    )


def _jittered(profiles: Sequence[Profile], seed: int) -> list[Profile]:
    """Profiles whose every node takes a little longer or shorter."""
    rng = random.Random(seed)

    def jittered(node: ProfiledNode) -> ProfiledNode:
        return replace(node, seconds=node.seconds * rng.lognormvariate(0.02, 0.06))

    return [replace(profile, nodes=tuple(map(jittered, profile.nodes))) for profile in profiles]


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
    program = place([profile], draft([profile], schedule))
    predicted = timeline(program.body, [profile])
    plan = Plan(
        policy="none",
        budget_bytes=8 * GIB,
        fixed_bytes=0,
        profiles=("single",),
        partition=(SubArray(("only",), 0),),
        schedule=schedule,
        peak_bytes=6 * MIB + 512,
        host_bytes=0,
        step_seconds=predicted.seconds,
        stall_seconds=0.0,
        recompute_seconds=0.0,
        swap_overlap=0.0,
        recompute_share=0.0,
        plain_peak_bytes=6 * MIB + 512,
    )
    nothing = timeline(program.prologue, [profile])
    measured = replace(predicted, source="measured")
    return Sample(plan, program, (profile,), predicted, measured, nothing, nothing, ())


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
