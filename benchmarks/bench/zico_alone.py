"""The paper's Tables 1 and 2: what tracking memory costs a job alone, and what small regions cost a pair."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import trainmux as tm

from .job import BenchError
from .zico_jobs import BenchJob, Failure, ZicoOptions, endless_jobs, release_cached, sizes_of
from .zico_watch import Stay, run_watched

TRACKING = {"All": 0, "Fine-grained": 8 << 20, "Coarse-grained": 256 << 20}
"""Table 1: bytes of feature maps between two cuts of an iteration; 0 cuts behind every kernel."""

REGIONS_ON_A_CPU = {"64 MB": 64 << 20, "Small region": 512 << 10, "Tensor": 512}
REGIONS_ON_CUDA = {"64 MB": 64 << 20, "Small region": 2 << 20}
"""Table 2. A CUDA device maps memory in pieces of 2 MiB: smaller regions, and single tensors, it has not."""
_EXCESS = 1.3


def tracking_costs(job: BenchJob, options: ZicoOptions) -> Iterator[tuple[str, float] | Failure]:
    """For each granularity, iterations per second of a job that is tracked over those of one that is not."""
    untracked = 1 / job.solo_seconds  # measured first: what the fleet has captured is gone once it was a job
    for label, tracking_bytes in TRACKING.items():
        try:
            colocation = tm.colocate(endless_jobs([job]), tracking_bytes=tracking_bytes)
            (rate,) = _rates(colocation, None, options)
            yield label, rate / untracked
        except Exception as error:
            yield Failure.of((job.case.name,), f"tracking, {label}", error)


def region_rates(
    jobs: tuple[BenchJob, BenchJob], options: ZicoOptions
) -> Iterator[tuple[str, float] | Failure]:
    """For each size of regions, solo seconds of work per second of two jobs in a budget that is short."""
    solo = [job.solo_seconds for job in jobs]  # measured first, as above
    sizes = REGIONS_ON_CUDA if options.where.type == "cuda" else REGIONS_ON_A_CPU
    for label, region_bytes in sizes.items():
        try:
            colocation = tm.colocate(endless_jobs(jobs), region_bytes=region_bytes)
            rates = _rates(colocation, _EXCESS, options)
            yield label, sum(rate * alone for rate, alone in zip(rates, solo, strict=True))
        except Exception as error:
            yield Failure.of((jobs[0].case.name,), f"regions, {label}", error)


def _rates(colocation: tm.Colocation, excess: float | None, options: ZicoOptions) -> list[float]:
    """Iterations per second; the budget is exceeded by both jobs' peaks so many times, as far as they fit."""

    def choose(result: tm.ColocationResult) -> list[Stay]:
        whole, least = sizes_of(result)
        return [Stay("", whole if excess is None else max(least, int(whole / excess)))]

    watched = run_watched(colocation, choose, options.seconds, options.where)
    gc.collect()
    release_cached(options.where)
    if watched.error is not None:
        raise BenchError(f"{type(watched.error).__name__}: {watched.error}") from watched.error
    (stayed,) = watched.stayed
    return [count / stayed.seconds for count in stayed.counted]
