"""A whole run: every way on every workload, each in its own process, recorded as soon as it is done."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
from .ways._base import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY
from .ways.table import FUSED, VARIANT_SEPARATOR, find_way

LOG_TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Options:
    """What to measure. ``variants`` are further ways ``trainmux:NAME``, with their arguments for ``Fleet``
    on top of those of ``fleet``. ``batch_size`` ``None`` is each workload's usual one.
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

    @property
    def labels(self) -> dict[str, dict[str, Any]]:
        """Every way and variant to measure, with its arguments for ``Fleet``."""
        base = dict(self.fleet or {})
        found: dict[str, dict[str, Any]] = {way: base if way == FUSED else {} for way in self.ways}
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
    records: list[Record] = []
    for workload in options.workloads:
        batch_size = options.batch_size or find_case(workload).batch_sizes[0]
        at_any_width: dict[str, Record] = {}
        for width in options.widths:
            for label, fleet in options.labels.items():
                if label in at_any_width:
                    record = _at_width(at_any_width[label], width)
                else:
                    job = Job(
                        workload=workload,
                        batch_size=batch_size,
                        width=width,
                        way=label,
                        device=options.device,
                        num_blocks=options.num_blocks,
                        block_seconds=options.block_seconds,
                        folder="",
                        fleet=fleet,
                    )
                    record = measure(job, options, environment)
                if find_way(label).is_same_at_any_width:
                    at_any_width.setdefault(label, record)
                records.append(record)
                write_records(options.out, records)
                tell(record)
    return records


def measure(job: Job, options: Options, environment: Mapping[str, Any]) -> Record:
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
            "fleet": dict(job.fleet),
        },
        environment=environment,
    )
    way = find_way(job.way)
    if way.needs_cuda and not job.device.startswith("cuda"):
        return replace(record, error="needs a CUDA device")
    # Short names: the MPS daemon's socket lies in here, and a socket's path may not be long.
    with TemporaryDirectory(prefix="tmb-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            result = _in_a_process(replace(job, folder=name), folder, options.time_limit_s)
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


def _in_a_process(job: Job, folder: Path, time_limit_s: float) -> dict[str, Any]:
    job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "log.txt"))
    write_json(job_file, asdict(job))
    # Compiled code from an earlier run would make the time to the first step look shorter than it is.
    variables = {**child_environment(), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    command = [sys.executable, "-m", "trainmux.cli.bench.child", str(job_file), str(result_file)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
        )
        try:
            status = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            status = None
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
