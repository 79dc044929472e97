"""How far policies are from the optimum on small random steps, by mixed integer programming.

    python benchmarks/planning_gap.py --graphs 200 --out planning_gap.json

Each graph is one sub-array of three layers, with a limit half way between the least that swapping everything
needs and what nothing decided needs. The optimum is over all swaps and recomputations of feature maps in the
plain order; a policy that also swaps static tensors, or multiplexes, may be quicker than it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainmux.ir import Multiplexing, Schedule
from trainmux.rewrite import rewrite
from trainmux.scheduling import Infeasible, Task, policy_named
from trainmux.simulate import lane_times, peak_live_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "scheduling"))
from exact import solve
from tests.random_steps import Shape, random_profile

SHAPE = Shape(num_layers=3, duplex_slowdown=1.0)
POLICIES = ("swap_only", "recompute_only", "capuchin", "mutwo", "auto")


def gaps_of(seed: int, seconds: float) -> dict[str, Any] | None:
    """Each policy's time over the optimum for one graph; ``None`` where there is nothing to decide."""
    profile = random_profile(seed, 1, SHAPE)
    order = tuple((0, rank) for rank in range(len(profile.nodes)))
    high = peak_live_bytes(rewrite([profile], Schedule(Multiplexing.TURNS, order, (), ())).body)
    low = _least(profile, high)
    limit = (low + high) // 2
    best = solve([profile], Multiplexing.TURNS, order, limit, seconds=seconds)
    if best is None or low >= high:
        return None
    task = Task((profile,), Multiplexing.TURNS, limit, 1 << 50)
    found: dict[str, Any] = {}
    for name in POLICIES:
        try:
            schedule = policy_named(name).policy.schedule(task)
        except Infeasible:
            found[name] = None
            continue
        taken = lane_times(rewrite([profile], schedule).body, [profile]).seconds
        found[name] = taken / best.seconds
    return {
        "seed": seed,
        "nodes": len(order),
        "proved": best.bound_seconds / best.seconds,
        "over_optimum": found,
    }


def _least(profile: Any, high: int) -> int:
    """The lowest limit at which anything works, by halving."""
    order = tuple((0, rank) for rank in range(len(profile.nodes)))
    low = sum(tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static)
    top = high
    for _ in range(4):
        middle = (low + top) // 2
        if solve([profile], Multiplexing.TURNS, order, middle, seconds=2.0, gap=0.5) is None:
            low = middle
        else:
            top = middle
    return top


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="that the solver may take for a graph")
    parser.add_argument("--stop-after", type=float, default=3600.0, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("runs/planning_gap.json"))
    given = parser.parse_args()
    begin = time.perf_counter()
    rows = []
    for seed in range(given.graphs):
        if time.perf_counter() - begin > given.stop_after:
            break
        row = gaps_of(seed, given.seconds)
        if row is not None:
            rows.append(row)
    summary = {}
    for name in POLICIES:
        over = [row["over_optimum"][name] for row in rows]
        known = sorted(value for value in over if value is not None)
        summary[name] = {
            "median": statistics.median(known) if known else None,
            "mean": statistics.fmean(known) if known else None,
            "worst": max(known, default=None),
            "optimal": sum(value <= 1.001 for value in known),
            "found_nothing": len(over) - len(known),
        }
        print(name, json.dumps(summary[name]))
    result = {
        "command": f"python benchmarks/planning_gap.py --graphs {given.graphs} --seconds {given.seconds:g}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_graphs": len(rows),
        "seconds": time.perf_counter() - begin,
        "summary": summary,
        "graphs": rows,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"{len(rows)} graphs")


if __name__ == "__main__":
    main()
