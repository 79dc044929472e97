"""``trainmux bench zico``: everything that was asked for, within a limit of time, into one file."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .environment import describe
from .job import BenchError
from .record import write_text
from .zico import (
    EAGER_TEMPORAL,
    EAGER_THREADS,
    TEMPORAL,
    UNLIMITED,
    PairBench,
    budgets_of,
)
from .zico_alone import region_rates, tracking_costs
from .zico_cases import base_name, zico_case
from .zico_jobs import (
    BenchJob,
    Failure,
    PairNames,
    PairResult,
    WayResult,
    ZicoOptions,
    is_lost,
    release_cached,
)
from .zico_memory import host_view, memory_record, simulated_pair
from .zico_plan import FORMAT, ZicoPlan, command_line, read_results, table
from .zico_processes import KINDS, measure_in_processes, process_way


class DeviceLostError(BenchError):
    """The device answers no more in this process; what was measured is in the file."""

    EXIT_STATUS = 3


def run_zico(
    plan: ZicoPlan,
    options: ZicoOptions,
    *,
    out: Path,
    resumes: bool = False,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """Measure; what is there is written after every way. The table of pairs is told last.

    With ``resumes``, what ``out`` has already is kept and not measured again. Raises `DeviceLostError` where
    only a new process could go on.
    """
    document = read_results(out) if resumes and out.exists() else _new_document(plan, options)
    document["command"] = command_line(plan, options)
    run = _Run(plan, options, document, out, tell)
    try:
        run.all()
    finally:
        run.save()
        for line in table([PairResult.from_json(pair) for pair in document["pairs"]]):
            tell(line)
    return document


class _Run:
    """One run, and the document that it fills."""

    def __init__(
        self,
        plan: ZicoPlan,
        options: ZicoOptions,
        document: dict[str, Any],
        out: Path,
        tell: Callable[[str], object],
    ) -> None:
        self._plan, self._options, self._document = plan, options, document
        self._out, self._tell = out, tell
        self._began = time.monotonic()
        self._seconds_before = document["seconds"]
        self._made: dict[tuple[str, int], BenchJob] = {}
        if (ended := document["running"]) is not None:
            error = "the process that measured it ended"
            document["failed"].append(asdict(Failure(tuple(ended["names"]), ended["way"], error)))
            document["running"] = None
        document["left_out"] = []
        document["cases"] |= {name: zico_case(name).note for name in plan.names}

    def all(self) -> None:
        """Pair by pair, so that what has been measured is whole whenever time is over."""
        for name in self._plan.names if "build" in self._plan.parts else ():
            self._build(name)
        for names in self._plan.pairs:
            if "pairs" in self._plan.parts:
                self._measure_pair(names)
            if "memory" in self._plan.parts:
                self._look_at_memory(names)
        for name in self._plan.names:
            if "host_view" in self._plan.parts and base_name(name) == "resnet50":
                self._host_view(name)
            if "tracking" in self._plan.parts:
                self._table("tracking", name)
            if "regions" in self._plan.parts:
                self._table("regions", name)

    def _build(self, name: str) -> None:
        """Compile a case's kernels, which are kept on disk for whoever builds it next."""
        if self._has_time(f"{name}, build"):
            with self._attempt((name,), "build"):
                self._job(name, 0)

    # ---- pairs -------------------------------------------------------------------------------------

    def _measure_pair(self, names: PairNames) -> None:
        bench: PairBench | None = None
        if self._missing(names) and self._has_time("+".join(names)):
            with self._attempt(names, "build"):
                bench = PairBench(self._jobs(names), self._options)
                for job in bench.jobs:
                    self._tell(f"{job.case.name}: {job.solo_seconds * 1e3:.2f} ms an iteration alone")
        if bench is not None and "build" not in self._known(names):
            # By fleets first: what a fleet has captured is gone once it was co-located.
            for measure in (self._by_fleets, self._colocated, self._eagerly, self._in_processes):
                measure(bench, self._known(names))

    def _by_fleets(self, bench: PairBench, known: set[str]) -> None:
        ways = {TEMPORAL: bench.temporal}
        if self._options.where.type == "cuda":
            ways[UNLIMITED] = bench.unlimited
        self._one_by_one(bench, ways, known)

    def _colocated(self, bench: PairBench, known: set[str]) -> None:
        is_known = "co-located" in known or set(self._budget_ways(bench.names)) <= known
        if is_known or not self._has_time(f"{'+'.join(bench.names)}, co-located"):
            return
        with self._attempt(bench.names, "co-located"):
            rows, failures = bench.colocated(
                self._plan.excesses, sorted(known), changes=self._plan.changes(bench.names)
            )
            for row in rows:
                self._note(bench, row)
            for failure in failures:
                self._fail(failure)

    def _eagerly(self, bench: PairBench, known: set[str]) -> None:
        ways = {EAGER_TEMPORAL: bench.eager_temporal}
        if self._options.where.type == "cuda":
            ways[EAGER_THREADS] = bench.eager_threads
        if self._options.has_eager:
            self._one_by_one(bench, ways, known)

    def _in_processes(self, bench: PairBench, known: set[str]) -> None:
        for has_mps in (False, True) if self._options.has_processes else ():
            kinds = [kind for kind in KINDS if process_way(kind, has_mps=has_mps) not in known]
            what = _processes(has_mps)
            if not kinds or what in known or not self._has_time(f"{'+'.join(bench.names)}, {what}"):
                continue
            with self._attempt(bench.names, what):
                rates, failures = measure_in_processes(
                    bench.names, self._options, has_mps=has_mps, kinds=kinds
                )
                for way, rate in rates.items():
                    self._note(bench, bench.rated(way, rate))
                for failure in failures:
                    self._fail(failure)

    def _one_by_one(
        self, bench: PairBench, ways: dict[str, Callable[[], WayResult]], known: set[str]
    ) -> None:
        for way, measure in ways.items():
            if way not in known and self._has_time(f"{'+'.join(bench.names)}, {way}"):
                with self._attempt(bench.names, way):
                    self._note(bench, measure())

    def _budget_ways(self, names: PairNames) -> list[str]:
        stays = budgets_of(
            names,
            (1, 1),
            self._plan.excesses,
            has_machine=self._options.has_machine,
            changes=self._plan.changes(names),
        )
        return [stay.way for stay in stays]

    def _missing(self, names: PairNames) -> list[str]:
        """The ways of a pair that the document has neither a result nor a failure of."""
        known = self._known(names)
        wanted = [TEMPORAL]
        if "co-located" not in known:
            wanted += self._budget_ways(names)
        if self._options.has_eager:
            wanted.append(EAGER_TEMPORAL)
        if self._options.where.type == "cuda":
            wanted += [UNLIMITED, *([EAGER_THREADS] if self._options.has_eager else [])]
        for has_mps in (False, True) if self._options.has_processes else ():
            if _processes(has_mps) not in known:
                wanted += [process_way(kind, has_mps=has_mps) for kind in KINDS]
        return [] if "build" in known else [way for way in wanted if way not in known]

    def _known(self, names: tuple[str, ...]) -> set[str]:
        """The ways that some jobs have results or failures of."""
        found = self._pair(names)
        known = set() if found is None else {row.way for row in found.ways}
        return known | {row["way"] for row in self._document["failed"] if tuple(row["names"]) == names}

    def _pair(self, names: tuple[str, ...]) -> PairResult | None:
        rows = (pair for pair in self._document["pairs"] if tuple(pair["names"]) == names)
        return next(map(PairResult.from_json, rows), None)

    def _note(self, bench: PairBench, row: WayResult) -> None:
        before = self._pair(bench.names)
        if before is not None and not any(map(sum, bench.sizes)):
            bench.sizes = (before.local_bytes, before.peak_bytes)  # of an earlier run
        result = bench.result([*(before.ways if before is not None else ()), row])
        pairs = self._document["pairs"]
        places = [place for place, pair in enumerate(pairs) if tuple(pair["names"]) == bench.names]
        if places:
            pairs[places[0]] = result.to_json()
        else:
            pairs.append(result.to_json())
        self._tell(f"{'+'.join(bench.names)}, {row.way}: {row.work:.3f}{_change_text(row)}")
        self.save()

    # ---- memory, tables ----------------------------------------------------------------------------

    def _look_at_memory(self, names: PairNames) -> None:
        is_known = any(tuple(row["names"]) == names for row in self._document["simulated"])
        is_known = is_known or "memory" in self._known(names)
        if not is_known and self._has_time(f"{'+'.join(names)}, memory"):
            with self._attempt(names, "memory"):
                decision_us = self._simulate(names)
                self._tell(f"{'+'.join(names)}, simulated: an iteration is decided in {decision_us:.1f} µs")

    def _simulate(self, names: PairNames) -> float:
        """Look at both jobs and simulate them; the median time to decide on an iteration, in microseconds."""
        found = self._pair(names)
        memories = []
        for place, name in enumerate(names):
            memory = self._job(name, 0).memory
            if found is not None:
                memory = memory.lasting(found.solo_ms[place] / 1e3)
            memories.append(memory)
            self._document["memory"][name] = memory_record(memory, zico_case(name).note) | {
                "is_scaled": found is not None
            }
        gain = None
        if found is not None and (work := found.work(UNLIMITED)) is not None:
            gain = work / (found.work(TEMPORAL) or 1.0)
        row = simulated_pair(
            names,
            (memories[0], memories[1]),
            self._plan.excesses,
            gain,
            has_machine=self._options.has_machine,
        )
        self._document["simulated"].append(row)
        decision_us: float = row["decision_us"]["an iteration begins"][0]
        return decision_us

    def _host_view(self, name: str) -> None:
        is_known = name in self._document["host_view"] or "host_view" in self._known((name,))
        if not is_known and self._has_time(f"{name}, host view"):
            with self._attempt((name,), "host_view"):
                self._document["host_view"][name] = host_view(self._job(name, 0), self._options)

    def _table(self, part: str, name: str) -> None:
        is_known = name in self._document[part] or part in self._known((name,))
        if is_known or not self._has_time(f"{name}, {part}"):
            return
        with self._attempt((name,), part):
            if part == "tracking":
                results = tracking_costs(self._job(name, 0), self._options)
            else:
                results = region_rates((self._job(name, 0), self._job(name, 1)), self._options)
            for result in results:
                if isinstance(result, Failure):
                    self._fail(result)
                else:
                    self._document[part].setdefault(name, {})[result[0]] = result[1]
                    self._tell(f"{name}, {part}, {result[0]}: {result[1]:.3f}")

    # ---- inside ------------------------------------------------------------------------------------

    def _jobs(self, names: PairNames) -> tuple[BenchJob, BenchJob]:
        return self._job(names[0], 0), self._job(names[1], int(names[0] == names[1]))

    def _job(self, name: str, seed: int) -> BenchJob:
        """Made once, its kernels compiled once: code is cached on disk, for other processes too."""
        if (name, seed) not in self._made:
            began = time.perf_counter()
            job = BenchJob(name, seed, self._options)
            _ = job.fleet
            self._made[name, seed] = job
            self._tell(f"{name}: built in {time.perf_counter() - began:.0f} s")
        return self._made[name, seed]

    @contextmanager
    def _attempt(self, names: tuple[str, ...], way: str) -> Iterator[None]:
        """What fails inside is taken down. The file says what runs, should the process end with it."""
        self._document["running"] = {"names": list(names), "way": way}
        self.save()
        try:
            gc.collect()
            release_cached(self._options.where)
            yield
        except DeviceLostError:
            raise
        except Exception as error:
            self._fail(Failure.of(names, way, error))
        finally:
            self._document["running"] = None
        self.save()

    def _fail(self, failure: Failure) -> None:
        self._document["failed"].append(asdict(failure))
        self._tell(f"{'+'.join(failure.names)}, {failure.way}: failed: {failure.error}")
        self.save()
        if is_lost(self._options.where):
            raise DeviceLostError(
                "the device answers no more; what was measured is kept, run again with --resume for the rest"
            )

    def _has_time(self, what: str) -> bool:
        limit = self._plan.time_limit_s
        if limit is None or time.monotonic() - self._began < limit:
            return True
        self._document["left_out"].append(what)
        return False

    def save(self) -> None:
        """Write what there is."""
        self._document["seconds"] = self._seconds_before + time.monotonic() - self._began
        text = json.dumps(self._document, indent=1)
        write_text(self._out, _INNERMOST.sub(_on_one_line, text) + "\n")


def _change_text(row: WayResult) -> str:
    """Of a budget that was changed to: when it was in force, and the longest gap between two iterations."""
    change = row.detail.get("change")
    if not change:
        return ""
    longest = 1e3 * max(change["longest_gap_seconds"])
    return f", in force after {1e3 * change['in_force_after_seconds']:.1f} ms, longest gap {longest:.1f} ms"


def _processes(has_mps: bool) -> str:
    """What is measured at once, in the same two processes."""
    return "MPS" if has_mps else "two processes"


_INNERMOST = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")


def _on_one_line(found: re.Match[str]) -> str:
    """Lists of plain values take a line each, not one for every value."""
    return "[" + re.sub(r"\n\s*", " ", found[1]) + "]"


def _new_document(plan: ZicoPlan, options: ZicoOptions) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "command": "",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe(options.device),
        "settings": {
            "precision": options.precision,
            "lowering": options.lowering,
            "seconds": options.seconds,
        },
        "seconds": 0.0,
        "cases": {},
        "pairs": [],
        "failed": [],
        "left_out": [],
        "running": None,
        "memory": {},
        "simulated": [],
        "tracking": {},
        "regions": {},
        "host_view": {},
    }
