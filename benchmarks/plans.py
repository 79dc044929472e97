"""``python -m benchmarks plans``: plans at fractions of activation memory, predicted against measured.

A share's budget is static + share × (peak - static): static is what the fleet holds between steps, peak what
the plan with nothing offloaded or recomputed needs; ``0.9s`` is 0.9 of static. For another device by name
everything is predicted. Planning begins when kernels are compiled: first profiles, then the first plan, then
better ones.
"""

from __future__ import annotations

import gc
import math
from fractions import Fraction
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

import trainmux as tm
from trainmux.planning import PlanProgress

from .cases import find_case, split
from .environment import choose_device, describe
from .records import Results
from .timing import time_blocks, used_bytes
from .ways import LEARNING_RATE, make_optimizer

NUM_BATCHES = 3
UNPLANNED = "no plan"
SHOWN = (
    *("share", "policy", "bound_ms", "predicted_ms", "step_ms", "profiling_s", "first_plan_s", "planning_s"),
    *("budget_bytes", "device_bytes", "error"),
)


class PlanBench:
    """One fleet, trained by one plan after another; or a fleet of one, planned for another device."""

    def __init__(
        self,
        workload: str,
        batch_size: int | None,
        num_members: int,
        device: str,
        for_device: str | None,
        *,
        optimizer: str = "adamw",
        precision: str = "bf16",
    ) -> None:
        case = find_case(workload, batch_size)
        self._device, self._for_device, self._num_members = torch.device(device), for_device, num_members
        self._before = used_bytes(self._device)
        models = case.models(1 if for_device else num_members)
        self.num_parameters = sum(parameter.numel() for parameter in models[0].parameters())
        members = [
            tm.Member(model, make_optimizer(optimizer, model, LEARNING_RATE), seed=number)
            for number, model in enumerate(models)
        ]
        self.batches = [case.batch(seed) for seed in range(NUM_BATCHES)]
        lowering = "inductor" if device == "cuda" else "aten"
        self.fleet = tm.Fleet(
            members, case.loss, self.batches[0], device=device, precision=precision, lowering=lowering
        )
        self.name = {"workload": workload, "batch_size": case.batch_size, "width": num_members}

    def measure(self, num_blocks: int, block_seconds: float) -> dict[str, Any]:
        """Time steps by the plan in use, and see what the device holds; nothing for another device."""
        if self._for_device is not None:
            return {}
        seconds = time_blocks(self.fleet.step, self.batches, self._device, num_blocks, block_seconds)
        ms = sorted(1e3 * each for each in seconds)
        return {"step_ms": ms[len(ms) // 2], "min_ms": ms[0], "max_ms": ms[-1], **self.held()}

    def held(self) -> dict[str, int]:
        """See what the fleet holds on a GPU."""
        if self._device.type != "cuda":
            return {}
        device_bytes = used_bytes(self._device) - self._before
        return {"device_bytes": device_bytes, "reserved_bytes": torch.cuda.memory_reserved(self._device)}

    def plan(
        self, budget: int | None, policy: str, max_partitions: int | None, time_limit: float
    ) -> tuple[tm.Plan, dict[str, Any]]:
        """Plan, which a fleet on its own device then uses; give what is predicted."""
        compiled = perf_counter()
        profiled = first = math.inf

        def note(progress: PlanProgress) -> None:
            nonlocal compiled, profiled, first
            now = perf_counter()
            if progress.stage == "compiling":
                compiled = now
            elif progress.stage.startswith("scheduling"):
                profiled = min(profiled, now)
            if progress.best_seconds < math.inf:
                first = min(first, now)

        plan = self.fleet.plan(
            budget,
            policy,
            device=self._for_device,
            num_members=self._num_members if self._for_device else None,
            max_partitions=max_partitions,
            time_limit=time_limit,
            progress=note,
        )
        return plan, {
            "budget_bytes": plan.budget_bytes,
            "profiling_s": profiled - compiled,
            "first_plan_s": max(0.0, first - profiled),
            "planning_s": perf_counter() - compiled,
            "predicted_ms": plan.step_seconds * 1e3,
            "predicted_bytes": plan.peak_bytes,
            "bound_ms": plan.bound_seconds * 1e3,
            "stall_ms": plan.record.stall_seconds * 1e3,
            "recompute_ms": plan.record.recompute_seconds * 1e3,
            "plain_peak_bytes": plan.record.plain_peak_bytes,
            "host_bytes": plan.record.host_bytes,
            "widths": [len(sub_array.members) for sub_array in plan.partition],
            "multiplexing": plan.record.schedule.multiplexing.value,
            "num_swaps": len(plan.swaps),
            "num_recomputes": len(plan.recomputes),
            "recompute_share": plan.record.recompute_share,
            "swap_overlap": plan.record.swap_overlap,
        }


def static_bytes(plan: tm.Plan) -> int:
    """What the plan's members hold between steps: parameters, buffers, optimizer state."""
    return sum(
        tensor.size_bytes
        for sub_array in plan.partition
        for tensor in plan.profiles[sub_array.profile].tensors
        if tensor.byte_class.is_static
    )


def command(
    workloads: Annotated[str, typer.Option(help="Names, with commas.")] = "gpt2_no_dropout,resnet101",
    members: Annotated[int, typer.Option(min=1, help="Models to train at once.")] = 8,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of each member.")] = None,
    shares: Annotated[
        str, typer.Option(help="Of the memory beyond static, or of static (0.9s), with commas.")
    ] = "1/2,1/3,1/4,1/6,1/10",
    policies: Annotated[str, typer.Option(help="With commas.")] = "auto",
    partitions: Annotated[int | None, typer.Option(help="Try at most so many partitions.")] = None,
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds for profiles and search.")] = 60.0,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; or a device by name (a100-40gb), for predictions only.")
    ] = "auto",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of steps that are timed.")] = 5,
    block_seconds: Annotated[float, typer.Option(help="Seconds of a block.")] = 0.5,
    out: Annotated[Path, typer.Option(help="File of results; rows measured before stay.")] = Path(
        "runs/bench/plans.json"
    ),
) -> None:
    """Plan at fractions of activation memory: step time, peak and planning time, predicted and measured."""
    for_device = device if device in tm.DEVICES else None
    place = "cpu" if for_device else choose_device(device)
    environment = describe(place)
    if for_device:
        environment["device"] = f"{for_device}, predicted"
    results = Results(out, "plans", environment)
    for workload in split(workloads):
        bench = PlanBench(workload, batch_size, members, place, for_device)

        def add(row: dict[str, Any], bench: PlanBench = bench) -> None:
            results.add({**bench.name, **row})
            print(bench.name["workload"], {name: row[name] for name in SHOWN if name in row}, flush=True)

        if not for_device:
            add({"share": "1", "policy": UNPLANNED, **bench.measure(blocks, block_seconds)})
        whole, row = bench.plan(None, "none", partitions, time_limit)
        static = static_bytes(whole)
        name = {"share": "1", "policy": "none", "static_bytes": static}
        add({**name, **row, **bench.measure(blocks, block_seconds)})
        for share in split(shares):
            of_static = Fraction(share.removesuffix("s")) * static
            beyond = static + Fraction(share.removesuffix("s")) * (whole.peak_bytes - static)
            budget = int(of_static if share.endswith("s") else beyond)
            for policy in split(policies):
                name = {"share": share, "policy": policy, "static_bytes": static, "budget_bytes": budget}
                try:
                    _, row = bench.plan(budget, policy, partitions, time_limit)
                    add({**name, **row, **bench.measure(blocks, block_seconds)})
                except tm.TrainmuxError as error:
                    add({**name, "error": str(error)})
        del bench, whole
        gc.collect()
    print(f"written to {out}")
