"""Policies against each other on a device that need not be here: the paper's workloads under pressure.

    python benchmarks/planning.py --device a100-40gb --profiles runs/profiles --out planning.json
    python benchmarks/planning.py --table planning.json > docs/planning.md

For each workload the unconstrained complete fusion is planned first. Budgets are then static memory plus a
share of what it needs beyond that. Everything is predicted from data sheets (``trainmux.DEVICES``); nothing
here was run on such a device. With ``--profiles`` the profiles are kept in a folder and read from there the
next time: tracing and fusing takes longer than planning. The second command writes a results file as a page.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import trainmux as tm
from trainmux.ir import Plan, Profile, load, save
from trainmux.scheduling import Group, Planner
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
SHARES = {"1": 1.0, "1/2": 1 / 2, "1/3": 1 / 3, "1/6": 1 / 6}
POLICIES = ("none", "swap_only", "recompute_only", "capuchin", "mutwo", "auto")
MAX_PARTITIONS = 5
FIXED_BYTES = 64 << 20
"""What a plan for a CUDA device counts beside all tensors."""


def fleet_of(name: str) -> tm.Fleet:
    workload = FULL_SIZE[name]
    model = workload.build(0).train()
    member = tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-4), name="member 0")
    batch = workload.batch(0, workload.batch_sizes[0])
    return tm.Fleet([member], workload.loss, batch, precision="bf16", lowering="aten")


class Profiles:
    """The profiles of a workload by width, from ``folder`` where they are there."""

    def __init__(self, name: str, device: str, folder: Path | None) -> None:
        self._name, self._device, self._folder = name, device, folder
        self._fleet: tm.Fleet | None = None
        self._known: dict[int, Profile] = {}

    def of(self, width: int) -> Profile:
        if width not in self._known:
            path = self._folder / f"{self._name}.{self._device}.{width}.json" if self._folder else None
            if path is not None and path.exists():
                self._known[width] = load(path, Profile)
            else:
                self._known[width] = self._make(width)
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    save(path, self._known[width])
        return self._known[width]

    def _make(self, width: int) -> Profile:
        """That of ``width`` members as one array: a plan of so many with all the memory there could be."""
        if self._fleet is None:
            self._fleet = fleet_of(self._name)
        facts = {"name": self._device, "memory_bytes": 10**13, "host_bytes": 10**13}
        large = tm.Device(**{**tm.DEVICES[self._device].__dict__, **facts})
        plan = self._fleet.plan(None, "capuchin", device=large, num_members=width, max_partitions=2)
        return next(profile for profile in plan.profiles if profile.width == width)


def row(plan: Plan, seconds: float) -> dict[str, Any]:
    return {
        "step_ms": plan.step_seconds * 1e3,
        "peak_bytes": plan.peak_bytes,
        "stall_ms": plan.stall_seconds * 1e3,
        "recompute_share": plan.recompute_share,
        "swap_overlap": plan.swap_overlap,
        "num_swaps": len(plan.swaps),
        "num_recomputes": len(plan.recomputes),
        "widths": [len(sub_array.members) for sub_array in plan.partition],
        "multiplexing": plan.schedule.multiplexing.value,
        "planning_cpu_seconds": seconds,
    }


def planned(profile_of: Callable[[int], Profile], device: str, budget: int, policy: str) -> dict[str, Any]:
    begin = time.process_time()
    planner = Planner(
        [Group("0", tuple(f"member {number}" for number in range(NUM_MEMBERS)))],
        profile_of=lambda _, width: profile_of(width),
        policy=policy,
        fixed_bytes=FIXED_BYTES,
        host_bytes=tm.DEVICES[device].host_bytes,
        max_partitions=MAX_PARTITIONS,
    )
    try:
        plan = planner.plan(budget)
    except tm.errors.BudgetError as error:
        return {"error": str(error), "smallest_bytes": error.smallest_bytes}
    return row(plan, time.process_time() - begin)


def complete_fusion(profile_of: Callable[[int], Profile]) -> tuple[int, int]:
    """Static bytes and peak of all members fused, with as much memory as that takes."""
    planner = Planner(
        [Group("0", tuple(f"member {number}" for number in range(NUM_MEMBERS)))],
        profile_of=lambda _, width: profile_of(width),
        policy="capuchin",
        fixed_bytes=FIXED_BYTES,
        max_partitions=2,
    )
    tensors = profile_of(NUM_MEMBERS).tensors
    static = sum(tensor.size_bytes for tensor in tensors if tensor.byte_class.is_static)
    return static + FIXED_BYTES, planner.plan(1 << 62).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="a100-40gb", choices=sorted(tm.DEVICES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/planning.json"))
    parser.add_argument("--table", type=Path, help="write the page of these results and do nothing else")
    given = parser.parse_args()
    if given.table is not None:
        print("\n".join(page(json.loads(given.table.read_text(encoding="utf-8")))))
        return
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
            profiles = Profiles(name, given.device, given.profiles)
            measure(name, given.device, profiles, given.policies.split(","), results, given.out)
        except ImportError as error:
            results["workloads"][name] = {"error": str(error)}


def measure(
    name: str,
    device: str,
    profiles: Profiles,
    policies: Sequence[str],
    results: dict[str, Any],
    out: Path,
) -> None:
    """The policies at all budgets; what is there is written after each."""
    static, peak = complete_fusion(profiles.of)
    found: dict[str, Any] = {"static_bytes": static, "complete_fusion_bytes": peak, "budgets": []}
    results["workloads"][name] = found
    for share, factor in SHARES.items():
        budget = min(int(static + factor * (peak - static)), tm.DEVICES[device].memory_bytes)
        rows: dict[str, Any] = {}
        found["budgets"].append({"share": share, "budget_bytes": budget, "policies": rows})
        for policy in policies:
            rows[policy] = planned(profiles.of, device, budget, policy)
            shown = rows[policy].get("step_ms")
            text = "nothing fits" if shown is None else f"{shown:.2f} ms"
            print(f"{name}, {share} ({budget / 2**30:.2f} GiB), {policy}: {text}", flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1), encoding="utf-8")


def page(results: dict[str, Any]) -> Iterator[str]:
    """A results file as Markdown."""
    yield "# Policies under memory pressure, predicted"
    yield ""
    yield f"Written by `benchmarks/planning.py --table` from results of {results['date'][:10]}"
    yield f"(torch {results['torch']}): `{results['command']}`."
    yield ""
    yield f"{results['num_members']} members, device {results['device']['name']}, times from data sheets,"
    yield "nothing was run. A budget is static memory plus a share of what complete fusion needs beyond that."
    yield "A cell has the predicted step in ms, then recompute time as a share of compute time / the share of"
    yield "copy time that runs beside compute, both in %, and the sub-arrays' widths. `-`: nothing fits."
    yield ""
    if results.get("note"):
        yield results["note"]
        yield ""
    yield f"| workload, share, budget | {' | '.join(POLICIES)} |"
    yield f"|---|{'---|' * len(POLICIES)}"
    for name, found in results["workloads"].items():
        for budget in found.get("budgets", ()):
            head = f"{name}, {budget['share']}, {budget['budget_bytes'] / 2**30:.2f} GiB"
            cells = [_cell(budget["policies"].get(policy, {})) for policy in POLICIES]
            yield f"| {head} | {' | '.join(cells)} |"


def _cell(found: dict[str, Any]) -> str:
    if "step_ms" not in found:
        return "-"
    decisions = ""
    if found["num_swaps"] or found["num_recomputes"]:
        overlap = f"{100 * found['swap_overlap']:.0f}" if found["num_swaps"] else "-"
        decisions = f", {100 * found['recompute_share']:.1f} / {overlap}"
    widths = found["widths"]
    if len(set(widths)) == 1 and len(widths) > 2:
        shown = f"{len(widths)}×{widths[0]}"
    else:
        shown = "+".join(str(width) for width in widths)
    return f"{found['step_ms']:.2f}{decisions} ({shown} {found['multiplexing']})"


if __name__ == "__main__":
    main()
