"""Host time of a step of 64 MLPs in this source tree and in another one, in turns, in one process.

    python benchmarks/step_overhead.py --other PATH/TO/OTHER/src --device cuda --out FILE

Both trees are imported under other names. Both fleets train until their steps run compiled; then blocks of
steps are timed, one fleet after the other. ``host_us`` is how long ``fleet.step`` keeps the host while the
device is idle, so that nothing is waited for; ``step_us`` a step in a row of steps; ``look_us`` a look at all
members for changes, which happens every 100 steps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

OWN = Path(__file__).resolve().parent.parent / "src"


def import_as(source: Path, name: str, folder: Path) -> Any:
    """The package under ``source`` as a module ``name``: a copy of it that calls itself so."""
    shutil.copytree(source / "trainmux", folder / name)
    for file in (folder / name).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"\btrainmux(?=[.:\s\"'])", name, text), encoding="utf-8")
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def make_fleet(package: Any, device: str, num_members: int, batch: Any) -> Any:
    """MLPs with one hidden layer of 256 and one of 256, each with a learning rate of its own."""

    def member(number: int) -> Any:
        torch.manual_seed(number)
        layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 * (number + 1))
        return package.Member(model, optimizer, name=str(number))

    def loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    members = [member(number) for number in range(num_members)]
    precision = "bf16" if device == "cuda" else "fp32"
    return package.Fleet(members, loss, batch, device=device, precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="the src folder to compare with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block-steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    packages = {
        "this": import_as(OWN, "trainmux_this", folder),
        "other": import_as(given.other, "trainmux_other", folder),
    }
    batch = (torch.randn(128, 784, device=given.device), torch.randint(0, 10, (128,), device=given.device))
    fleets = {
        name: make_fleet(package, given.device, given.members, batch) for name, package in packages.items()
    }

    def wait() -> None:
        if given.device == "cuda":
            torch.cuda.synchronize()

    for fleet in fleets.values():
        for _ in range(20):
            fleet.step(batch)
        fleet.wait_until_compiled()
        for _ in range(given.block_steps):
            fleet.step(batch)
    host: dict[str, list[float]] = {name: [] for name in fleets}
    whole: dict[str, list[float]] = {name: [] for name in fleets}
    for number in range(given.rounds):
        for name in list(fleets) if number % 2 else list(fleets)[::-1]:
            step, alone = fleets[name].step, []
            wait()
            begin = time.perf_counter()
            for _ in range(given.block_steps):
                step(batch)
            wait()
            whole[name].append((time.perf_counter() - begin) / given.block_steps * 1e6)
            for _ in range(given.block_steps):
                begin = time.perf_counter()
                step(batch)
                alone.append(time.perf_counter() - begin)
                wait()
            host[name].append(statistics.fmean(sorted(alone)[: len(alone) * 9 // 10]) * 1e6)
    watch, looks = fleets["this"]._watch, []
    for _ in range(100):
        watch.handed_out()
        begin = time.perf_counter()
        watch.at_step(fleets["this"]._groups)
        looks.append((time.perf_counter() - begin) * 1e6)
    pairs = {"host_us": host, "step_us": whole}
    medians = {
        key: {name: statistics.median(values) for name, values in found.items()}
        for key, found in pairs.items()
    }
    ratios = {
        key: statistics.median(a / b for a, b in zip(found["this"], found["other"], strict=True))
        for key, found in pairs.items()
    }
    spread = {
        key: statistics.quantiles([a / b for a, b in zip(found["this"], found["other"], strict=True)])
        for key, found in pairs.items()
    }
    look = statistics.median(looks)
    result: dict[str, Any] = {
        "command": "python " + " ".join(["benchmarks/step_overhead.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.machine(),
        "medians": medians,
        "ratio_this_to_other": ratios,
        "quartiles_of_ratio": spread,
        "look_us": look,
        "look_share_of_step": look / 100 / medians["step_us"]["this"],
    }
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
