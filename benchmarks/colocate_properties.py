"""Co-location on a simulated GPU: what must hold for ten thousand random cases, and what sharing gains.

    python benchmarks/colocate_properties.py --cases 10000 --out benchmarks/results/colocate_properties.json

Four parts. *Properties*: random pairs and triples under ±30% jitter; every violation is counted, none is
allowed. *Gains*: pairs whose peaks exceed the budget by 1.3 to 1.8 times; which part of the gain with
unlimited memory is left, for several values of each of the scheduler's constants. *Equal jobs*: the same for
two jobs of one shape. *Decisions*: how long the scheduler takes to decide, in Python on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import timeit
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainmux.colocate import (
    REGION_BYTES,
    Action,
    Contention,
    Idle,
    JobDemand,
    ScroogeConstants,
    ScroogeScheduler,
    Segment,
    SegmentRef,
    SimulatedGpu,
    smallest_budget,
)
from trainmux.colocate._trend import Remainder, Trend, least_shift

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "colocate"))
from colocate_cases import random_case, violations

OVERSUBSCRIPTIONS = (1.3, 1.5, 1.8)
GAIN_JITTER = 0.05
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "time_step_share=1/8": {"time_step_share": 1 / 8},
    "time_step_share=1/16": {"time_step_share": 1 / 16},
    "time_step_share=1/256": {"time_step_share": 1 / 256},
    "first_budget_share=0.5": {"first_budget_share": 0.5},
    "first_budget_share=1": {"first_budget_share": 1.0},
    "ramp_steps=16": {"ramp_steps": 16},
    "in_flight_limit=1": {"in_flight_limit": 1},
    "in_flight_limit=4": {"in_flight_limit": 4},
    "in_flight_limit=8": {"in_flight_limit": 8},
    "feedback_weight=1": {"feedback_weight": 1.0},
    "patience_iterations=2": {"patience_iterations": 2.0},
    "patience_iterations=0.01": {"patience_iterations": 0.01},
    "leeway=1": {"leeway": 1.0},
    "rounds_to_lose=1/2": {"rounds_to_lose": 0.5},
}


def properties(num_cases: int) -> dict[str, Any]:
    """Run the random cases; count what went wrong."""
    begin = time.perf_counter()
    bad, over_temporal, ratios, num_triples = [], 0, [], 0
    for seed in range(num_cases):
        case = random_case(seed)
        num_triples += len(case.demands) == 3
        run = case.run()
        if violations(case, run) or run.idle_seconds > 0:
            bad.append(seed)
        ratios.append(run.ended_at / case.temporal_seconds)
        over_temporal += ratios[-1] > 1.01
    return {
        "cases": num_cases,
        "triples": num_triples,
        "with_violations": bad,
        "slower_than_1.01_temporal": over_temporal,
        "worst_over_temporal": max(ratios),
        "mean_over_temporal": statistics.fmean(ratios),
        "seconds": time.perf_counter() - begin,
    }


def shaped_job(name: str, num_regions: int, beef: float, seconds: float, steps: int, cuts: int) -> JobDemand:
    """A job that rises for a third of its iteration; the smaller ``beef``, the longer it is near its peak."""
    heights = []
    for number in range(cuts):
        place = (number + 0.5) / cuts
        heights.append(round(num_regions * min(1.0, place / 0.35, (1 - place) / 0.65) ** beef))
    segments = tuple(
        Segment(
            1, height * REGION_BYTES, min(height, (*heights[1:], 0)[number]) * REGION_BYTES, seconds / cuts
        )
        for number, height in enumerate(heights)
    )
    local_bytes = num_regions // 10 * REGION_BYTES
    return JobDemand(
        name,
        f"{num_regions}-{beef}-{seconds}-{cuts}",
        REGION_BYTES,
        local_bytes,
        segments,
        steps,
        is_measured=True,
    )


def random_pair(seed: int) -> tuple[list[JobDemand], Contention]:
    """Equal jobs, or unequal ones of up to four times the other's iteration but as much device time."""
    rng = random.Random(seed)
    ratio = rng.choice((1.0, 1.5, 2.5, 4.0))
    cuts, beef, regions = rng.randint(20, 80), rng.choice((0.3, 0.6, 1.0, 1.5)), rng.randint(20, 150)
    first = shaped_job("a", regions, beef, 0.1, round(24 * ratio), cuts)
    second = replace(first, name="b")
    if rng.random() < 0.6:
        cuts, beef, regions = rng.randint(20, 80), rng.choice((0.3, 0.6, 1.0, 1.5)), rng.randint(20, 150)
        second = shaped_job("b", regions, beef, 0.1 * ratio, 24, cuts)
    demands = (0.5, 0.75, 0.85, 0.95)
    return [first, second], Contention({"a": rng.choice(demands), "b": rng.choice(demands)})


def gain(
    demands: list[JobDemand],
    budget: int,
    contention: Contention,
    constants: ScroogeConstants,
    jitter: float = 0.0,
) -> float:
    """Turns over sharing, less one, on the same sampled durations."""
    rng = random.Random(17)
    seconds = {
        (demand.name, iteration, number): segment.solo_seconds * rng.uniform(1 - jitter, 1 + jitter)
        for demand in demands
        for iteration in range(demand.steps or 0)
        for number, segment in enumerate(demand.segments)
    }
    scheduler = ScroogeScheduler(demands, budget, constants=constants)
    run = SimulatedGpu(scheduler, lambda ref: seconds[tuple(ref)], contention).run()
    return sum(seconds.values()) / run.ended_at - 1


def gains(num_pairs: int) -> dict[str, Any]:
    """The part of the unlimited gain that is left, by constants and by how much peaks exceed the budget."""
    found: dict[str, Any] = {}
    pairs = [random_pair(seed) for seed in range(num_pairs)]
    full = [sum(d.local_bytes + d.peak_bytes for d in demands) for demands, _ in pairs]
    unlimited = [
        gain(demands, size, contention, ScroogeConstants(), GAIN_JITTER)
        for (demands, contention), size in zip(pairs, full, strict=True)
    ]
    for label, changes in VARIANTS.items():
        constants = ScroogeConstants(**changes)
        found[label] = {}
        for over in OVERSUBSCRIPTIONS:
            parts = [
                gain(
                    demands,
                    max(smallest_budget(demands), int(size / over)),
                    contention,
                    constants,
                    GAIN_JITTER,
                )
                / best
                for (demands, contention), size, best in zip(pairs, full, unlimited, strict=True)
                if best > 0.02
            ]
            found[label][str(over)] = {
                "mean": statistics.fmean(parts),
                "median": statistics.median(parts),
                "worst_tenth": sorted(parts)[len(parts) // 10],
            }
        print(label, {over: round(row["mean"], 3) for over, row in found[label].items()}, flush=True)
    return {"pairs": num_pairs, "jitter": GAIN_JITTER, "part_of_unlimited_gain": found}


class TimedScheduler(ScroogeScheduler):
    """Takes down how long each answer takes: with a prediction before an iteration, and without."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.predict_us: list[float] = []
        self.continue_us: list[float] = []
        self.complete_us: list[float] = []
        super().__init__(*args, **kwargs)

    def next_action(self, now: float) -> Action:
        self.has_predicted = False
        begin = time.perf_counter_ns()
        action = super().next_action(now)
        taken = (time.perf_counter_ns() - begin) / 1e3
        if self.has_predicted:
            self.predict_us.append(taken)
        elif not isinstance(action, Idle):
            self.continue_us.append(taken)
        return action

    def _predict(self, *args: Any) -> float | None:
        self.has_predicted = True
        return super()._predict(*args)

    def complete(self, ref: SegmentRef, started_at: float, ended_at: float) -> None:
        begin = time.perf_counter_ns()
        super().complete(ref, started_at, ended_at)
        self.complete_us.append((time.perf_counter_ns() - begin) / 1e3)


def decisions() -> dict[str, Any]:
    """Microseconds per answer, for jobs of the paper's 11 GB and 32 GB devices in regions of 64 MB."""
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "cpus": os.cpu_count()}
    for num_regions, cuts in ((40, 60), (170, 340), (512, 1024)):
        pair = [
            shaped_job("a", num_regions, 1.0, 0.1, 12, cuts),
            shaped_job("b", num_regions, 0.8, 0.13, 12, cuts),
        ]
        budget = int(sum(demand.local_bytes + demand.peak_bytes for demand in pair) / 1.5)
        scheduler = TimedScheduler(pair, budget)
        seconds = {demand.name: demand.segments[0].solo_seconds for demand in pair}
        contention = Contention({"a": 0.8, "b": 0.8})
        SimulatedGpu(scheduler, lambda ref, seconds=seconds: seconds[ref.job], contention).run()
        rows = {
            "an iteration begins or is shifted": scheduler.predict_us,
            "a segment follows": scheduler.continue_us,
            "a segment is complete": scheduler.complete_us,
        }
        mine, other = Trend(pair[0]), Trend(pair[1])
        arena_bytes = budget - sum(demand.local_bytes for demand in pair)
        walks = []
        for place in (0.1, 0.3, 0.5, 0.7, 0.9):
            rest = Remainder(other, int(place * cuts), 0.0)
            start = other.begins[int(place * cuts)]
            timer = timeit.Timer(
                lambda m=mine, s=start, r=rest, a=arena_bytes: least_shift(m, s, r, a)  # type: ignore[misc]
            )
            walks.append(min(timer.repeat(repeat=40, number=50)) / 50 * 1e6)
        found[f"{num_regions} regions, {cuts} segments"] = {
            "best_us_of_one_walk_by_place_of_the_peer": walks,
        } | {
            what: {
                "median_us": statistics.median(times),
                "p95_us": sorted(times)[len(times) * 95 // 100],
                "count": len(times),
            }
            for what, times in rows.items()
        }
    return found


def equal_jobs() -> dict[str, Any]:
    """The part of the unlimited gain that two equal jobs keep, from beefy to lean, without jitter."""
    found: dict[str, Any] = {}
    contention = Contention({"a": 0.75, "b": 0.75})
    for beef in (0.3, 0.6, 1.0, 1.5):
        first = shaped_job("a", 100, beef, 0.1, 30, 60)
        pair = [first, replace(first, name="b")]
        full = sum(demand.local_bytes + demand.peak_bytes for demand in pair)
        best = gain(pair, full, contention, ScroogeConstants())
        found[f"beef={beef}"] = {
            str(over): gain(pair, int(full / over), contention, ScroogeConstants()) / best
            for over in OVERSUBSCRIPTIONS
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/colocate_properties.json"))
    parts = {
        "decisions": lambda given: decisions(),
        "properties": lambda given: properties(given.cases),
        "gains": lambda given: gains(given.pairs),
        "equal_jobs": lambda given: equal_jobs(),
    }
    parser.add_argument(
        "--only", choices=list(parts), help="measure this part anew, keep the rest of the file"
    )
    given = parser.parse_args()
    result: dict[str, Any] = {}
    if given.only:
        result = json.loads(given.out.read_text(encoding="utf-8"))
    result |= {
        "command": f"python benchmarks/colocate_properties.py --cases {given.cases} --pairs {given.pairs}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": "a simulated GPU; the decisions' own time was measured, on a CPU",
    }
    for name, measure in parts.items():
        if given.only in (None, name):
            result[name] = measure(given)
            print(name, json.dumps(result[name], indent=1))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
