"""Times of steps: warmed up, in blocks, by the device's own events where it has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

MIN_WARMUP_STEPS, MAX_WARMUP_STEPS = 20, 40
"""A fleet looks at its members before each of its first 16 steps, which may take a tenth of their time."""
MAX_KERNEL_NAME = 120
SETTLED_RATIO = 1.5
"""Warming up ends when two steps in a row took at most this many times the fastest one."""


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    """Time ``work`` until the device has finished it."""
    if device.type != "cuda":
        begin = perf_counter()
        work()
        return perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def time_blocks(
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    device: torch.device,
    num_blocks: int,
    block_seconds: float,
) -> list[float]:
    """Warm up, size a block to about ``block_seconds``, and give the seconds per step of each block."""
    supply = cycle(batches)

    def run(num_steps: int) -> float:
        def work() -> None:
            for batch in islice(supply, num_steps):
                step(batch)

        return seconds_of(work, device) / num_steps

    taken = [run(1) for _ in range(MIN_WARMUP_STEPS)]
    while len(taken) < MAX_WARMUP_STEPS and max(taken[-2:]) > SETTLED_RATIO * min(taken):
        taken.append(run(1))
    # An untimed block brings an idle device up to speed and decides the length of the others.
    for _ in range(2):
        num_steps = max(1, math.ceil(block_seconds / max(taken[-1], 1e-9)))
        taken.append(run(num_steps))
    return [run(num_steps) for _ in range(num_blocks)]


def time_iterations(
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    device: torch.device,
    num_warmups: int,
    num_measured: int,
    warmup_seconds: float = math.inf,
) -> tuple[list[float], int]:
    """Time iteration after iteration, without waiting in between: (seconds of each, warm-up steps made).

    Warming up ends early after ``warmup_seconds``, but no sooner than `time_blocks` would end it. On a GPU an
    iteration lasts from the moment at which the one before has handed out its losses to its own.
    """
    supply = cycle(batches)
    begin, num_warmed = perf_counter(), 0
    while num_warmed < num_warmups and (
        num_warmed < MIN_WARMUP_STEPS or perf_counter() - begin < warmup_seconds
    ):
        seconds_of(lambda: step(next(supply)), device)
        num_warmed += 1
    if device.type != "cuda":
        return [seconds_of(lambda: step(next(supply)), device) for _ in range(num_measured)], num_warmed
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_measured + 1)]
    step(next(supply))  # so that the first one that counts follows another, as all of them do
    marks[0].record()
    for mark in marks[1:]:
        step(next(supply))
        mark.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)], num_warmed


def longest_kernels(
    step: Callable[[Any], Any], batches: Sequence[Any], device: torch.device, count: int, num_members: int
) -> list[dict[str, Any]]:
    """Kernels by their milliseconds per member and step, on a CPU operators: the longest, and all others."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        for batch in batches:
            step(batch)
        if on_gpu:
            torch.cuda.synchronize(device)
    share = len(batches) * num_members
    kernels = sorted(
        (
            {
                "name": event.key[:MAX_KERNEL_NAME],
                "calls": event.count / len(batches),
                "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / share,
            }
            for event in profile.key_averages()
        ),
        key=lambda kernel: -kernel["ms"],
    )
    rest = [kernel for kernel in kernels[count:] if kernel["ms"] > 0]
    others = {name: sum(kernel[name] for kernel in rest) for name in ("calls", "ms")}
    return [*kernels[:count], {"name": f"{len(rest)} others", **others}]


def summary(step_seconds: Sequence[float], num_members: int) -> dict[str, Any]:
    """Seconds per step of all members → milliseconds per member and step."""
    block_ms = [1e3 * seconds / num_members for seconds in step_seconds]
    return {
        "median_ms": median(block_ms),
        "min_ms": min(block_ms),
        "max_ms": max(block_ms),
        "block_ms": block_ms,
    }


def used_bytes(device: torch.device) -> int:
    """Bytes of the whole device that are in use, by anybody; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
