"""CPU benchmark: 64 small MLPs as one fleet against one by one, and what building a fleet costs.

Both sides of a comparison are measured in turn in the same run, on the same random batches, with
torch's own number of threads. Nothing but the public surface is used.

    python benchmarks/fleet_cpu.py --out runs/bench/fleet_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainmux as tm
from benchmarks.workloads import mlp

NUM_MEMBERS = 64
NARROW_WIDTH = 2
SIZES = (64, 128, 10)
BATCH_SIZE = 32

Batch = tuple[Tensor, Tensor]


def make_models(num: int) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """``num`` MLPs with Adam, each with its own weights and learning rate."""
    made: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for index in range(num):
        torch.manual_seed(index)
        model = mlp(*SIZES)
        made.append((model, torch.optim.Adam(model.parameters(), lr=1e-3 * (1 + index / num))))
    return made


def make_members(num: int) -> list[tm.Member]:
    return [
        tm.Member(model, optimizer, name=f"member {index}", seed=index)
        for index, (model, optimizer) in enumerate(make_models(num))
    ]


def make_batch(generator: torch.Generator) -> Batch:
    inputs = torch.randn(BATCH_SIZE, SIZES[0], generator=generator)
    return inputs, torch.randint(SIZES[-1], (BATCH_SIZE,), generator=generator)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def make_fleet(members: list[tm.Member], batch: Batch) -> tm.Fleet:
    return tm.Fleet(members, loss=loss_fn, example_batch=batch, device="cpu", precision="fp32")


def step_one_by_one(models: list[tuple[nn.Module, torch.optim.Optimizer]], batch: Batch) -> Tensor:
    losses = []
    for model, optimizer in models:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def measure_step(rounds: int, warmup: int) -> dict[str, float]:
    """Seconds per step of all members: fused and one by one, in turn, medians over ``rounds``."""
    generator = torch.Generator().manual_seed(0)
    alone = make_models(NUM_MEMBERS)
    fleet = make_fleet(make_members(NUM_MEMBERS), make_batch(generator))
    steps: dict[str, Callable[[Batch], Tensor]] = {
        "fused": fleet.step,
        "one_by_one": lambda batch: step_one_by_one(alone, batch),
    }
    taken: dict[str, list[float]] = {side: [] for side in steps}
    largest_difference = 0.0
    for index in range(warmup + rounds):
        batch = make_batch(generator)
        losses = {}
        # The side that goes first finds colder caches: they take turns at it.
        for side in sorted(steps, reverse=index % 2 == 1):
            begin = perf_counter()
            losses[side] = steps[side](batch)
            taken[side].append(perf_counter() - begin)
        # Both sides start from the same weights: the losses show that they do the same work.
        difference = (losses["fused"] - losses["one_by_one"]).abs().max().item()
        largest_difference = max(largest_difference, difference)
    fused_s, alone_s = (median(taken[side][warmup:]) for side in steps)
    return {
        "fused_step_s": fused_s,
        "one_by_one_step_s": alone_s,
        "speedup": alone_s / fused_s,
        "largest_loss_difference": largest_difference,
    }


def build_seconds(width: int, later_steps: int) -> float:
    """Making a fleet and its first step, less what a later step takes."""
    generator = torch.Generator().manual_seed(1)
    members = make_members(width)
    batches = [make_batch(generator) for _ in range(1 + later_steps)]
    begin = perf_counter()
    fleet = make_fleet(members, batches[0])
    fleet.step(batches[0])
    first = perf_counter() - begin
    later = []
    for batch in batches[1:]:
        begin = perf_counter()
        fleet.step(batch)
        later.append(perf_counter() - begin)
    return first - median(later)


def measure_build(repeats: int, later_steps: int) -> dict[str, object]:
    """Seconds to build at width 64 and at width 2, in turn, medians over ``repeats``."""
    widths = (NUM_MEMBERS, NARROW_WIDTH)
    for width in widths:
        build_seconds(width, later_steps)
    taken: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats):
        for width in widths:
            taken[width].append(build_seconds(width, later_steps))
    wide, narrow = (median(taken[width]) for width in widths)
    return {
        f"width_{NUM_MEMBERS}_s": wide,
        f"width_{NARROW_WIDTH}_s": narrow,
        "ratio": wide / narrow,
        "all_s": {str(width): values for width, values in taken.items()},
    }


def environment() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/fleet_cpu.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainmux": version("trainmux"),
        "system": f"{platform.system()} {platform.machine()}",
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where to write the result as JSON")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each side before the timed ones")
    parser.add_argument("--repeats", type=int, default=5, help="timed builds at each width")
    options = parser.parse_args()

    step = measure_step(options.rounds, options.warmup)
    print(
        f"{NUM_MEMBERS} MLPs {'-'.join(map(str, SIZES))}, batch {BATCH_SIZE}, Adam, fp32: "
        f"fused {1e3 * step['fused_step_s']:.2f} ms a step, "
        f"one by one {1e3 * step['one_by_one_step_s']:.2f} ms, {step['speedup']:.2f}×",
        flush=True,
    )
    build = measure_build(options.repeats, later_steps=5)
    print(
        f"building: width {NUM_MEMBERS} {build[f'width_{NUM_MEMBERS}_s']:.3f} s, "
        f"width {NARROW_WIDTH} {build[f'width_{NARROW_WIDTH}_s']:.3f} s, ratio {build['ratio']:.2f}"
    )
    result = {
        **environment(),
        "setting": {
            "num_members": NUM_MEMBERS,
            "sizes": SIZES,
            "batch_size": BATCH_SIZE,
            "optimizer": "Adam",
        },
        "step": step,
        "build": build,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
