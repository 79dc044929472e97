"""Fixed choices of strategies and width against measured ones: the same members, one process, in turns.

    python benchmarks/strategies.py small_cnn:64 mobilenet_v3_large:8 resnet101:8 --out strategies.json

Per workload: milliseconds per member and step of both (blocks of steps in turns, medians), the seconds spent
on measuring before the first step, the candidates measured, and how each operator was fused. Then the
measured fleet is built once more with nothing in memory but the file of times: it must measure nothing.
``--lowering aten`` leaves out the compiler; small:NAME workloads try it out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import trainmux as tm
from benchmarks.bench.batches import make_batches
from benchmarks.bench.cases import Case, find_case
from benchmarks.bench.environment import describe
from benchmarks.bench.timing import seconds_of
from trainmux.fusion import FIXED, MEASURED, STRATEGY_FAMILIES, OperatorTimes, times_for
from trainmux.fusion.strategies import TimesFile

NUM_BLOCKS = 7
FAMILIES = (*STRATEGY_FAMILIES, "width")


def build(case: Case, num_members: int, strategies: str, device: torch.device, lowering: str) -> tm.Fleet:
    """A fleet of AdamW members, as ``trainmux bench step`` makes them."""
    members = []
    for index, model in enumerate(case.models(num_members)):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 * (1 + index / num_members))
        members.append(tm.Member(model, optimizer, name=f"member {index}", seed=index))
    return tm.Fleet(
        members,
        loss=case.loss,
        example_batch=case.batch(0, case.batch_sizes[0]),
        device=device,
        precision="bf16",
        lowering=lowering,
        strategies=dict.fromkeys(FAMILIES, strategies),
    )


def compare(
    name: str, num_members: int, device: torch.device, lowering: str, block_s: float
) -> dict[str, Any]:
    """Everything about one workload."""
    case = find_case(name)
    batches = make_batches(case.batch, case.batch_sizes[0], device)
    times = times_for(device)
    fleets: dict[str, tm.Fleet] = {}
    found: dict[str, Any] = {"batch_size": case.batch_sizes[0], "num_members": num_members}
    for strategies in (FIXED, MEASURED):
        begin, measuring_s, num_measured = time.perf_counter(), times.measuring_s, times.num_measured
        fleet = fleets[strategies] = build(case, num_members, strategies, device, lowering)
        losses = fleet.step(batches[0]).tolist()
        (group,) = fleet.summary()
        found[strategies] = {
            "start_to_first_step_s": time.perf_counter() - begin,
            "measuring_s": times.measuring_s - measuring_s,
            "num_measured": times.num_measured - num_measured,
            "first_losses": losses,
            "notes": group.notes,
            "fused": [[r.op, r.how, r.count] for r in group.records if r.op.startswith(_PREFIXES)],
            "reserved_bytes": None if group.memory is None else group.memory.reserved_bytes,
        }
    for strategies, block_ms in in_turns(fleets, batches, device, block_s).items():
        per_member = [milliseconds / num_members for milliseconds in block_ms]
        found[strategies] |= {"median_ms": statistics.median(per_member), "block_ms": per_member}
    found["fixed_over_measured"] = found[FIXED]["median_ms"] / found[MEASURED]["median_ms"]
    fleets.clear()
    again = OperatorTimes(device, TimesFile(device))
    with mock.patch("trainmux.fleet._build.times_for", return_value=again):
        build(case, num_members, MEASURED, device, lowering)
    found["num_measured_at_the_second_start"] = again.num_measured
    return found


_PREFIXES = ("aten.convolution", "aten.mm", "aten.addmm", "aten._native_batch_norm", "aten.native_batch_norm")


def in_turns(
    fleets: dict[str, tm.Fleet], batches: Sequence[Any], device: torch.device, block_s: float
) -> dict[str, list[float]]:
    """Milliseconds per step of each fleet, block by block; a block takes about ``block_s`` seconds."""

    def block(fleet: tm.Fleet, num_steps: int) -> float:
        def work() -> None:
            for number in range(num_steps):
                fleet.step(batches[number % len(batches)])

        return 1e3 * seconds_of(work, device) / num_steps

    num_steps = {}
    for name, fleet in fleets.items():
        block(fleet, 3)
        num_steps[name] = max(1, round(1e3 * block_s / block(fleet, 2)))
    taken: dict[str, list[float]] = {name: [] for name in fleets}
    for _ in range(NUM_BLOCKS):
        for name, fleet in fleets.items():
            taken[name].append(block(fleet, num_steps[name]))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", help="NAME:MEMBERS")
    parser.add_argument("--lowering", default="auto", choices=("auto", "aten", "inductor"))
    parser.add_argument("--block-seconds", type=float, default=0.3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    lowering = given.lowering
    if lowering == "auto":
        lowering = "inductor" if device.type == "cuda" else "aten"  # the compiled step from the first on
    record: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/strategies.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe(str(device)),
        "lowering": lowering,
        "workloads": {},
    }
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TRAINMUX_STRATEGY_DIR=folder):
        for workload in given.workloads:
            name, _, count = workload.rpartition(":")
            found = compare(name, int(count), device, lowering, given.block_seconds)
            record["workloads"][name] = found
            given.out.write_text(json.dumps(record, indent=1) + "\n")
            print(
                f"{name} x{count}: fixed {found[FIXED]['median_ms']:.4f} ms, measured "
                f"{found[MEASURED]['median_ms']:.4f} ms per member and step; measuring took "
                f"{found[MEASURED]['measuring_s']:.1f} s; {found[MEASURED]['notes'][0]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
