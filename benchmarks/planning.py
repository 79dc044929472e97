"""Policies against each other on a device that need not be here: the paper's workloads under pressure.

    python benchmarks/planning.py --device a100-40gb --out planning.json

For each workload the unconstrained complete fusion is planned first. Budgets are then static memory plus a
share of what it needs beyond that. Everything is predicted from data sheets (``trainmux.DEVICES``); nothing
here was run on such a device.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import trainmux as tm
from trainmux.workloads import FULL_SIZE

NUM_MEMBERS = 8
WORKLOADS = (
    "dlrm",
    "vit_b16",
    "bert_base_mlm_no_dropout",
    "gpt2_no_dropout",
    "mobilenet_v3_large",
    "resnet101",
)
SHARES = (0.5, 0.25)
POLICIES = ("none", "swap_only", "recompute_only", "capuchin", "mutwo", "auto")
MAX_PARTITIONS = 5


def fleet_of(name: str) -> tm.Fleet:
    workload = FULL_SIZE[name]
    model = workload.build(0).train()
    member = tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-4), name="member 0")
    batch = workload.batch(0, workload.batch_sizes[0])
    return tm.Fleet([member], workload.loss, batch, precision="bf16", lowering="aten")


def row(plan: tm.Plan, seconds: float) -> dict[str, Any]:
    record = plan.record
    return {
        "step_ms": record.step_seconds * 1e3,
        "peak_bytes": record.peak_bytes,
        "stall_ms": record.stall_seconds * 1e3,
        "recompute_share": record.recompute_share,
        "swap_overlap": record.swap_overlap,
        "num_swaps": len(plan.swaps),
        "num_recomputes": len(plan.recomputes),
        "widths": [len(sub_array.members) for sub_array in plan.partition],
        "multiplexing": record.schedule.multiplexing.value,
        "planning_seconds": seconds,
    }


def planned(fleet: tm.Fleet, device: str, budget: int | None, policy: str) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        plan = fleet.plan(
            budget, policy, device=device, num_members=NUM_MEMBERS, max_partitions=MAX_PARTITIONS
        )
    except tm.errors.BudgetError as error:
        return {"error": str(error), "smallest_bytes": error.smallest_bytes}
    return row(plan, time.perf_counter() - begin)


def complete_fusion(fleet: tm.Fleet, device: str) -> tuple[int, int]:
    """Static bytes and peak of all members fused, with as much memory as that takes."""
    facts = {"name": f"large {device}", "memory_bytes": 10**13, "host_bytes": 10**13}
    large = tm.Device(**{**tm.DEVICES[device].__dict__, **facts})
    plan = fleet.plan(None, "capuchin", device=large, num_members=NUM_MEMBERS, max_partitions=2)
    (profile,) = plan.profiles
    static = sum(tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static)
    return static + plan.record.fixed_bytes, plan.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="a100-40gb", choices=sorted(tm.DEVICES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--out", type=Path, default=Path("runs/planning.json"))
    given = parser.parse_args()
    results: dict[str, Any] = {
        "command": f"python benchmarks/planning.py --device {given.device} --workloads {given.workloads}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "num_members": NUM_MEMBERS,
        "max_partitions": MAX_PARTITIONS,
        "device": tm.DEVICES[given.device].__dict__,
        "workloads": {},
    }
    for name in given.workloads.split(","):
        try:
            fleet = fleet_of(name)
        except ImportError as error:
            results["workloads"][name] = {"error": str(error)}
            continue
        static, peak = complete_fusion(fleet, given.device)
        found: dict[str, Any] = {"static_bytes": static, "complete_fusion_bytes": peak, "budgets": []}
        results["workloads"][name] = found
        most = tm.DEVICES[given.device].memory_bytes
        for share in SHARES:
            budget = min(int(static + share * (peak - static)), most)
            rows: dict[str, Any] = {}
            found["budgets"].append({"share": share, "budget_bytes": budget, "policies": rows})
            for policy in POLICIES:
                rows[policy] = planned(fleet, given.device, budget, policy)
                shown = rows[policy].get("step_ms")
                text = "nothing fits" if shown is None else f"{shown:.2f} ms"
                print(f"{name}, {share} ({budget / 2**30:.2f} GiB), {policy}: {text}", flush=True)
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
