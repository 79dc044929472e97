"""A whole run: every way on every workload, each in its own process, recorded as soon as it is done."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .batches import NUM_BATCHES
from .cases import find_case
from .environment import child_environment, probe
from .job import Job
from .record import Record, measurement_from_json, write_json, write_records
from .turns import Turns
from .ways._base import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY
from .ways.table import FUSED, VARIANT_SEPARATOR, find_way, split_width

LOG_TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Options:
    """What to measure. A way ``NAME@WIDTH`` has that width instead of ``widths``. ``variants`` are further
    ways ``trainmux:NAME``, with their arguments for ``Fleet`` on top of those of ``fleet``. ``batch_size``
    ``None`` is each workload's usual one.
    """

    workloads: Sequence[str]
    ways: Sequence[str]
    widths: Sequence[int]
    device: str
    out: Path
    batch_size: int | None = None
    plot: Path | None = None
    time_limit_s: float = 240.0
    block_seconds: float = 0.3
    num_blocks: int = 5
    fleet: Mapping[str, Any] | None = None
    variants: Mapping[str, Mapping[str, Any]] | None = None
    builds_at_once: int = 1

    @property
    def labels(self) -> dict[str, dict[str, Any]]:
        """Every way and variant to measure, with its arguments for ``Fleet``."""
        base = dict(self.fleet or {})
        found: dict[str, dict[str, Any]] = {
            way: base if split_width(way)[0] == FUSED else {} for way in self.ways
        }
        for name, arguments in (self.variants or {}).items():
            found[f"{FUSED}{VARIANT_SEPARATOR}{name}"] = {**base, **arguments}
        return found

    def command(self) -> str:
        """The command line that measures this, with nothing left to defaults."""
        words = ["trainmux", "bench", "step"]
        words += ["--workloads", ",".join(self.workloads), "--ways", ",".join(self.ways)]
        words += ["--widths", ",".join(map(str, self.widths)), "--device", self.device]
        if self.batch_size is not None:
            words += ["--batch-size", str(self.batch_size)]
        words += ["--steps-seconds", f"{self.block_seconds:g}", "--blocks", str(self.num_blocks)]
        words += ["--time-limit", f"{self.time_limit_s:g}"]
        if self.builds_at_once > 1:
            words += ["--builds-at-once", str(self.builds_at_once)]
        if self.fleet:
            words += ["--fleet", json.dumps(self.fleet)]
        for name, arguments in (self.variants or {}).items():
            words += ["--variant", f"{name}={json.dumps(arguments)}"]
        words += ["--out", str(self.out)]
        if self.plot is not None:
            words += ["--plot", str(self.plot)]
        return shlex.join(words)


def run(options: Options, tell: Callable[[Record], None] = lambda record: None) -> list[Record]:
    """Measure everything; after each record ``options.out`` holds all so far, and ``tell`` is called."""
    environment = probe(options.device)
    jobs = _jobs(options)
    done: dict[int, Record] = {}  # by the job's place

    def note(place: int, record: Record) -> None:
        done[place] = record
        write_records(options.out, [done[known] for known in sorted(done)])
        tell(record)

    for chunk in _chunks(range(len(jobs)), jobs, options.builds_at_once):
        new = [place for place in chunk if _first_like(place, jobs) == place]
        turns = Turns(len(new)) if len(new) > 1 else None
        with ThreadPoolExecutor(max(1, len(new))) as pool:
            waiting = {
                pool.submit(
                    measure,
                    replace(jobs[place], takes_turns=turns is not None),
                    options,
                    environment,
                    turns,
                ): place
                for place in new
            }
            for future in as_completed(waiting):
                note(waiting[future], future.result())
        for place in chunk:
            if place not in done:
                note(place, _at_width(done[_first_like(place, jobs)], jobs[place].width))
    return [done[place] for place in sorted(done)]


def _jobs(options: Options) -> list[Job]:
    jobs = [
        Job(
            workload=workload,
            batch_size=options.batch_size or find_case(workload).batch_sizes[0],
            width=width if own_width is None else own_width,
            way=way,
            device=options.device,
            num_blocks=options.num_blocks,
            block_seconds=options.block_seconds,
            folder="",
            fleet=fleet,
        )
        for workload in options.workloads
        for width in options.widths
        for label, fleet in options.labels.items()
        for way, own_width in [split_width(label)]
    ]
    return [job for place, job in enumerate(jobs) if job not in jobs[:place]]


def _first_like(place: int, jobs: Sequence[Job]) -> int:
    """The place of the job that is measured for this one: another width of a way that is the same at any."""
    job = jobs[place]
    if not find_way(job.way).is_same_at_any_width:
        return place
    return next(i for i, other in enumerate(jobs) if (other.workload, other.way) == (job.workload, job.way))


def _chunks(places: Iterable[int], jobs: Sequence[Job], size: int) -> Iterator[list[int]]:
    """Places of jobs to build at once, those that another is measured for not counted; a way that has
    processes of its own is by itself."""
    chunk: list[int] = []
    num_builds = 0
    for place in places:
        alone = not find_way(jobs[place].way).takes_turns
        builds = _first_like(place, jobs) == place
        if chunk and (alone or num_builds + builds > size):
            yield chunk
            chunk, num_builds = [], 0
        chunk.append(place)
        num_builds += builds
        if alone:
            yield chunk
            chunk, num_builds = [], 0
    if chunk:
        yield chunk


def measure(job: Job, options: Options, environment: Mapping[str, Any], turns: Turns | None = None) -> Record:
    """One record, whatever happens in the measuring process."""
    record = Record(
        workload=job.workload,
        batch_size=job.batch_size,
        width=job.width,
        way=job.way,
        command=options.command(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        settings={
            "precision": "bf16 autocast",
            "optimizer": {
                "name": "AdamW",
                "lr": LEARNING_RATE,
                "lr_of_member": "lr * (1 + member / width)",
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
            },
            "num_batches": NUM_BATCHES,
            "num_blocks": job.num_blocks,
            "block_seconds": job.block_seconds,
            "time_limit_s": options.time_limit_s,
            "cudnn_benchmark": True,
            "compile_cache": "empty",
            "builds_at_once": options.builds_at_once,
            "fleet": dict(job.fleet),
        },
        environment=environment,
    )
    way = find_way(job.way)
    if way.needs_cuda and not job.device.startswith("cuda"):
        if turns is not None:
            turns.pass_over()
        return replace(record, error="needs a CUDA device")
    # Short names: the MPS daemon's socket lies in here, and a socket's path may not be long.
    with TemporaryDirectory(prefix="tmb-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            result = _in_a_process(replace(job, folder=name), folder, options.time_limit_s, turns)
        finally:
            way.clean_up(folder)
    measured = result.get("measurement")
    return replace(
        record,
        measurement=None if measured is None else measurement_from_json(measured),
        error=result.get("error"),
        detail=result.get("detail"),
        warnings=tuple(result.get("warnings", ())),
    )


def _in_a_process(job: Job, folder: Path, time_limit_s: float, turns: Turns | None) -> dict[str, Any]:
    job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "log.txt"))
    write_json(job_file, asdict(job))
    # Compiled code from an earlier run would make the time to the first step look shorter than it is.
    variables = {**child_environment(), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    command = [sys.executable, "-m", "benchmarks.bench.child", str(job_file), str(result_file)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
        )
        status: int | None = None
        try:
            if turns is not None:
                goes_last = find_way(job.way).builds_in_turn
                status = turns.take(process, folder, time_limit_s, goes_last=goes_last)
            else:
                status = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    if result_file.exists():
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return result
    log_tail = log_file.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]
    return {"error": _how_it_ended(status, time_limit_s), "detail": log_tail}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started; they share its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_ended(status: int | None, time_limit_s: float) -> str:
    if status is None:
        return f"no result within the time limit of {time_limit_s:g} s"
    if status < 0:
        return f"the process was ended by signal {signal.Signals(-status).name}"
    return f"the process ended with status {status} and no result"


def _at_width(record: Record, width: int) -> Record:
    note = f"measured once, at width {record.width}: the same at any"
    return replace(record, width=width, notes=(*record.notes, note))
