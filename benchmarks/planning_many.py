"""How long scheduling takes for many members of a large model, at budgets from loose to below static memory.

    python benchmarks/planning_many.py --profiles runs/profiles --out planning_many.json

The profile of eight BERTs (`benchmarks/planning.py`) is scaled to the other widths: bytes and times grow with
the number of members, kernels stay the same. A budget is static memory plus a share of what complete fusion
needs beyond it; a negative share is below static memory. Profiles are given: only scheduling is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planning import make_profile, profile_path, row

from trainmux.errors import BudgetError
from trainmux.ir import Profile, load
from trainmux.scheduling import Group, Planner

NUM_MEMBERS = 64
SHARES = (1 / 3, 1 / 20, 1 / 100, -0.1)
POLICIES = ("mutwo", "auto")
LAUNCH_SECONDS = 3e-6
"""Of a node's time, what does not grow with the width."""


def scaled(base: Profile, width: int) -> Profile:
    """The same kernels for another number of members."""
    factor = width / base.width
    return replace(
        base,
        width=width,
        fingerprint=f"{base.fingerprint} as {width}",
        tensors=tuple(
            replace(
                tensor,
                size_bytes=int(tensor.size_bytes * factor),
                swap_out_seconds=tensor.swap_out_seconds * factor,
                swap_in_seconds=tensor.swap_in_seconds * factor,
                swap_out_duplex_seconds=tensor.swap_out_duplex_seconds * factor,
                swap_in_duplex_seconds=tensor.swap_in_duplex_seconds * factor,
            )
            for tensor in base.tensors
        ),
        nodes=tuple(
            replace(
                node,
                seconds=LAUNCH_SECONDS + max(0.0, node.seconds - LAUNCH_SECONDS) * factor,
                workspace_bytes=int(node.workspace_bytes * factor),
            )
            for node in base.nodes
        ),
    )


def timed(base: Profile, policy: str, share: float, max_partitions: int) -> dict[str, Any]:
    known: dict[int, Profile] = {}

    def profile_of(_: Group, width: int) -> Profile:
        if width not in known:
            known[width] = scaled(base, width)
        return known[width]

    group = Group("0", tuple(f"member {number}" for number in range(NUM_MEMBERS)))
    whole = profile_of(group, NUM_MEMBERS)
    static = sum(tensor.size_bytes for tensor in whole.tensors if tensor.byte_class.is_static)
    fusion = Planner([group], profile_of=profile_of, policy="capuchin", max_partitions=2)
    budget = int(static + share * (fusion.plan(1 << 62).peak_bytes - static))
    begin, cpu_begin = time.perf_counter(), time.process_time()
    planner = Planner(
        [group], profile_of=profile_of, policy=policy, host_bytes=10**12, max_partitions=max_partitions
    )
    try:
        found = row(planner.plan(budget))
    except BudgetError as error:
        found = {"error": str(error), "smallest_bytes": error.smallest_bytes}
    found["scheduling_seconds"] = time.perf_counter() - begin
    found["scheduling_cpu_seconds"] = time.process_time() - cpu_begin
    return {"policy": policy, "share": share, "budget_bytes": budget, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=Path(tempfile.gettempdir()) / "trainmux_profiles")
    parser.add_argument("--partitions", type=int, default=5, help="as fleets of large models try")
    parser.add_argument("--out", type=Path, default=Path("runs/planning_many.json"))
    given = parser.parse_args()
    name, device, width = "bert_base_mlm_no_dropout", "a100-40gb", 8
    make_profile(given.profiles, name, device, width)
    base = load(profile_path(given.profiles, name, device, width), Profile)
    results: dict[str, Any] = {
        "command": f"python benchmarks/planning_many.py --partitions {given.partitions}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "num_members": NUM_MEMBERS,
        "nodes_per_sub_array": len(base.nodes),
        "max_partitions": given.partitions,
        "cases": [],
    }
    for policy in POLICIES:
        for share in SHARES:
            results["cases"].append(timed(base, policy, share, given.partitions))
            print(json.dumps({**results["cases"][-1], "widths": None}), flush=True)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
