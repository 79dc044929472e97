"""``trainmux plan``: how a user's fleet would train within a budget, on its own device or another one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import trainmux as tm

from ._load import load


def run_plan(name: str, device: str | None, files: Mapping[str, Path | None], **how: Any) -> None:
    """Plan the fleet that ``FILE:NAME`` names, print the plan, write the files asked for.

    Without ``device`` the fleet's own is measured; otherwise it is a device's name, or a JSON file with the
    fields of ``trainmux.Device``. ``files`` has paths by the method of a plan that writes them, ``how``
    further arguments of ``fleet.plan``.
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
            if progress.best_seconds < float("inf"):
                above = progress.best_seconds / progress.bound_seconds - 1 if progress.bound_seconds else 0.0
                told += f" (best {progress.best_seconds * 1e3:.4g} ms, {above:.1%} above the bound)"
            bars.update(tasks[stage], completed=progress.done, total=progress.total, description=told)

        plan = fleet.plan(device=facts, progress=show, **how)
    print(plan.explain())
    for kind, path in files.items():
        if path is not None:
            getattr(plan, kind)(path)
            print(f"written to {path}")
