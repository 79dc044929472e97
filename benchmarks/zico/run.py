"""Measure everything that was asked for, within a time limit, into one results file."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.environment import describe

from . import results
from .cases import PairNames, find_zico_case
from .jobs import BenchJob, ZicoOptions, release_cached
from .memory import iteration_record
from .pair import PairBench

PARTS = ("pairs", "memory")


@dataclass(frozen=True)
class ZicoPlan:
    """What to measure: pairs, most important first, budgets by what peaks exceed them, and which parts."""

    pairs: Sequence[PairNames]
    excesses: Sequence[float] = (1.3, 1.8)
    parts: Sequence[str] = ("pairs", "memory")
    has_eager: bool = True
    has_processes: bool = False
    time_limit_s: float | None = None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair))


def measure(
    plan: ZicoPlan,
    options: ZicoOptions,
    out: Path,
    *,
    command: str,
    resumes: bool = False,
    tell: Callable[[str], object] = print,
) -> results.Document:
    """Measure and write what there is after every way; with ``resumes``, only what ``out`` lacks.

    A way that fails is recorded with its error, and the rest goes on.
    """
    document = results.read(out) if resumes and out.exists() else results.empty()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    environment = describe(options.device)
    made = {"command": command, "date": date, "environment": environment, "settings": asdict(options)}
    document["runs"].append(made)
    run = _Run(plan, options, document, out, tell)
    for names in plan.pairs if "pairs" in plan.parts else ():
        run.pair(names)
    for name in plan.names if "memory" in plan.parts else ():
        run.memory(name)
    return document


@dataclass
class _Run:
    """One run and the document that it fills."""

    plan: ZicoPlan
    options: ZicoOptions
    document: results.Document
    out: Path
    tell: Callable[[str], object]

    def __post_init__(self) -> None:
        self._begin = time.monotonic()
        self._run = len(self.document["runs"]) - 1
        self._jobs: dict[tuple[str, int], BenchJob] = {}

    def pair(self, names: PairNames) -> None:
        """Measure one pair in every way, so that what is measured is whole whenever time is over."""
        label = "+".join(names)
        known = [pair["names"] for pair in self.document["pairs"] if pair["is_complete"]]
        if list(names) in known or not self._has_time(label):
            return
        failed: dict[str, str] = {}
        record: dict[str, Any] = {"names": list(names), "run": self._run, "is_complete": False}
        record |= {"solo_ms": [], "local_bytes": [0, 0], "peak_bytes": [0, 0], "failed": failed, "ways": []}
        with self._attempt(label, "build", failed):
            jobs = (self.build(names[0], 0), self.build(names[1], int(names[0] == names[1])))
            record["solo_ms"] = [1e3 * job.solo_seconds for job in jobs]
            bench = PairBench(jobs, self.options)
            results.put_pair(self.document, record)
        if failed:
            return
        ways = bench.ways(self.plan.excesses, eager=self.plan.has_eager, processes=self.plan.has_processes)
        is_cut_off = False
        for way, train in ways.items():
            if not self._has_time(f"{label}, {way}"):
                is_cut_off = True
                continue
            with self._attempt(label, way, failed):
                for row in train():
                    record["ways"].append(row)
                    rates = " and ".join(f"{rate:.1f}" for rate in row["iterations_per_second"])
                    self.tell(f"{label}, {row['way']}: {rates} iterations per second")
            record |= {"local_bytes": bench.local_bytes, "peak_bytes": bench.peak_bytes}
            self._save()
        record["is_complete"] = not is_cut_off and not failed
        self._save()

    def memory(self, name: str) -> None:
        """Look at one job's memory, scaled to its time alone where that is known."""
        if name in self.document["memory"] or not self._has_time(f"{name}, memory"):
            return
        solo = {
            job: milliseconds / 1e3
            for pair in self.document["pairs"]
            for job, milliseconds in zip(pair["names"], pair["solo_ms"], strict=True)
        }
        with self._attempt(name, "memory", {}):
            record = iteration_record(self.build(name, 0), solo.get(name))
            self.document["memory"][name] = {"run": self._run, **record}
        self._save()

    def build(self, name: str, seed: int) -> BenchJob:
        """Build a job once; compiled code is cached on disk, for other processes too."""
        if (name, seed) not in self._jobs:
            begin = time.perf_counter()
            job = BenchJob(name, seed, self.options)
            _ = job.fleet
            self._jobs[name, seed] = job
            self.document["cases"][name] = find_zico_case(name).note
            self.tell(f"{name}: built in {time.perf_counter() - begin:.0f} s")
        return self._jobs[name, seed]

    @contextmanager
    def _attempt(self, names: str, way: str, failed: dict[str, str]) -> Iterator[None]:
        """Record what fails inside."""
        try:
            gc.collect()
            release_cached(self.options.where)
            yield
        except Exception as error:
            failed[way] = f"{type(error).__name__}: {error}"[:500]
            self.tell(f"{names}, {way}: failed: {failed[way]}")
            self._save()

    def _save(self) -> None:
        results.write(self.document, self.out)

    def _has_time(self, what: str) -> bool:
        limit = self.plan.time_limit_s
        if limit is None or time.monotonic() - self._begin < limit:
            return True
        self.tell(f"{what}: left out, the time is over")
        return False
