"""A plan to show: two fused sub-arrays in a ring, with swaps, recomputes and a measured pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from trainmux.ir import (
    Attempt,
    ByteClass,
    DeviceFacts,
    Multiplexing,
    Phase,
    PlanRecord,
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

    plan: PlanRecord
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
    plan = PlanRecord(
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
    nodes: list[ProfiledNode] = []
    at: dict[str, int] = {}

    def add(key: str, name: str, byte_class: ByteClass, mebibytes: float) -> int:
        at[key] = len(tensors)
        tensors.append(_tensor(name, byte_class, round(mebibytes * MIB * width)))
        return at[key]

    def run(
        name: str,
        phase: Phase,
        reads: tuple[int, ...],
        creates: tuple[int, ...],
        milliseconds: float,
        workspace: int = 0,
        changes: tuple[int, ...] = (),
    ) -> None:
        seconds, scratch = milliseconds * 1e-3 * width, workspace * MIB * width
        nodes.append(ProfiledNode(name, phase, reads, creates, changes, seconds, scratch))

    forward, backward = Phase.FORWARD, Phase.BACKWARD
    add("tokens", "batch.tokens", ByteClass.BATCH, 0.25)
    add("mask", "causal_mask", ByteClass.CONSTANT, 2 / width)
    for layer in range(num_layers):
        name = f"{layer_name}.{layer}"
        weight = add(f"w{layer}", f"{name}.weight", ByteClass.PARAMETER, 7)
        add(f"o{layer}", f"{name}.weight.exp_avg", ByteClass.OPTIMIZER_STATE, 14)
        below = at[f"h{layer - 1}"] if layer else at["tokens"]
        mixed = add(f"a{layer}", f"{name}.attention.out", ByteClass.FEATURE_MAP, 34 + layer % 3)
        scores = add(f"s{layer}", f"{name}.attention.scores", ByteClass.TEMPORARY, 6)
        milliseconds = 0.42 + 0.05 * (layer % 4)
        reads = (below, weight, at["mask"])
        run(f"{name}.attention", forward, reads, (mixed, scores), milliseconds, 8)
        hidden = add(f"h{layer}", f"{name}.mlp.hidden", ByteClass.FEATURE_MAP, 42 + layer % 2)
        run(f"{name}.mlp", forward, (mixed, weight), (hidden,), 0.55)
    loss = add("loss", "loss", ByteClass.RESULT, 512 / MIB / width)
    above = add("g", "loss.grad", ByteClass.GRADIENT_MAP, 8)
    run("loss", forward, (at[f"h{num_layers - 1}"],), (loss,), 0.12)
    run("loss.backward", backward, (loss,), (above,), 0.1)
    for layer in reversed(range(num_layers)):
        name = f"{layer_name}.{layer}"
        weight, mixed = at[f"w{layer}"], at[f"a{layer}"]
        inner = add(f"gh{layer}", f"{name}.mlp.hidden.grad", ByteClass.GRADIENT_MAP, 12)
        run(f"{name}.mlp.backward", backward, (above, at[f"h{layer}"], mixed), (inner,), 1.05)
        gradient = add(f"gw{layer}", f"{name}.weight.grad", ByteClass.GRADIENT, 7)
        above = add(f"gx{layer}", f"{name}.grad", ByteClass.GRADIENT_MAP, 8)
        run(f"{name}.attention.backward", backward, (inner, mixed, weight), (gradient, above), 0.95, 10)
        run(f"{name}.adamw", Phase.UPDATE, (gradient,), (), 0.09, changes=(weight, at[f"o{layer}"]))
    device = DeviceFacts("NVIDIA H200", 139 * GIB, 96 * GIB)
    return Profile(f"fused-{width}", "measured", width, device, tuple(tensors), tuple(nodes))


def _schedule(profiles: tuple[Profile, ...], num_layers: int) -> Schedule:
    """A ring; feature maps of the first third of the layers are swapped, those of the second recomputed."""
    order: list[tuple[int, int]] = []
    for back, ahead in ((0, 1), (1, 0)):
        merged = []
        for sub_array, is_forward in ((back, False), (ahead, True)):
            nodes = profiles[sub_array].nodes
            ranks = [rank for rank, node in enumerate(nodes) if (node.phase is Phase.FORWARD) is is_forward]
            shares = [(position + 0.5) / len(ranks) for position in range(len(ranks))]
            merged += [
                (share, is_forward, (sub_array, rank)) for share, rank in zip(shares, ranks, strict=True)
            ]
        order += [node for _, _, node in sorted(merged)]
    swaps, recomputes = [], []
    for sub_array, profile in enumerate(profiles):
        for position, tensor in enumerate(profile.tensors):
            if tensor.byte_class is not ByteClass.FEATURE_MAP:
                continue
            uses = [
                (rank, node.phase)
                for rank, node in enumerate(profile.nodes)
                if position in (*node.creates, *node.reads, *node.changes)
            ]
            last_forward = max(rank for rank, phase in uses if phase is Phase.FORWARD)
            first_backward = min(rank for rank, phase in uses if phase is Phase.BACKWARD)
            made = uses[0][0]
            layer = made // 2
            if layer < num_layers // 3:
                last, first = order.index((sub_array, last_forward)), order.index((sub_array, first_backward))
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
            elif layer < 2 * num_layers // 3 and tensor.name.endswith("hidden"):
                why = "cheaper than the 1.9 ms stall that its swap would leave inside the peak interval"
                before = (sub_array, first_backward)
                recomputes.append(Recomputation(sub_array, position, (made,), before, why))
    return Schedule(Multiplexing.RING, tuple(order), tuple(swaps), tuple(recomputes))


def _plan(
    profiles: tuple[Profile, ...], schedule: Schedule, predicted: Timeline, peak_bytes: int, host_bytes: int
) -> PlanRecord:
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
    return PlanRecord(
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
