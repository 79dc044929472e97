"""``python -m benchmarks step``: the time of a training step per member, ways × workloads × widths."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from .cases import PAPER, find_case, split, to_device, workloads_named
from .environment import choose_device, describe
from .processes import Together, guarded_rows, in_turns, isolated, mps_daemon, run_together, streamed
from .records import Results
from .timing import longest_kernels, seconds_of, summary, time_blocks, used_bytes
from .ways import WAYS, Setup, prepare_eager

MPS = "mps"
"""One process per member, all at once on one GPU, under NVIDIA's Multi-Process Service."""
NUM_WARMUPS = 5
MIN_STEPS_PER_BLOCK = 5
SYNCHRONIZE_SECONDS = 0.05
"""A process waits for the device about this often, so that it counts steps that were done, not queued."""
NUM_BATCHES = 4
"""Batches that a measurement rotates among, so that no step finds its data in a cache."""


@dataclass(frozen=True)
class StepJob:
    """One measurement; it is sent to a process of its own."""

    workload: str
    batch_size: int | None
    width: int
    way: str
    device_name: str
    num_blocks: int = 5
    block_seconds: float = 0.3
    fleet: Mapping[str, Any] | None = None
    optimizer: str = "adamw"
    num_kernels: int = 0
    """To list, the longest first."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_name)

    def __call__(self, first: int, count: int = 1) -> tuple[Setup, list[Any]]:
        """Make ``count`` models from number ``first`` on, and batches on the device."""
        case = find_case(self.workload, self.batch_size)
        torch.manual_seed(first)  # for dropout; weights and batches have seeds of their own
        torch.backends.cudnn.benchmark = True  # every shape is fixed, so that the search pays
        batches = [to_device(case.batch(seed), self.device) for seed in range(NUM_BATCHES)]
        models = case.models(count, first)
        setup = Setup(models, case.loss, batches[0], self.device, self.fleet or {}, self.optimizer)
        return setup, batches


def measure(job: StepJob, turn: Any = None) -> Iterator[dict[str, Any]]:
    """Build, train one step, wait for ``turn`` (a semaphore), time, and check that the members trained."""
    if job.way == MPS:
        row = measure_processes(job)
    else:
        way = WAYS[job.way]
        count = way.num_models or job.width
        before = used_bytes(job.device)
        setup, batches = job(0, count)
        begin = perf_counter()
        step, notes = way.prepare(setup)
        row = {"first_losses": step(batches[0]).tolist(), "notes": notes}
        yield {**row, "build_s": perf_counter() - begin}
        if turn is not None:
            turn.acquire()
        seconds = time_blocks(step, batches, job.device, job.num_blocks, job.block_seconds)
        row |= {**summary(seconds, count), "last_losses": step(batches[0]).tolist()}
        if job.num_kernels:
            row["kernels"] = longest_kernels(step, batches, job.device, job.num_kernels, count)
        if job.device.type == "cuda":
            row["reserved_bytes"] = torch.cuda.max_memory_reserved(job.device)
            if turn is None:
                row["device_bytes"] = used_bytes(job.device) - before
    losses = [*row["first_losses"], *row["last_losses"]]
    if not all(map(math.isfinite, losses)) or row["first_losses"][0] == row["last_losses"][0]:
        row = {"error": f"did not train: losses {losses}"}
    yield row


def measure_processes(job: StepJob) -> dict[str, Any]:
    """Train one model in each of ``job.width`` processes, which begin each block together.

    The time per member and step is the time over all steps of all processes.
    """
    shares = run_together(_train_one, [(job, index) for index in range(job.width)])
    rates = [sum(share["rates"][block] for share in shares) for block in range(job.num_blocks)]
    return {
        **summary([job.width / rate for rate in rates], job.width),
        "build_s": max(share["build_s"] for share in shares),
        "reserved_bytes": sum(share["reserved_bytes"] for share in shares),
        "device_bytes": shares[0]["device_bytes"],
        "first_losses": [share["first_loss"] for share in shares],
        "last_losses": [share["last_loss"] for share in shares],
        "notes": ["memory is the sum over the processes"],
    }


def _train_one(together: Together, job: StepJob, index: int) -> dict[str, Any]:
    device = job.device
    before = used_bytes(device) if index == 0 else 0  # before any other process has a context
    together.wait()
    setup, batches = job(index)
    begin = perf_counter()
    step, _ = prepare_eager(setup)
    first_loss = step(batches[0]).item()
    build_s = perf_counter() - begin

    def run(num_steps: int) -> float:
        def work() -> None:
            for number in range(num_steps):
                step(batches[number % len(batches)])

        return seconds_of(work, device)

    run(NUM_WARMUPS)
    together.wait()
    step_seconds = together.numbers[index] = max(run(2) / 2, 1e-9)  # while all others train, too
    together.wait()
    seconds = max(job.block_seconds, MIN_STEPS_PER_BLOCK * max(together.numbers))
    steps_at_once = max(1, round(SYNCHRONIZE_SECONDS / step_seconds))
    rates = []
    for _ in range(job.num_blocks):
        together.wait()
        block_begin, num_steps = perf_counter(), 0
        while (elapsed := perf_counter() - block_begin) < seconds:
            run(steps_at_once)
            num_steps += steps_at_once
        rates.append(num_steps / elapsed)
    held = used_bytes(device) - before
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    together.wait()  # nobody leaves while another still counts memory
    return {
        "rates": rates,
        "build_s": build_s,
        "device_bytes": held,
        "reserved_bytes": reserved,
        "first_loss": first_loss,
        "last_loss": step(batches[0]).item(),
    }


def run(jobs: list[StepJob], results: Results, limit_s: float = 240.0, at_once: int = 1) -> None:
    """Measure each job, on a GPU in a process of its own; one that fails is recorded with the reason.

    ``at_once`` processes build their steps side by side and then wait: the device is timed by one at a time.
    Each starts with an empty cache of compiled kernels.
    """
    for first in range(0, len(jobs), at_once):
        wave = jobs[first : first + at_once]
        with closing(_measured(wave, limit_s)) as measured:
            for job, found in zip(wave, measured, strict=True):
                size = find_case(job.workload, job.batch_size).batch_size
                name = {"workload": job.workload, "batch_size": size, "width": job.width, "way": job.way}
                results.add({**name, "fleet": job.fleet, "built_beside": len(wave) - 1, **found})
                told = f"{found['median_ms']:.4g} ms" if "median_ms" in found else found["error"]
                print(f"{job.workload}, width {job.width}, {job.way}: {told}", flush=True)


def _measured(jobs: Sequence[StepJob], limit_s: float) -> Generator[dict[str, Any], None, None]:
    if len(jobs) == 1 and jobs[0].device.type == "cpu":
        yield _merged(guarded_rows(measure(jobs[0])))
        return
    try:
        with (
            TemporaryDirectory(prefix="step-") as folder,
            mps_daemon() if jobs[0].way == MPS else nullcontext(),
        ):
            caches = [{"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{number}"} for number in range(len(jobs))]
            if len(jobs) == 1:
                yield _merged(streamed(measure, jobs[0], limit_s=limit_s, variables=caches[0]))
                return
            each = [((job,), cache) for job, cache in zip(jobs, caches, strict=True)]
            with closing(in_turns(measure, each, limit_s)) as found:
                yield from map(_merged, found)
    except RuntimeError as error:
        yield {"error": str(error)}


def _merged(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for row in rows for key, value in row.items()}


def command(
    workloads: Annotated[
        str, typer.Option(help="Names, with commas; small:NAME for tiny ones, sample for twelve.")
    ] = ",".join(PAPER),
    ways: Annotated[str, typer.Option(help="Ways to train, with commas.", show_default="all possible")] = "",
    widths: Annotated[str, typer.Option(help="Numbers of members, with commas.")] = "8",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of each member.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    fleet: Annotated[str, typer.Option(help="Further arguments for Fleet, as a JSON object.")] = "{}",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of steps that are timed.")] = 5,
    block_seconds: Annotated[float, typer.Option(help="Seconds of a block.")] = 0.3,
    limit: Annotated[
        float,
        typer.Option(help="Seconds that one measurement may take; with --at-once, to build and to be timed."),
    ] = 240.0,
    at_once: Annotated[
        int, typer.Option(min=1, help="Build so many measurements side by side, then time one after another.")
    ] = 1,
    kernels: Annotated[
        int, typer.Option(min=0, help="List so many of a step's kernels, longest first; not of mps.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="File of results; rows measured before stay.")] = Path(
        "runs/bench/step.json"
    ),
) -> None:
    """Measure the time of a training step per member: ways × workloads × numbers of members."""
    place = choose_device(device)
    known = {**WAYS, MPS: None}
    possible = [name for name, way in known.items() if place == "cuda" or (way and not way.needs_cuda)]
    chosen = split(ways) or possible
    for way in chosen:
        if way not in possible:
            raise typer.BadParameter(
                f"expected ways among {', '.join(possible)}; got {way}", param_hint="--ways"
            )
    if at_once > 1 and MPS in chosen:
        raise typer.BadParameter(f"expected 1 with the way {MPS}; got {at_once}", param_hint="--at-once")
    jobs = [
        StepJob(
            *(workload, batch_size, int(width), way, place, blocks, block_seconds, arguments),
            num_kernels=kernels,
        )
        for workload in workloads_named(workloads)
        for width in split(widths)
        for way in chosen
        for arguments in (json.loads(fleet) if way == "trainmux" else None,)
    ]
    for job in jobs:
        find_case(job.workload)
    environment = describe(place) if place == "cpu" else isolated(describe, place)
    run(jobs, Results(out, "step", environment), limit, at_once)
    print(f"written to {out}")
