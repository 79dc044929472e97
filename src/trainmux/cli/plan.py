"""``trainmux plan``: how a user's fleet would train within a budget, on its own device or another one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import trainmux as tm

from ._load import load


def run_plan(
    name: str,
    *,
    budget: str | None,
    policy: str,
    device: str | None,
    num_members: int | None,
    num_budgets: int,
    save: Path | None,
    report: Path | None,
    trace: Path | None,
) -> tm.Plan:
    """Plan the fleet that ``FILE:NAME`` names, print the plan, write the files asked for.

    Without ``device`` the fleet's own is measured; otherwise it is a device's name, or a JSON file with the
    fields of ``trainmux.Device``.
    """
    facts = tm.Device.load(device) if device is not None and device.lower().endswith(".json") else device
    fleet = load(name, tm.Fleet)
    tasks: dict[str, Any] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:

        def show(progress: Any) -> None:
            stage = progress.stage
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=progress.total)
            told = f"{stage}: {progress.current}"
            bars.update(tasks[stage], completed=progress.done, total=progress.total, description=told)

        plan = fleet.plan(
            budget, policy, device=facts, num_members=num_members, num_budgets=num_budgets, progress=show
        )
    print(plan.explain())
    for path, write in ((save, plan.save), (report, plan.report), (trace, plan.trace)):
        if path is not None:
            write(path)
            print(f"written to {path}")
    return plan
