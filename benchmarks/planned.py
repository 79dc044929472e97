"""Fleets under a plan: predicted against measured step time and memory, for budgets and policies.

    python benchmarks/planned.py gpt2_no_dropout --members 8 --shares 1/2,1/3 --policies mutwo,auto \\
        --budgets 16GiB --out planned.json

A share's budget is static + share × (peak - static): static is what the fleet holds between steps, peak what
its plan without any decisions reserves (policy "none" with all members in one array). ``--budgets`` are named
in bytes, or as parts of static memory ("0.9static"). The first row is the fleet without a plan. What was
measured is written after each row; a table of all comes last. ``small:NAME`` workloads try it out on a CPU.
``--processes`` plans that many rows at a time in processes of their own before the first is measured. That
may be done on another machine, in three steps, the second of which needs no device:

    python benchmarks/planned.py gpt2_no_dropout --ask folder
    python benchmarks/planned.py gpt2_no_dropout --answer folder --processes 16
    python benchmarks/planned.py gpt2_no_dropout --plans folder --out planned.json

    python benchmarks/planned.py --page planned.json > docs/planned.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from planned_ahead import Wanted, answer, read_answer, read_question, static_bytes, write_question
from planned_trace import traced_lanes

import trainmux as tm
from benchmarks.bench.cases import find_case
from trainmux.sizes import parse_budget

NUM_BLOCKS = 5
STEPS_PER_BLOCK = 6
NUM_BATCHES = 3
LARGE_SEGMENT = 16 << 20
NUM_DIFFERENT = 30
WHOLE = "1"
"""What the budget is called that constrains nothing."""


class Bench:
    """One fleet, trained by one plan after another."""

    def __init__(
        self, name: str, num_members: int, device: str, precision: str, batch_size: int | None = None
    ) -> None:
        case = find_case(name)
        self.device = torch.device(device)
        self.before = self.used()
        members = []
        for number, model in enumerate(case.models(num_members)):
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 * (number + 1))
            members.append(tm.Member(model, optimizer, name=f"member {number}", seed=number))
        size = batch_size or case.batch_sizes[0]
        self.batches = [case.batch(number, size) for number in range(NUM_BATCHES)]
        lowering = "inductor" if device == "cuda" else "auto"
        self.fleet = tm.Fleet(
            members, case.loss, self.batches[0], device=device, precision=precision, lowering=lowering
        )

    def used(self) -> int:
        """Bytes of the device that are in use, by anybody."""
        if self.device.type != "cuda":
            return 0
        torch.zeros(1, device=self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self) -> dict[str, Any]:
        """Milliseconds of a step of all members, and what the device holds meanwhile."""
        begin = time.perf_counter()
        for batch in self.batches:
            losses = self.fleet.step(batch)
        self.wait()
        first = time.perf_counter() - begin
        times = []
        for _ in range(NUM_BLOCKS):
            begin = time.perf_counter()
            for number in range(STEPS_PER_BLOCK):
                losses = self.fleet.step(self.batches[number % NUM_BATCHES])
            self.wait()
            times.append((time.perf_counter() - begin) / STEPS_PER_BLOCK * 1e3)
        row: dict[str, Any] = {
            "step_ms": statistics.median(times),
            "step_ms_of_blocks": times,
            "first_steps_s": first,
            "finite": bool(torch.isfinite(losses).all()),
        }
        if self.device.type == "cuda":
            row["device_bytes"] = self.used() - self.before
            row["reserved_bytes"] = torch.cuda.memory_reserved()
            row["segments"] = segments()
        return row

    def measured_whole(
        self,
        num_partitions: int,
        keep: Callable[[dict[str, Any]], None],
        kept: tuple[tm.Plan | None, dict[str, Any]] = (None, {}),
    ) -> tm.Plan:
        """The plan that nothing constrains, as it was ``kept`` or made now, and its row."""
        plan, how = kept
        if plan is None:
            plan, row = self.plan(None, "none", num_partitions)
        else:
            row = {**described(plan), **how}
            self.fleet.use(plan)
        keep({"share": WHOLE, **row, **self.measure()})
        return plan

    def watch(self, plan: tm.Plan) -> dict[str, Any]:
        """One step as it was predicted and as it ran: busy lanes, and the nodes that differ most."""
        predicted, measured = plan.timeline, self.fleet.watch(self.batches[0])
        row: dict[str, Any] = {}
        for timeline in (predicted, measured):
            row[timeline.source] = {
                "step_ms": timeline.seconds * 1e3,
                "compute_ms": timeline.compute_seconds * 1e3,
                "stall_ms": timeline.stall_seconds * 1e3,
                "copy_ms": timeline.copy_seconds * 1e3,
                "hidden_copy_ms": timeline.hidden_copy_seconds * 1e3,
                "busy_ms_by_lane": _busy(timeline),
            }
        before = {(span.lane, span.instruction): span.end - span.start for span in predicted.spans}
        longer = [
            (span.end - span.start - before.get((span.lane, span.instruction), 0.0), span)
            for span in measured.spans
        ]
        longer.sort(key=lambda pair: -abs(pair[0]))
        instructions = plan.program.body.instructions
        row["most_different"] = [
            {"us": seconds * 1e6, "lane": span.lane.value, "instruction": str(instructions[span.instruction])}
            for seconds, span in longer[:NUM_DIFFERENT]
        ]
        return row

    def trace(self) -> dict[str, Any]:
        """Lanes of steps that follow upon each other as in training."""

        def train() -> None:
            for number in range(STEPS_PER_BLOCK):
                self.fleet.step(self.batches[number % NUM_BATCHES])

        train()
        self.wait()
        return traced_lanes(train, STEPS_PER_BLOCK)

    def plan(self, budget: int | None, policy: str, num_partitions: int) -> tuple[tm.Plan, dict[str, Any]]:
        begin = time.perf_counter()
        plan = self.fleet.plan(budget, policy, max_partitions=num_partitions)
        return plan, {**described(plan), "planning_s": time.perf_counter() - begin}


def described(plan: tm.Plan) -> dict[str, Any]:
    """What a plan decides and predicts."""
    record = plan.record
    return {
        "policy": plan.policy,
        "budget_bytes": plan.budget_bytes,
        "widths": [len(sub_array.members) for sub_array in plan.partition],
        "num_branches": record.num_branches,
        "multiplexing": record.schedule.multiplexing.value,
        "num_swaps": len(plan.swaps),
        "num_recomputes": len(plan.recomputes),
        "predicted_ms": plan.step_seconds * 1e3,
        "predicted_bytes": plan.peak_bytes,
        "fixed_bytes": record.fixed_bytes,
        "host_bytes": record.host_bytes,
        "bound_ms": plan.bound_seconds * 1e3,
        "stall_ms": record.stall_seconds * 1e3,
        "recompute_share": record.recompute_share,
        "swap_overlap": record.swap_overlap,
        "explained": plan.explain().splitlines(),
    }


def segments() -> list[dict[str, Any]]:
    """What the allocator holds in large pieces: pool, bytes, bytes in use."""
    found = [
        {
            "pool": list(segment["segment_pool_id"]),
            "bytes": segment["total_size"],
            "in_use": segment["allocated_size"],
        }
        for segment in torch.cuda.memory_snapshot()
        if segment["total_size"] >= LARGE_SEGMENT
    ]
    return sorted(found, key=lambda segment: -segment["bytes"])


def _busy(timeline: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in timeline.spans:
        found[span.lane.value] = found.get(span.lane.value, 0.0) + (span.end - span.start) * 1e3
    return found


def sub_arrays(row: dict[str, Any]) -> str:
    """Their widths, and how they share the device."""
    beside = " side by side" if row.get("num_branches", 1) > 1 else ""
    return f"{'+'.join(map(str, row['widths']))}{beside} {row['multiplexing']}"


def show(row: dict[str, Any]) -> None:
    parts = [f"{row.get('share', ''):>5} {row.get('policy', 'no plan'):<14}"]
    if "error" in row:
        parts.append(row["error"])
    else:
        if "widths" in row:
            parts.append(f"{sub_arrays(row)}, {row['num_swaps']} swaps, ")
            parts.append(f"{row['num_recomputes']} recomputes, planned in {row['planning_s']:.0f} s,")
            parts.append(f"{row['predicted_bytes'] / 2**30:.2f} of {row['budget_bytes'] / 2**30:.2f} GiB,")
            parts.append(f"predicted {row['predicted_ms']:.2f},")
        parts.append(f"measured {row['step_ms']:.2f} ms")
        if "device_bytes" in row:
            device, reserved = row["device_bytes"] / 2**30, row["reserved_bytes"] / 2**30
            parts.append(f"device {device:.2f} reserved {reserved:.2f} GiB")
    print(" ".join(parts), flush=True)


def budgets(shares: str, named: str, static: int, peak: int) -> Iterator[tuple[str, int]]:
    """What to call each budget, and its bytes."""
    for share in filter(None, shares.split(",")):
        yield share, static + int(Fraction(share) * (peak - static))
    for name in filter(None, named.split(",")):
        part = name.removesuffix("static")
        yield name, int(float(part) * static) if part != name else parse_budget(name, device_bytes=1 << 50)


COLUMNS = (
    "budget",
    "policy",
    "sub-arrays",
    "step ms",
    "/ no plan",
    "/ bound",
    "/ predicted",
    "GiB",
    "/ budget",
    "hidden",
)


def cells(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Of each plan: its step against the fleet without a plan, its bound and what was predicted, its bytes
    against its budget, and the share of copy time that ran beside compute.

    Bytes are those that the device has in use, less what it had beside torch's before the first plan: the
    context and the kernels' code.
    """
    alone = without_plan(rows)
    context = alone.get("device_bytes", 0) - alone.get("reserved_bytes", 0)
    for row in rows:
        if row is alone:
            continue
        if "error" in row:
            yield (row["share"], row["policy"], "nothing fits", *[""] * (len(COLUMNS) - 3))
            continue
        measured = row.get("replayed") or row.get("watched", {}).get("measured", {})
        copied, held = measured.get("copy_ms", 0), row.get("device_bytes", 0) - context
        yield (
            row["share"],
            row["policy"],
            sub_arrays(row),
            f"{row['step_ms']:.2f}",
            f"{row['step_ms'] / alone['step_ms']:.3f}" if alone else "",
            f"{row['step_ms'] / max(row['bound_ms'], row.get('fluid_bound_ms', 0.0)):.3f}",
            f"{row['step_ms'] / row['predicted_ms']:.3f}",
            f"{held / 2**30:.2f}",
            f"{held / row['budget_bytes']:.3f}",
            f"{measured['hidden_copy_ms'] / copied:.2f}" if copied else "",
        )


def without_plan(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the fleet without a plan; empty where there was no time for it."""
    return next((row for row in rows if "share" not in row), {})


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, for a terminal."""
    found = [COLUMNS, *cells(rows)]
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in found)


def page(results: Sequence[dict[str, Any]]) -> str:
    """All results, as Markdown."""
    lines = [
        "# Plans as they ran",
        "",
        "Written by `benchmarks/planned.py --page`. Budgets are static memory (parameters, buffers,",
        "optimizer state) plus a share of what the plan without decisions needs beyond that, or as named. Of",
        "each plan: its step; that step by the fleet's without a plan, by the bound from compute, needed",
        "recomputation and link, and by what was predicted; the bytes that the device has in use (less",
        "context and kernels' code) and those by the budget; the share of copy time that ran beside compute,",
        "seen on the lanes of replayed steps, or in older results of one that is run instruction by",
        "instruction, which is slower. The bound is `plan.bound_seconds`, or for plans that were made ahead",
        "that of a linear program over time for the plan's order (`tests/unit/scheduling/fluid.py`) if it is",
        "higher: since 2026-11-17 with compute that is slower beside copies, as it is in plans.",
    ]
    for result in results:
        alone = without_plan(result["rows"])
        lines += [
            "",
            f"## {result['num_members']} × {result['workload']}, {result['precision']}, {result['device']}",
            "",
            f"{result['date'][:10]}, torch {result['torch']}: `{result['command']}`.",
            (
                f"Without a plan {alone['step_ms']:.2f} ms, "
                f"{alone.get('reserved_bytes', 0) / 2**30:.2f} GiB; static"
                if alone
                else "Not measured without a plan; static"
            )
            + f" memory {result['static_bytes'] / 2**30:.2f} GiB.",
            *([result["note"]] if "note" in result else []),
            "",
            *(
                "| " + " | ".join(line) + " |"
                for line in (COLUMNS, ["---"] * len(COLUMNS), *cells(result["rows"]))
            ),
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("workload", nargs="?", default="small:mlp")
    parser.add_argument("--page", type=Path, nargs="+", help="print these results as a page; run nothing")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--batch-size", type=int, help="another than the workload's first one")
    parser.add_argument("--shares", default="1/2,1/3,1/6")
    parser.add_argument("--budgets", default="", help="further ones: 16GiB, 0.9static")
    parser.add_argument("--policies", default="none,capuchin,mutwo,auto")
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--watch", action="store_true", help="also when each instruction ran")
    parser.add_argument("--trace", default="", help="budgets with which, at last, lanes of replays are seen")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="begin no row after so long")
    parser.add_argument("--processes", type=int, default=0, help="plan so many rows at a time beforehand")
    apart = parser.add_mutually_exclusive_group()
    apart.add_argument("--ask", type=Path, help="only write down in this folder what planning needs to know")
    apart.add_argument("--answer", type=Path, help="only plan by what this folder has; needs no device")
    apart.add_argument("--plans", type=Path, help="take plans from this folder")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/planned.json"))
    options = parser.parse_args()
    if options.page:
        print(page([json.loads(path.read_text()) for path in options.page]))
        return
    if options.answer:
        question = read_question(options.answer)
        wanted = wanted_of(options, question["static_bytes"], question["peak_bytes"])
        whole = (WHOLE, question["memory_bytes"], "none")
        for line in answer(options.answer, [whole, *wanted], max(1, options.processes)):
            print(line, flush=True)
        return
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "command": "python benchmarks/planned.py " + " ".join(_without_out(sys.argv[1:])),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "workload": options.workload,
        "num_members": options.members,
        "precision": options.precision,
        "rows": rows,
    }

    def write() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        show(row)
        write()

    bench = Bench(options.workload, options.members, options.device, options.precision, options.batch_size)
    if options.ask:
        write_question(bench.fleet, options.partitions, options.ask)
        return
    # Streams keep workspaces of the matrix libraries once they have been used, and plans that were made
    # elsewhere do not count those: what uses the fewest streams goes first then, what has no plan last.
    if options.plans:
        question = read_question(options.plans)
        static, peak = question["static_bytes"], question["peak_bytes"]
        wanted = sorted(wanted_of(options, static, peak), key=lambda row: _num_branches(options.plans, row))
    else:
        keep(bench.measure())
        whole = bench.measured_whole(options.partitions, keep)
        static, peak = static_bytes(whole), whole.peak_bytes
        wanted = wanted_of(options, static, peak)
    result["static_bytes"] = static
    to_trace: list[tuple[tm.Plan, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.plans
        if folder is None and options.processes:
            folder = Path(temporary)
            write_question(bench.fleet, options.partitions, folder)
            for line in answer(folder, wanted, options.processes):
                print(f"{line} (after {time.perf_counter() - begin:.0f} s)", flush=True)
        for share, budget, policy in wanted:
            if time.perf_counter() - begin > options.limit_seconds:
                print(f"no time for {share} {policy}", flush=True)
                continue
            row = {"share": share, "policy": policy, "budget_bytes": budget}
            try:
                if folder is None:
                    plan, how = bench.plan(budget, policy, options.partitions)
                else:
                    answered, how = read_answer(folder, share, policy)
                    if answered is None:
                        keep({**row, **how})
                        continue
                    plan, how = answered, {**described(answered), **how}
                    bench.fleet.use(plan)
                row |= {**how, **bench.measure()}
                keep({**row, "watched": bench.watch(plan)} if options.watch else row)
                if share in options.trace.split(","):
                    to_trace.append((plan, rows[-1]))
            except tm.errors.TrainmuxError as error:
                keep({**row, "error": str(error)})
    if options.plans:
        bench.measured_whole(options.partitions, keep, read_answer(options.plans, WHOLE, "none"))
        bench.fleet.use(None)
        keep(bench.measure())
        if options.trace:
            rows[-1]["replayed"] = bench.trace()
    for plan, row in to_trace:  # the profiler takes memory of its own: not before all of that is measured
        bench.fleet.use(plan)
        row["replayed"] = bench.trace()
    write()
    print(table(rows), flush=True)


def _num_branches(folder: Path, wanted: Wanted) -> int:
    share, _, policy = wanted
    plan, _ = read_answer(folder, share, policy)
    return 0 if plan is None else plan.record.num_branches


def wanted_of(options: argparse.Namespace, static: int, peak: int) -> list[Wanted]:
    """Every budget with every policy."""
    return [
        (share, budget, policy)
        for policy in options.policies.split(",")
        for share, budget in budgets(options.shares, options.budgets, static, peak)
    ]


def _without_out(arguments: list[str]) -> list[str]:
    if "--out" in arguments:
        at = arguments.index("--out")
        return arguments[:at] + arguments[at + 2 :]
    return arguments


if __name__ == "__main__":
    main()
