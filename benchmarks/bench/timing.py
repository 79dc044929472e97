"""Times of steps: warmed up, in blocks, by the device's own events where it has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from .job import Timing

MIN_WARMUP_STEPS = 3
MAX_WARMUP_STEPS = 20
SETTLED_RATIO = 1.5
"""Warming up ends when two steps in a row took at most this many times the fastest one."""


@dataclass(frozen=True)
class Blocks:
    """Seconds per step, the mean of each block of ``steps_per_block`` steps."""

    step_seconds: tuple[float, ...]
    steps_per_block: int
    num_warmup_steps: int


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    """How long ``work`` takes until the device has finished it."""
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
) -> Blocks:
    """Warm up, size a block to about ``block_seconds``, time ``num_blocks`` of them.

    The batches take turns without end. One block goes untimed: it brings an idle device up to speed, and
    its own length decides the length of the others.
    """
    supply = cycle(batches)

    def run(num_steps: int) -> float:
        def work() -> None:
            for batch in islice(supply, num_steps):
                step(batch)

        return seconds_of(work, device) / num_steps

    taken: list[float] = []
    while not _has_settled(taken):
        taken.append(run(1))
    sizing_steps = _steps_for(block_seconds, taken[-1])
    steps_per_block = _steps_for(block_seconds, run(sizing_steps))
    return Blocks(
        step_seconds=tuple(run(steps_per_block) for _ in range(num_blocks)),
        steps_per_block=steps_per_block,
        num_warmup_steps=len(taken) + sizing_steps,
    )


def summarize(blocks: Blocks, num_members: int, *, build_s: float, start_to_first_step_s: float) -> Timing:
    """Seconds per step of all members → milliseconds per member and step."""
    block_ms = tuple(1e3 * seconds / num_members for seconds in blocks.step_seconds)
    lower, upper = quartiles(block_ms)
    return Timing(
        median_ms=median(block_ms),
        min_ms=min(block_ms),
        max_ms=max(block_ms),
        lower_quartile_ms=lower,
        upper_quartile_ms=upper,
        block_ms=block_ms,
        steps_per_block=blocks.steps_per_block,
        num_members=num_members,
        num_warmup_steps=blocks.num_warmup_steps,
        build_s=build_s,
        start_to_first_step_s=start_to_first_step_s,
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile, interpolated; both the value itself where there is only one."""
    if len(values) == 1:
        return values[0], values[0]
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return lower, upper


def _has_settled(taken: Sequence[float]) -> bool:
    if len(taken) < MIN_WARMUP_STEPS:
        return False
    return len(taken) >= MAX_WARMUP_STEPS or max(taken[-2:]) <= SETTLED_RATIO * min(taken)


def _steps_for(block_seconds: float, step_seconds: float) -> int:
    return max(1, math.ceil(block_seconds / max(step_seconds, 1e-9)))
