"""A plan to show: two fused sub-arrays in a ring, with swaps, recomputes and a measured pass.

Which tensors are swapped and recomputed is decided here by a simple rule; the planner's own functions make a
program and its timelines of that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from trainmux import ir
from trainmux.planning import rewrite, timeline
from trainmux.reporting import plan_page

MIB = 1024 * 1024
GIB = 1024 * MIB
EVIL = "</script><script>window.evil = true</script><img src=x onerror=alert(1)> & \" ' <!--"
RING, TURNS = ir.Multiplexing.RING, ir.Multiplexing.TURNS
ByteClass = ir.ByteClass
Key = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """Everything that a page, a text or a trace of a plan is made from."""

    plan: ir.PlanRecord
    program: ir.Program
    profiles: tuple[ir.Profile, ...]
    predicted: ir.Timeline
    measured: ir.Timeline
    prologue: ir.Timeline
    epilogue: ir.Timeline
    budget_curve: tuple[tuple[int, float], ...] = ()

    def page(self, title: str = "A plan") -> str:
        options = {"prologue": self.prologue, "epilogue": self.epilogue, "budget_curve": self.budget_curve}
        records = (self.plan, self.program, self.profiles, self.predicted)
        return plan_page(*records, measured=self.measured, title=title, **options)


@cache
def ring_sample(num_layers: int = 12, layer_name: str = "blocks") -> Sample:
    """A row of blocks, a multiple of three, at widths 4 and 3: a third is swapped, another recomputed."""
    profiles = (_profile(4, num_layers, layer_name), _profile(3, num_layers, layer_name))
    jittered = [_profile(width, num_layers, layer_name, jitter=0.2) for width in (4, 3)]
    schedule = _schedule(profiles, num_layers)
    program = rewrite(profiles, schedule)
    predicted = timeline(program.body, profiles)
    step, peak_bytes, budget_bytes = predicted.seconds, 5 * GIB, 5300 * MIB
    plan = ir.PlanRecord(
        policy="mutwo",
        budget_bytes=budget_bytes,
        fixed_bytes=384 * MIB,
        profiles=tuple(profile.fingerprint for profile in profiles),
        partition=(
            ir.SubArray(("lr=1e-4", "lr=2e-4", "lr=5e-4", "lr=1e-3"), 0),
            ir.SubArray(("a", "b", "c"), 1),
        ),
        schedule=schedule,
        peak_bytes=peak_bytes,
        host_bytes=program.host_bytes,
        step_seconds=step,
        stall_seconds=predicted.stall_seconds,
        recompute_seconds=predicted.recompute_seconds,
        swap_overlap=predicted.hidden_copy_seconds / predicted.copy_seconds,
        recompute_share=predicted.recompute_seconds / predicted.compute_seconds,
        attempts=(
            ir.Attempt(
                "none", (7,), TURNS, float("inf"), 9 * GIB, 0.0, 0.0, "does not fit: 6.12 GiB too much"
            ),
            ir.Attempt("capuchin", (7,), TURNS, 1.18 * step, 6 * GIB, 0.02, 0.01, "18.0% slower"),
            ir.Attempt("mutwo", (4, 3), RING, step, peak_bytes, 0.01, 0.02, ""),
            ir.Attempt("mutwo", (1,) * 7, RING, 1.44 * step, 3 * GIB, 0.03, 0.0, "44.0% slower"),
        ),
        plain_peak_bytes=budget_bytes * 5 // 4,
        num_left_out=1234,
    )
    costs = {0.7: float("inf"), 0.8: 1.34, 0.9: 1.1, 1.0: 1.0, 1.3: 0.955, 1.5: 0.951, 1.75: 0.951}
    return Sample(
        plan,
        program,
        profiles,
        predicted,
        replace(timeline(program.body, jittered), source="measured"),
        timeline(program.prologue, profiles),
        timeline(program.epilogue, profiles),
        tuple((int(budget_bytes * share), step * cost) for share, cost in costs.items()),
    )


def large_sample() -> Sample:
    """Ten thousand instructions."""
    return ring_sample(num_layers=501, layer_name="model.encoder.transformer.layers")


def evil_sample() -> Sample:
    """A plan whose every name tries to break out of its place."""
    sample = ring_sample(num_layers=3, layer_name=EVIL)
    plan = sample.plan
    schedule = replace(
        plan.schedule,
        swaps=tuple(replace(swap, reason=EVIL) for swap in plan.swaps),
        recomputes=tuple(replace(again, reason=EVIL) for again in plan.recomputes),
    )
    partition = tuple(ir.SubArray((EVIL,) * 2, one.profile) for one in plan.partition)
    attempts = tuple(replace(one, policy=EVIL, lost_because=EVIL) for one in plan.attempts)
    return replace(
        sample, plan=replace(plan, policy=EVIL, partition=partition, attempts=attempts, schedule=schedule)
    )


@cache
def turns_sample() -> Sample:
    """The smallest plan there is: one member, nothing swapped, nothing recomputed, nothing else tried."""
    tensors = (_tensor("weight", ByteClass.PARAMETER, 4 * MIB), _tensor("out", ByteClass.RESULT, 512))
    nodes = (
        ir.ProfiledNode("forward", ir.Phase.FORWARD, (0,), (1,), (), 1e-3, 2 * MIB),
        ir.ProfiledNode("update", ir.Phase.UPDATE, (1,), (), (0,), 5e-4),
    )
    profiles = (ir.Profile("single", "analytic", 1, ir.DeviceFacts("cpu", 8 * GIB, GIB), tensors, nodes),)
    schedule = ir.Schedule(TURNS, ((0, 0), (0, 1)), (), ())
    program = rewrite(profiles, schedule)
    predicted = timeline(program.body, profiles)
    peak_bytes = 6 * MIB + 512
    plan = ir.PlanRecord(
        *("none", 8 * GIB, 0, ("single",), (ir.SubArray(("only",), 0),), schedule),
        *(peak_bytes, 0, predicted.seconds, 0.0, 0.0, 0.0, 0.0),
        plain_peak_bytes=peak_bytes,
    )
    nothing = timeline(program.prologue, profiles)
    return Sample(plan, program, profiles, predicted, replace(predicted, source="measured"), nothing, nothing)


def _tensor(name: str, byte_class: ByteClass, size_bytes: int) -> ir.ProfiledTensor:
    seconds = 8e-6 + size_bytes / 12e9
    return ir.ProfiledTensor(name, byte_class, size_bytes, seconds, seconds, seconds, seconds)


def _profile(width: int, num_layers: int, layer_name: str, jitter: float = 0.0) -> ir.Profile:
    tensors: list[ir.ProfiledTensor] = []
    nodes: list[ir.ProfiledNode] = []
    rng = random.Random(0)

    def tensor(name: str, byte_class: ByteClass, mebibytes: float) -> int:
        tensors.append(_tensor(name, byte_class, round(mebibytes * MIB * width)))
        return len(tensors) - 1

    def node(name: str, phase: ir.Phase, ms: float, *touched: tuple[int, ...]) -> None:
        """One that reads, creates and changes what is ``touched``."""
        seconds = ms * 1e-3 * width * rng.uniform(1 - jitter / 2, 1 + jitter)
        nodes.append(ir.ProfiledNode(name, phase, *touched, seconds, 8 * MIB))

    hidden = tokens = tensor("batch.tokens", ByteClass.BATCH, 0.25)
    layers = []
    for layer in range(num_layers):
        name = f"{layer_name}.{layer}"
        weight = tensor(f"{name}.weight", ByteClass.PARAMETER, 7)
        average = tensor(f"{name}.weight.exp_avg", ByteClass.OPTIMIZER_STATE, 14)
        above = tensor(f"{name}.hidden", ByteClass.FEATURE_MAP, 42 + layer % 3)
        scores = tensor(f"{name}.scores", ByteClass.TEMPORARY, 6)
        node(f"{name}.forward", ir.Phase.FORWARD, 0.55, (hidden, weight), (above, scores), ())
        layers.append((name, weight, average, above))
        hidden = above
    loss = tensor("loss", ByteClass.RESULT, 0.25)
    gradient = tensor("loss.grad", ByteClass.GRADIENT_MAP, 8)
    node("loss", ir.Phase.FORWARD, 0.12, (hidden,), (loss,), ())
    node("loss.backward", ir.Phase.BACKWARD, 0.1, (loss,), (gradient,), ())
    for name, weight, average, above in reversed(layers):
        made = tensor(f"{name}.weight.grad", ByteClass.GRADIENT, 7)
        below = tensor(f"{name}.hidden.grad", ByteClass.GRADIENT_MAP, 8)
        node(f"{name}.backward", ir.Phase.BACKWARD, 1.05, (gradient, above, weight), (made, below), ())
        node(f"{name}.adamw", ir.Phase.UPDATE, 0.09, (made, tokens), (), (weight, average))
        gradient = below
    device = ir.DeviceFacts("NVIDIA H200", 139 * GIB, 96 * GIB)
    return ir.Profile(f"fused-{width}", "measured", width, device, tuple(tensors), tuple(nodes))


def _schedule(profiles: Sequence[ir.Profile], num_layers: int) -> ir.Schedule:
    """The backward pass of each between the forward pass of the other; feature maps decided by layer."""
    order: list[Key] = []
    num_forward = num_layers + 1
    for back, ahead in ((0, 1), (1, 0)):
        for rank in range(num_forward, len(profiles[back].nodes)):
            order.append((back, rank))
            if (rank - num_forward) % 2 == 0:
                order.append((ahead, (rank - num_forward) // 2))
    place = {key: position for position, key in enumerate(order)}
    swaps, recomputes = [], []
    for sub_array, profile in enumerate(profiles):
        maps = [at for at, one in enumerate(profile.tensors) if one.byte_class is ByteClass.FEATURE_MAP]
        for layer, tensor in enumerate(maps):
            use = (sub_array, num_forward + 1 + 2 * (num_layers - 1 - layer))
            if layer % 3 == 0:
                out, back = place[sub_array, layer + 1], place[use]
                release, prompt = order[min(out + 5, len(order) - 1)], order[max(0, back - 3)]
                why = f"case 2b: idle for {12 + 3 * (num_layers - layer)} ms, hidden by the other sub-array"
                swaps.append(ir.Swap(sub_array, tensor, order[out], release, prompt, why))
            elif layer % 3 == 2:
                why = "cheaper than the 1.9 ms stall that its swap would leave"
                recomputes.append(ir.Recomputation(sub_array, tensor, (layer,), use, why))
    return ir.Schedule(RING, tuple(order), tuple(swaps), tuple(recomputes))
