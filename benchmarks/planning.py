"""Policies against each other on a device that need not be here: the paper's workloads under pressure.

    python benchmarks/planning.py --device a100-40gb --processes 16 --out planning.json
    python benchmarks/planning.py --table planning.json > docs/planning.md

For each workload the unconstrained complete fusion is planned first. Budgets are then static memory plus a
share of what it needs beyond that. Everything is predicted from data sheets (``trainmux.DEVICES``); nothing
here was run on such a device. Each workload, budget and policy is planned by a process of its own, and one
that takes longer than ``--limit-seconds`` is stopped and said to be. With ``--profiles`` these are kept in a
folder and read from there the next time: tracing and fusing takes longer than planning. The second command
writes a results file as a page.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from planning_beside import beside, growth_in_words

import trainmux as tm
from benchmarks.workloads import FULL_SIZE
from trainmux.ir import Plan, Profile, load, save
from trainmux.scheduling import Group, Planner, find_partitions

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
PROFILE_LIMIT_SECONDS = 600.0


# ---- what one process does -------------------------------------------------------------------------------


def fleet_of(name: str) -> tm.Fleet:
    workload = FULL_SIZE[name]
    model = workload.build(0).train()
    member = tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-4), name="member 0")
    batch = workload.batch(0, workload.batch_sizes[0])
    return tm.Fleet([member], workload.loss, batch, device="cpu", precision="bf16", lowering="aten")


def profile_path(folder: Path, name: str, device: str, width: int) -> Path:
    return folder / f"{name}.{device}.{width}.json"


def make_profile(folder: Path, name: str, device: str, width: int) -> dict[str, Any]:
    """That of ``width`` members as one array: a plan of so many with all the memory there could be."""
    path = profile_path(folder, name, device, width)
    begin = time.perf_counter()
    if not path.exists():
        facts = {"name": device, "memory_bytes": 10**13, "host_bytes": 10**13}
        large = tm.Device(**{**tm.DEVICES[device].__dict__, **facts})
        plan = fleet_of(name).plan(None, "capuchin", device=large, num_members=width, max_partitions=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, next(profile for profile in plan.profiles if profile.width == width))
    return {"seconds": time.perf_counter() - begin}


def read_profiles(folder: Path, name: str, device: str) -> Callable[[Group, int], Profile]:
    return lambda _, width: load(profile_path(folder, name, device, width), Profile)


def members() -> list[Group]:
    return [Group("0", tuple(f"member {number}" for number in range(NUM_MEMBERS)))]


def complete_fusion(folder: Path, name: str, device: str) -> dict[str, Any]:
    """Static bytes and peak of all members fused, with as much memory as that takes."""
    profile_of = read_profiles(folder, name, device)
    planner = Planner(
        members(), profile_of=profile_of, policy="capuchin", fixed_bytes=FIXED_BYTES, max_partitions=2
    )
    profile = profile_of(members()[0], NUM_MEMBERS)
    static = sum(tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static)
    return {
        "static_bytes": static + FIXED_BYTES,
        "complete_fusion_bytes": planner.plan(1 << 62).peak_bytes,
        "num_nodes": len(profile.nodes),
    }


def planned(folder: Path, name: str, device: str, budget: int, policy: str) -> dict[str, Any]:
    profiles = {width: read_profiles(folder, name, device)(members()[0], width) for width in widths()}
    begin, cpu_begin = time.perf_counter(), time.process_time()
    planner = Planner(
        members(),
        profile_of=lambda _, width: profiles[width],
        policy=policy,
        fixed_bytes=FIXED_BYTES,
        host_bytes=tm.DEVICES[device].host_bytes,
        max_partitions=MAX_PARTITIONS,
    )
    try:
        found = row(planner.plan(budget))
    except tm.errors.BudgetError as error:
        found = {"error": str(error), "smallest_bytes": error.smallest_bytes}
    found["planning_seconds"] = time.perf_counter() - begin
    found["planning_cpu_seconds"] = time.process_time() - cpu_begin
    return found


def row(plan: Plan) -> dict[str, Any]:
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
    }


def widths() -> list[int]:
    """All that the partitions tried have, the widest first: that takes longest."""
    tried = find_partitions([NUM_MEMBERS], max_partitions=MAX_PARTITIONS).partitions
    return sorted({width for partition in tried for width in partition.widths[0]}, reverse=True)


# ---- many processes --------------------------------------------------------------------------------------

Key = tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """What one process does: a function of this module and its arguments."""

    key: Key
    function: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Running:
    work: Work
    process: multiprocessing.process.BaseProcess
    answers: Connection
    begun: float


def do_all(
    todo: Sequence[Work],
    num_processes: int,
    limit_seconds: float,
    done: Callable[[Key, dict[str, Any]], None],
) -> None:
    """Each piece of work in a process of its own, ``num_processes`` at a time, in the order given.

    ``done`` gets what each returned; ``stopped_after_seconds`` for one that took longer than the limit,
    ``failed`` for one that ended otherwise.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(todo))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                work = waiting.pop()
                answers, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_answer, args=(theirs, work.function, work.arguments))
                process.start()
                theirs.close()
                running.append(_Running(work, process, answers, time.perf_counter()))
            wait([each.answers for each in running], timeout=1.0)
            still: list[_Running] = []
            for each in running:
                answer = _answer_of(each, limit_seconds)
                if answer is None:
                    still.append(each)
                    continue
                each.process.kill()
                each.process.join()
                done(each.work.key, answer)
            running = still
    finally:
        for each in running:
            each.process.kill()


def _answer_of(running: _Running, limit_seconds: float) -> dict[str, Any] | None:
    """What became of a process; ``None`` while it runs."""
    if running.answers.poll():
        try:
            answer: dict[str, Any] = running.answers.recv()
        except EOFError:
            running.process.join()
            return {"failed": f"ended with exit code {running.process.exitcode}"}
        return answer
    if time.perf_counter() - running.begun > limit_seconds:
        return {"stopped_after_seconds": limit_seconds}
    return None


def _answer(answers: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answers.send(function(*arguments))
    except Exception as error:  # whatever it is, the other cases go on
        traceback.print_exc()
        answers.send({"failed": f"{type(error).__name__}: {error}"})


# ---- the whole table -------------------------------------------------------------------------------------


class Table:
    """The results so far; written after each."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.names: list[str] = given.workloads.split(",")
        self.policies: list[str] = given.policies.split(",")
        self.begun = time.perf_counter()
        self.results: dict[str, Any] = {
            "command": f"python benchmarks/planning.py --device {given.device} --workloads {given.workloads} "
            f"--processes {given.processes} --limit-seconds {given.limit_seconds:g}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "num_members": NUM_MEMBERS,
            "max_partitions": MAX_PARTITIONS,
            "device": tm.DEVICES[given.device].__dict__,
            "workloads": {name: {} for name in self.names},
        }

    def fill(self, folder: Path) -> None:
        """Profiles, then budgets, then all cases; a workload that cannot be profiled is left out."""
        given = self.given
        profiles = [
            Work((name, str(width)), make_profile, (folder, name, given.device, width))
            for width in widths()
            for name in reversed(self.names)  # convolutions take longest
        ]
        do_all(profiles, given.processes, PROFILE_LIMIT_SECONDS, self.profiled)
        fusions = [Work((name,), complete_fusion, (folder, name, given.device)) for name in self._usable()]
        do_all(fusions, given.processes, PROFILE_LIMIT_SECONDS, self.fused)
        cases = [
            Work((name, share, policy), planned, (folder, name, given.device, budget, policy))
            for policy in reversed(self.policies)
            for name in reversed(self._usable())
            for share, budget in reversed(self.budgets(name).items())
        ]
        do_all(cases, given.processes, given.limit_seconds, self.case)
        self.results["seconds"] = time.perf_counter() - self.begun
        self._write()

    def budgets(self, name: str) -> dict[str, int]:
        found = self.results["workloads"][name]
        static, peak = found["static_bytes"], found["complete_fusion_bytes"]
        most = tm.DEVICES[self.given.device].memory_bytes
        return {share: min(int(static + factor * (peak - static)), most) for share, factor in SHARES.items()}

    def profiled(self, key: Key, answer: Mapping[str, Any]) -> None:
        name, width = key
        found = self.results["workloads"][name]
        if "seconds" not in answer:
            found["error"] = f"no profile of width {width}: {dict(answer)}"
        found.setdefault("profiling_seconds", {})[width] = answer.get("seconds")
        self._say(f"{name} ×{width}: profile {dict(answer)}")

    def fused(self, key: Key, answer: Mapping[str, Any]) -> None:
        (name,) = key
        found = self.results["workloads"][name]
        found.update(answer)
        if "static_bytes" not in answer:
            found["error"] = f"complete fusion: {dict(answer)}"
            return
        found["budgets"] = [
            {"share": share, "budget_bytes": budget, "policies": {policy: {} for policy in self.policies}}
            for share, budget in self.budgets(name).items()
        ]
        self._write()

    def case(self, key: Key, answer: dict[str, Any]) -> None:
        name, share, policy = key
        for budget in self.results["workloads"][name]["budgets"]:
            if budget["share"] == share:
                budget["policies"][policy] = answer
        took = answer.get("planning_seconds")
        self._say(f"{name}, {share}, {policy}: {_cell(answer)}" + (f" in {took:.1f} s" if took else ""))
        self._write()

    def _usable(self) -> list[str]:
        return [name for name in self.names if "error" not in self.results["workloads"][name]]

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.begun:6.0f} s  {text}", flush=True)

    def _write(self) -> None:
        self.given.out.parent.mkdir(parents=True, exist_ok=True)
        self.given.out.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


# ---- the page --------------------------------------------------------------------------------------------

_HEAD = """\
{num_members} members, device {device}, times from data sheets, nothing was run. A budget is static memory
plus a share of what complete fusion needs beyond that. A cell has the predicted step in ms, then recompute
time as a share of compute time / the share of copy time that runs beside compute, both in %, and the
sub-arrays' widths. `-`: nothing fits. `> n s`: planning was stopped after so long.
"""

_WHY = """\
The paper's order is mutwo ≤ capuchin ≤ none. Where its second half does not hold, that is not for how `none`
is made. It is the paper's HFTA-NoMemOpt: members in subsets that fit with nothing copied and nothing
recomputed, one subset after another; of the partitions tried, the quickest. In one respect it is held to more
than the paper's: all members train in every step, so parameters and optimizer state of the subsets that wait
stay on the device, where the paper trains one subset to its end before it begins the next. That can only make
it slower.

What differs is the price of a narrow array. The paper replays µ-TWO's own steps as CUDA graphs (B.1.5); of
HFTA it says only that it runs through vmap (B.2.1). Launched by the host, operator by operator, a narrow
array keeps the host as busy as a wide one, and the device less. Times here are those of kernels that are
replayed as one CUDA graph, for every policy, with no time of the host's in them: a narrow array loses only
what its products leave idle in their last wave of tiles, and two microseconds for each kernel.{growth}

Capuchin keeps to complete fusion and pays for it with copies that nothing hides (one array has no other's
forward pass beside its backward pass) or with recomputation; where that is more, turns are quicker. Where not
even all feature maps given up are enough, complete fusion does not fit at all.
"""


def page(results: dict[str, Any]) -> Iterator[str]:
    """A results file as Markdown."""
    yield "# Policies under memory pressure, predicted"
    yield ""
    yield f"Written by `benchmarks/planning.py --table` from results of {results['date'][:10]}"
    yield f"(torch {results['torch']}): `{results['command']}`."
    yield ""
    yield _HEAD.format(num_members=results["num_members"], device=results["device"]["name"])
    if results.get("note"):
        yield results["note"]
        yield ""
    yield f"| workload, share, budget | {' | '.join(POLICIES)} |"
    yield f"|---|{'---|' * len(POLICIES)}"
    for name, budget in _budgets(results):
        head = f"{name}, {budget['share']}, {budget['budget_bytes'] / 2**30:.2f} GiB"
        cells = [_cell(budget["policies"].get(policy, {})) for policy in POLICIES]
        yield f"| {head} | {' | '.join(cells)} |"
    for name, found in results["workloads"].items():
        if "error" in found:
            yield ""
            yield f"{name} is missing: {found['error']}"
    yield ""
    yield "## What holds of the paper's order"
    yield ""
    yield "Budgets below what complete fusion needs, where both policies have a plan:"
    yield ""
    yield "| | holds | of |"
    yield "|---|---|---|"
    for title, names, holds in _CLAIMS:
        both = [
            [budget["policies"].get(policy, {}) for policy in names]
            for _, budget in _budgets(results)
            if budget["share"] != "1"
        ]
        both = [[each for each in rows if "step_ms" in each or each is rows[0]] for rows in both]
        both = [rows for rows in both if len(rows) > 1 and all("step_ms" in each for each in rows)]
        yield f"| {title} | {sum(holds(*pair) for pair in both)} | {len(both)} |"
    yield ""
    yield _WHY.format(growth=growth_in_words(results))
    if "seconds" not in results:
        return  # of a run that was not timed like this, or did not end
    yield "## How long planning took"
    yield ""
    yield "Processor seconds, one process for each policy and budget, profiles given."
    yield ""
    yield f"| workload, share | {' | '.join(POLICIES)} |"
    yield f"|---|{'---|' * len(POLICIES)}"
    for name, budget in _budgets(results):
        rows = [budget["policies"].get(policy, {}) for policy in POLICIES]
        yield f"| {name}, {budget['share']} | {' | '.join(_took(each) for each in rows)} |"


def _shorter(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["step_ms"] <= other["step_ms"] * (1 + 1e-9))


_CLAIMS: tuple[tuple[str, tuple[str, str], Callable[..., bool]], ...] = (
    ("mutwo's step is not longer than capuchin's", ("mutwo", "capuchin"), _shorter),
    ("capuchin's step is not longer than none's", ("capuchin", "none"), _shorter),
    ("mutwo's step is not longer than none's", ("mutwo", "none"), _shorter),
    (
        "auto's step is not longer than any other's",
        POLICIES[-1:] + POLICIES[:-1],
        lambda auto, *others: all(_shorter(auto, other) for other in others),
    ),
    (
        "mutwo's `recompute_share` is not higher than capuchin's",
        ("mutwo", "capuchin"),
        lambda one, other: one["recompute_share"] <= other["recompute_share"],
    ),
    (
        "mutwo's `swap_overlap` is not lower than capuchin's",
        ("mutwo", "capuchin"),
        lambda one, other: one["swap_overlap"] >= other["swap_overlap"],
    ),
)


def _budgets(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, found in results["workloads"].items():
        for budget in found.get("budgets", ()):
            yield name, budget


def _took(found: dict[str, Any]) -> str:
    if "stopped_after_seconds" in found:
        return f"> {found['stopped_after_seconds']:g}"
    return f"{found['planning_cpu_seconds']:.1f}" if "planning_cpu_seconds" in found else "-"


def _cell(found: dict[str, Any]) -> str:
    if "stopped_after_seconds" in found:
        return f"> {found['stopped_after_seconds']:g} s"
    if "failed" in found:
        return "failed"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="a100-40gb", choices=sorted(tm.DEVICES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--processes", type=int, default=1, help="at a time")
    parser.add_argument(
        "--limit-seconds", type=float, default=240.0, help="for each workload, budget, policy"
    )
    parser.add_argument("--profiles", type=Path, help="folder in which profiles are kept")
    parser.add_argument("--out", type=Path, default=Path("runs/planning.json"))
    parser.add_argument("--table", type=Path, help="write the page of these results and do nothing else")
    given = parser.parse_args()
    if given.table is not None:
        lines = [*page(json.loads(given.table.read_text(encoding="utf-8"))), *beside(given.table.parent)]
        print("\n".join(lines))
        return
    table = Table(given)
    if given.profiles is not None:
        table.fill(given.profiles)
        return
    with tempfile.TemporaryDirectory() as folder:
        table.fill(Path(folder))


if __name__ == "__main__":
    main()
