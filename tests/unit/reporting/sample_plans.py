"""A plan to show: two fused sub-arrays in a ring, with swaps, recomputes and a measured pass.

Programs and timelines are written here, by rules that are simpler than the planner's: pages, texts and traces
are made from records alone, whoever wrote them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from trainmux import ir
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
    """A row of ``num_layers`` blocks, widths 4 and 3: a third of them swapped, another recomputed."""
    profiles = (_profile(4, num_layers, layer_name), _profile(3, num_layers, layer_name))
    schedule = _schedule(profiles, num_layers)
    first = [(0, rank) for rank in range(len(profiles[0].nodes))]
    parts = [
        _part(profiles, schedule, order)
        for order in (first[: num_layers + 1], schedule.order, first[num_layers + 1 :])
    ]
    program = ir.Program(*parts, (), 0, 3 * GIB)
    predicted = run(program.body, profiles)
    rng = random.Random(0)
    jittered = [
        replace(
            one,
            nodes=tuple(replace(node, seconds=node.seconds * rng.uniform(0.9, 1.2)) for node in one.nodes),
        )
        for one in profiles
    ]
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
        replace(run(program.body, jittered), source="measured"),
        run(program.prologue, profiles),
        run(program.epilogue, profiles),
        tuple((int(budget_bytes * share), step * cost) for share, cost in costs.items()),
    )


def large_sample() -> Sample:
    """Ten thousand instructions."""
    return ring_sample(num_layers=900, layer_name="model.encoder.transformer.layers")


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
    program = ir.Program(*(_part(profiles, schedule, order) for order in ((), schedule.order, ())), (), 0, 0)
    predicted = run(program.body, profiles)
    peak_bytes = 6 * MIB + 512
    plan = ir.PlanRecord(
        *("none", 8 * GIB, 0, ("single",), (ir.SubArray(("only",), 0),), schedule),
        *(peak_bytes, 0, predicted.seconds, 0.0, 0.0, 0.0, 0.0),
        plain_peak_bytes=peak_bytes,
    )
    nothing = run(program.prologue, profiles)
    return Sample(plan, program, profiles, predicted, replace(predicted, source="measured"), nothing, nothing)


def _tensor(name: str, byte_class: ByteClass, size_bytes: int) -> ir.ProfiledTensor:
    seconds = 8e-6 + size_bytes / 12e9
    return ir.ProfiledTensor(name, byte_class, size_bytes, seconds, seconds, seconds, seconds)


def _profile(width: int, num_layers: int, layer_name: str) -> ir.Profile:
    tensors: list[ir.ProfiledTensor] = []
    nodes: list[ir.ProfiledNode] = []

    def tensor(name: str, byte_class: ByteClass, mebibytes: float) -> int:
        tensors.append(_tensor(name, byte_class, round(mebibytes * MIB * width)))
        return len(tensors) - 1

    def node(
        name: str,
        phase: ir.Phase,
        reads: tuple[int, ...],
        creates: tuple[int, ...],
        ms: float,
        **more: tuple[int, ...],
    ) -> None:
        nodes.append(
            ir.ProfiledNode(name, phase, reads, creates, more.get("changes", ()), ms * 1e-3 * width, 8 * MIB)
        )

    hidden = tokens = tensor("batch.tokens", ByteClass.BATCH, 0.25)
    layers = []
    for layer in range(num_layers):
        name = f"{layer_name}.{layer}"
        weight = tensor(f"{name}.weight", ByteClass.PARAMETER, 7)
        average = tensor(f"{name}.weight.exp_avg", ByteClass.OPTIMIZER_STATE, 14)
        above = tensor(f"{name}.hidden", ByteClass.FEATURE_MAP, 42 + layer % 3)
        scores = tensor(f"{name}.scores", ByteClass.TEMPORARY, 6)
        node(f"{name}.forward", ir.Phase.FORWARD, (hidden, weight), (above, scores), 0.55)
        layers.append((name, weight, average, above))
        hidden = above
    loss = tensor("loss", ByteClass.RESULT, 0.25)
    gradient = tensor("loss.grad", ByteClass.GRADIENT_MAP, 8)
    node("loss", ir.Phase.FORWARD, (hidden,), (loss,), 0.12)
    node("loss.backward", ir.Phase.BACKWARD, (loss,), (gradient,), 0.1)
    for name, weight, average, above in reversed(layers):
        made = tensor(f"{name}.weight.grad", ByteClass.GRADIENT, 7)
        below = tensor(f"{name}.hidden.grad", ByteClass.GRADIENT_MAP, 8)
        node(f"{name}.backward", ir.Phase.BACKWARD, (gradient, above, weight), (made, below), 1.05)
        node(f"{name}.adamw", ir.Phase.UPDATE, (made, tokens), (), 0.09, changes=(weight, average))
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
            if layer < num_layers // 3:
                out, back = place[sub_array, layer + 1], place[use]
                release, prompt = order[min(out + 5, len(order) - 1)], order[max(0, back - 3)]
                why = f"case 2b: idle for {12 + 3 * (num_layers - layer)} ms, hidden by the other sub-array"
                swaps.append(ir.Swap(sub_array, tensor, order[out], release, prompt, why))
            elif layer < 2 * num_layers // 3:
                why = "cheaper than the 1.9 ms stall that its swap would leave"
                recomputes.append(ir.Recomputation(sub_array, tensor, (layer,), use, why))
    return ir.Schedule(RING, tuple(order), tuple(swaps), tuple(recomputes))


def _part(profiles: Sequence[ir.Profile], schedule: ir.Schedule, order: Sequence[Key]) -> ir.Part:
    """The nodes of ``order`` with what the schedule has happen before and after each."""
    found: list[ir.Instruction] = []
    copied: dict[Key, int] = {}
    releases, fetches, offloads = defaultdict(list), defaultdict(list), defaultdict(list)
    for swap in schedule.swaps:
        for events, key in (
            (releases, "release_before"),
            (fetches, "prefetch_prompt"),
            (offloads, "offload_after"),
        ):
            events[getattr(swap, key)].append((swap.sub_array, swap.tensor))
    recomputes = {again.before: again for again in schedule.recomputes}
    for key in order:
        for tensor in releases[key]:
            if tensor in copied:
                found += [ir.Wait(ir.Lane.COMPUTE, copied[tensor]), ir.Free(*tensor)]
        for tensor in fetches[key]:
            found += [ir.Wait(ir.Lane.IN, len(found) - 1)] if found else []
            copied[tensor] = len(found)
            found.append(ir.Prefetch(*tensor))
        node = profiles[key[0]].nodes[key[1]]
        if node.phase is ir.Phase.BACKWARD:
            swapped = [copied[key[0], tensor] for tensor in node.reads if (key[0], tensor) in copied]
            found += [ir.Wait(ir.Lane.COMPUTE, position) for position in swapped]
        if key in recomputes:
            again = recomputes[key]
            found.append(ir.Recompute(again.sub_array, again.nodes[0], (again.tensor,)))
        found.append(ir.Compute(*key))
        for tensor in offloads[key]:
            copied[tensor] = len(found) + 1
            found += [ir.Wait(ir.Lane.OUT, len(found) - 1), ir.Offload(*tensor)]
    return ir.Part(tuple(found), ())


def run(part: ir.Part, profiles: Sequence[ir.Profile]) -> ir.Timeline:
    """Run the three lanes, each as soon as it may; nothing but swaps gives memory back."""
    clock, ends, spans, points = dict.fromkeys(ir.Lane, 0.0), [0.0] * len(part.instructions), [], []
    sizes: dict[ByteClass, int] = {
        kind: sum(one.size_bytes for profile in profiles for one in profile.tensors if one.byte_class is kind)
        for kind in (ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE)
    }
    seconds = {ir.Compute: 0.0, ir.Recompute: 0.0, ir.Offload: 0.0, ir.Prefetch: 0.0}
    for position, one in enumerate(part.instructions):
        lane, scratch = ir.lane_of(one), 0
        match one:
            case ir.Wait(_, on):
                clock[lane] = max(clock[lane], ends[on])
            case ir.Compute(sub_array, item) | ir.Recompute(sub_array, item):
                node = profiles[sub_array].nodes[item]
                taken, scratch = node.seconds, node.workspace_bytes
            case ir.Offload(sub_array, item) | ir.Prefetch(sub_array, item) | ir.Free(sub_array, item):
                tensor = profiles[sub_array].tensors[item]
                sign = {ir.Prefetch: 1, ir.Free: -1}.get(type(one), 0)
                sizes[tensor.byte_class] = sizes.get(tensor.byte_class, 2 * GIB) + sign * tensor.size_bytes
                taken = tensor.swap_out_seconds
        if type(one) in seconds:
            spans.append(ir.Span(lane, position, clock[lane], clock[lane] + taken))
            clock[lane] += taken
            seconds[type(one)] += taken
        ends[position] = clock[lane]
        points.append(ir.MemoryPoint(position, tuple(sizes.items()), scratch))
    length = max(clock.values())
    nodes, copies = seconds[ir.Compute] + seconds[ir.Recompute], seconds[ir.Offload] + seconds[ir.Prefetch]
    totals = (length, nodes, seconds[ir.Recompute], length - nodes, copies, 0.9 * copies)
    return ir.Timeline("predicted", *totals, tuple(spans), tuple(points))
