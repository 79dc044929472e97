"""Cells of our own engine: one fleet, trained by one plan after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from statistics import median
from typing import Any

import torch

import trainmux as tm
from benchmarks.cases import to_device
from benchmarks.plans import PlanBench, static_bytes
from benchmarks.timing import seconds_of, time_iterations
from trainmux.ir import ByteClass, Phase, Profile
from trainmux.sizes import parse_budget

from .cells import ALL, Cell, TextSizes

Row = dict[str, Any]
MAX_POINTS = 400
"""Points of a curve that are kept."""


@dataclass(frozen=True)
class Protocol:
    """§5.2: warm-up iterations, at most for some seconds, then iterations of which the median counts.

    ``real`` iterations are run for Figure 7, ``plan_seconds`` is the time limit of a plan.
    """

    device_name: str
    precision: str
    warmups: int
    warmup_seconds: float
    measured: int
    real: int
    plan_seconds: float
    text: TextSizes

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_name)

    def times(self, step: Any, batches: Sequence[Any]) -> Row:
        """Time a step by this protocol: milliseconds of each iteration and their median."""
        seconds, warmed = time_iterations(
            step, batches, self.device, self.warmups, self.measured, self.warmup_seconds
        )
        ms = [1e3 * each for each in seconds]
        return {"step_ms": median(ms), "min_ms": min(ms), "max_ms": max(ms), "warmups": warmed}

    def really_run(self, step: Any, batches: Sequence[Any]) -> float:
        """Seconds of ``real`` iterations."""

        def work() -> None:
            for number in range(self.real):
                step(batches[number % len(batches)])

        return seconds_of(work, self.device)


def measure(cells: Sequence[Cell], protocol: Protocol) -> Iterator[Row]:
    """Measure cells of one fleet; a budget that cannot work is a row with the reason."""
    first = cells[0]
    bench = PlanBench(
        *(first.workload, first.batch_size, first.members, protocol.device_name, None),
        optimizer=first.optimizer,
        precision=protocol.precision,
    )
    for cell in cells:
        try:
            yield {**cell.key, **_measured(cell, bench, protocol)}
        except tm.TrainmuxError as error:
            yield {**cell.key, "error": f"{type(error).__name__}: {error}"}


def _measured(cell: Cell, bench: PlanBench, protocol: Protocol) -> Row:
    budget = budget_bytes(cell.budget, bench, protocol)
    plan, row = bench.plan(budget, cell.way, None, protocol.plan_seconds)
    row |= {"static_bytes": static_bytes(plan), "num_parameters": bench.num_parameters}
    if cell.experiment == "timeline":
        return row | _timeline(plan)
    batches = [to_device(batch, protocol.device) for batch in bench.batches]
    row |= protocol.times(bench.fleet.step, batches)
    if cell.experiment == "run":
        row |= {"run_s": protocol.really_run(bench.fleet.step, batches), "iterations": protocol.real}
    row |= bench.held()
    try:
        watched = bench.fleet.watch(batches[0])
    except (tm.TrainmuxError, RuntimeError) as error:  # the step's time stands without its parts
        return row | {"unwatched": str(error).splitlines()[0]}
    for name in ("compute", "recompute", "stall", "copy", "hidden_copy"):
        row[f"watched_{name}_ms"] = 1e3 * getattr(watched, f"{name}_seconds")
    return row


def budget_bytes(text: str, bench: PlanBench, protocol: Protocol) -> int | None:
    """The budget of a cell in bytes; ``None`` is all that is free."""
    if text == ALL:
        return None
    if text.endswith("B"):
        return parse_budget(text, device_bytes=1 << 50)
    whole, _ = bench.plan(None, "none", None, protocol.plan_seconds)
    return int(Fraction(text) * whole.peak_bytes)


def _timeline(plan: tm.Plan) -> Row:
    """How long feature maps are idle, and what is in use after each operation (Figures 3a and 3b)."""
    points = plan.timeline.memory
    kept = points[:: -(-len(points) // MAX_POINTS)]
    classes = [each.value for each in ByteClass]
    memory = [[dict(point.bytes_by_class).get(each, 0) for each in ByteClass] for point in kept]
    return {"idle": idle_times(plan.profiles[0]), "classes": classes, "memory": memory}


def idle_times(profile: Profile) -> list[list[float]]:
    """Of each feature map its bytes and its ``inactive_time`` in ms: from the end of its last access in the
    forward pass to the begin of its first one in the backward pass, node after node."""
    ends = list(accumulate(node.seconds for node in profile.nodes))
    last: dict[int, float] = {}
    first: dict[int, float] = {}
    for node, end in zip(profile.nodes, ends, strict=True):
        for tensor in {*node.reads, *node.creates, *node.changes}:
            if node.phase is Phase.FORWARD:
                last[tensor] = end
            else:
                first.setdefault(tensor, end - node.seconds)
    return [
        [float(tensor.size_bytes), 1e3 * (first[number] - last[number])]
        for number, tensor in enumerate(profile.tensors)
        if tensor.byte_class is ByteClass.FEATURE_MAP and number in first and number in last
    ]
