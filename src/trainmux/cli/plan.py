"""``trainmux plan``: how a workload would train within a budget, on this machine's device or another's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.workloads import FULL_SIZE, SMALL

import trainmux as tm

if TYPE_CHECKING:
    from rich.progress import Progress

SMALL_PREFIX = "small:"
HERE = "here"


class UnknownWorkloadError(ValueError):
    """No workload has this name."""


@dataclass(frozen=True)
class PlanOptions:
    """What to plan, and what to write."""

    workload: str
    num_members: int
    batch_size: int | None
    budget: str | None
    policy: str
    device: str
    num_budgets: int
    save: Path | None
    report: Path | None
    trace: Path | None


def run_plan(options: PlanOptions) -> tm.Plan:
    """Plan, print, and write what was asked for."""
    device = _device(options.device)
    fleet = make_fleet(options)
    on_this_machine = device is None
    with _Bars() as bars:
        plan = fleet.plan(
            options.budget,
            options.policy,
            device=device,
            num_members=None if on_this_machine else options.num_members,
            num_budgets=options.num_budgets,
            progress=bars.show,
        )
    print(plan.explain())
    for path, write in (
        (options.save, plan.save),
        (options.report, plan.report),
        (options.trace, plan.trace),
    ):
        if path is not None:
            write(path)
            print(f"written to {path}")
    return plan


def make_fleet(options: PlanOptions) -> tm.Fleet:
    """The workload as a fleet: all members where steps are measured, one where they are worked out."""
    build, loss, batch = _workload(options.workload, options.batch_size)
    on_this_machine = options.device == HERE
    has_gpu = torch.cuda.is_available()
    members = [
        tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-4), name=f"member {number}", seed=number)
        for number in range(options.num_members if on_this_machine else 1)
        for model in (build(number).train(),)
    ]
    return tm.Fleet(
        members,
        loss,
        batch,
        device="cuda" if on_this_machine and has_gpu else "cpu",
        precision="fp32" if on_this_machine and not has_gpu else "bf16",
        lowering="auto" if on_this_machine else "aten",
    )


def _device(text: str) -> str | tm.Device | None:
    """What ``--device`` names: nothing, this machine; a device by name; or one's own, in a JSON file."""
    if text == HERE:
        return None
    return tm.Device.load(text) if text.lower().endswith(".json") else text


def _workload(name: str, batch_size: int | None) -> tuple[Any, Any, Any]:
    if name.startswith(SMALL_PREFIX) and name.removeprefix(SMALL_PREFIX) in SMALL:
        small = SMALL[name.removeprefix(SMALL_PREFIX)]
        if batch_size is not None:
            raise UnknownWorkloadError(f"{name} has batches of its own size only; leave --batch-size out")
        return small.build, small.loss, small.batch(0, torch.float32)
    if name in FULL_SIZE:
        full = FULL_SIZE[name]
        return full.build, full.loss, full.batch(0, batch_size or full.batch_sizes[0])
    known = [*FULL_SIZE, *(SMALL_PREFIX + small for small in SMALL)]
    raise UnknownWorkloadError(f"expected one of {', '.join(known)}; got {name}")


class _Bars:
    """A bar for each stage, on a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, progress: Any) -> None:
        if self._progress is None:
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._progress.add_task(progress.stage, total=progress.total)
        self._progress.update(
            self._tasks[progress.stage],
            completed=progress.done,
            total=progress.total,
            description=f"{progress.stage}: {progress.current}",
        )
