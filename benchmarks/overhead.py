"""``python -m benchmarks overhead``: steps of this source tree and of another one, in turn, in one process.

Both trees are imported under other names. ``step_us`` is a step among many, ``host_us`` how long
``fleet.step`` keeps the host while the device is idle, so that nothing is waited for.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from .cases import find_case, split, to_device
from .environment import choose_device, describe
from .records import Results
from .timing import used_bytes
from .ways import LEARNING_RATE

OWN = Path(__file__).resolve().parents[1] / "src"


def import_as(source: Path, name: str, folder: Path) -> Any:
    """Import the package under ``source`` as a module ``name``: a copy of it that calls itself so."""
    shutil.copytree(source / "trainmux", folder / name)
    for file in (folder / name).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"\btrainmux(?=[.:\s\"'])", name, text), encoding="utf-8")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        # Processes that compile kernels look there, too.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return importlib.import_module(name)


def make_fleet(package: Any, workload: str, num_members: int, device: str, example: Any) -> Any:
    case = find_case(workload)
    members = [
        package.Member(
            model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE * (1 + number)), seed=number
        )
        for number, model in enumerate(case.models(num_members))
    ]
    on_gpu = device == "cuda"
    how = {"precision": "bf16" if on_gpu else "fp32", "lowering": "inductor" if on_gpu else "aten"}
    return package.Fleet(members, case.loss, example, device=device, **how)


def compare(fleets: dict[str, Any], batch: Any, rounds: int, block_steps: int) -> dict[str, Any]:
    """Time blocks of steps of each fleet in turn; ratios are of blocks next to each other."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times: dict[str, dict[str, list[float]]] = {"host_us": {}, "step_us": {}}
    for number in range(rounds):
        for name in list(fleets) if number % 2 else list(fleets)[::-1]:
            step, alone = fleets[name].step, []
            wait()
            begin = perf_counter()
            for _ in range(block_steps):
                step(batch)
            wait()
            times["step_us"].setdefault(name, []).append((perf_counter() - begin) / block_steps * 1e6)
            for _ in range(block_steps):
                begin = perf_counter()
                step(batch)
                alone.append(perf_counter() - begin)
                wait()
            usual = sorted(alone)[: max(1, len(alone) * 9 // 10)]
            times["host_us"].setdefault(name, []).append(statistics.fmean(usual) * 1e6)
    row: dict[str, Any] = {}
    for kind, found in times.items():
        ratios = [this / other for this, other in zip(found["this"], found["other"], strict=True)]
        row |= {f"{kind}_{name}": statistics.median(values) for name, values in found.items()}
        row[f"{kind}_ratio"] = statistics.median(ratios)
        row[f"{kind}_ratio_quartiles"] = statistics.quantiles(ratios)
    return row


def command(
    other: Annotated[Path, typer.Option(help="The src folder to compare with.")],
    workloads: Annotated[str, typer.Option(help="Names, with commas.")] = "mlp",
    members: Annotated[int, typer.Option(min=1, help="Models of each fleet.")] = 64,
    budget: Annotated[
        str | None, typer.Option(help='Plan both fleets for so many bytes first: "20GiB", ...')
    ] = None,
    policy: Annotated[str, typer.Option(help="Of both plans.")] = "auto",
    partitions: Annotated[int | None, typer.Option(help="Try at most so many partitions.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rounds: Annotated[int, typer.Option(min=2, help="Blocks of each tree.")] = 20,
    block_steps: Annotated[int, typer.Option(min=1, help="Steps of a block.")] = 50,
    out: Annotated[Path, typer.Option(help="File of results; rows measured before stay.")] = Path(
        "runs/bench/overhead.json"
    ),
) -> None:
    """Compare the step times of two source trees, each workload in one process."""
    place = choose_device(device)
    results = Results(out, "overhead", describe(place))
    with TemporaryDirectory(prefix="overhead-") as name:
        sources = {"this": OWN, "other": other.resolve()}
        packages = {
            tree: import_as(source, f"trainmux_{tree}", Path(name)) for tree, source in sources.items()
        }
        for workload in split(workloads):
            batch = to_device(find_case(workload).batch(0), torch.device(place))
            row: dict[str, Any] = {"workload": workload, "width": members, "budget": budget}
            fleets: dict[str, Any] = {}
            for tree, package in packages.items():
                before = used_bytes(torch.device(place))
                fleet = fleets[tree] = make_fleet(package, workload, members, place, batch)
                if budget is not None:
                    plan = fleet.plan(budget, policy, max_partitions=partitions)
                    row[f"predicted_ms_{tree}"] = plan.step_seconds * 1e3
                fleet.step(batch)
                fleet.wait_until_compiled()
                for _ in range(block_steps):
                    fleet.step(batch)
                row[f"device_bytes_{tree}"] = used_bytes(torch.device(place)) - before
            row |= compare(fleets, batch, rounds, block_steps)
            results.add(row)
            print(
                f"{workload}: step {row['step_us_ratio']:.3f}, host {row['host_us_ratio']:.3f} (this / other)"
            )
            del fleets, fleet
            gc.collect()
