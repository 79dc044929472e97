"""One training job: its batches on the device, trained by a fleet or by plain torch."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import trainmux as tm
from benchmarks.cases import to_device
from benchmarks.ways import Setup

from .cases import batches_per_update, find_zico_case

NUM_BATCHES = 2
STEPS_AHEAD = 4
"""Steps that the host enqueues before it waits for the device, and the fewest that are timed."""
_NUM_BLOCKS = 5


class MeasurementError(Exception):
    """A measurement that could not be made, for a known reason."""


@dataclass(frozen=True)
class ZicoOptions:
    """How to train: device, lowering and precision as for `trainmux.Fleet`, for ``seconds`` in each way.

    ``least_counted`` iterations of each co-located job are counted: with 64, one more or less at the ends of
    the window is 2% at most. The memory of ``sampled`` pairs is recorded over time.
    """

    device: str
    lowering: str
    precision: str
    seconds: float
    least_counted: int = 64
    sampled: tuple[str, ...] = ()

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)


class BenchJob:
    """A model to train. ``solo_seconds`` is the time of an iteration alone on the device, as a graph."""

    def __init__(self, name: str, seed: int, options: ZicoOptions) -> None:
        self.name, self.case = name, find_zico_case(name)
        self.seed = seed
        self.options = options
        seeds = (NUM_BATCHES * seed + number for number in range(NUM_BATCHES))
        self.batches = [to_device(self.case.batch(one), options.where) for one in seeds]
        self.state_bytes = 0
        """Bytes of parameters and buffers, once the fleet is built; plain SGD keeps no state."""

    @functools.cached_property
    def fleet(self) -> tm.Fleet:
        model = self.case.build(self.seed).train()
        self.state_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        member = tm.Member(model, _sgd(model), name=f"{self.case.name} {self.seed}", seed=self.seed)
        return tm.Fleet(
            [member],
            self.case.loss,
            self.batches[0],
            device=self.options.device,
            precision=self.options.precision,
            lowering=self.options.lowering,
            accumulate=batches_per_update(self.name),
        )

    def step(self, number: int) -> None:
        """Train one iteration by the fleet, as a graph where the device has graphs."""
        self.fleet.step(self.batches[number % NUM_BATCHES])

    def eager_step(self) -> Callable[[int], None]:
        """Make a function that trains one iteration in plain torch, on a model of its own."""
        setup = Setup([self.case.build(self.seed).train()], self.case.loss, None, self.options.where)
        (model,) = setup.placed()
        optimizer = _sgd(model)
        half, every = self.options.precision == "bf16", batches_per_update(self.name)

        def step(number: int) -> None:
            if number % every == 0:
                optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.options.where.type, torch.bfloat16, enabled=half):
                loss = self.case.loss(model, self.batches[number % NUM_BATCHES])
            loss.backward()
            if number % every == every - 1:
                optimizer.step()

        return step

    @functools.cached_property
    def solo_seconds(self) -> float:
        for number in range(3):
            self.step(number)
        wait_for(self.options.where)
        blocks = []
        for _ in range(_NUM_BLOCKS):
            num, taken = train_for(self.step, self.options.seconds / 10, self.options.where)
            blocks.append(taken / num)
        return statistics.median(blocks)


def train_for(step: Callable[[int], object], seconds: float, device: torch.device) -> tuple[int, float]:
    """Step for at least ``seconds``, the host a few steps ahead; the number of steps and the time taken."""
    begin, num = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or num < STEPS_AHEAD:
        step(num)
        num += 1
        if num % STEPS_AHEAD == 0:
            wait_for(device)
    wait_for(device)
    return num, time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_cached(device: torch.device) -> None:
    """Give memory that torch caches back to the device, and what cycles of objects hold; nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()
        wait_for(device)
        torch.cuda.empty_cache()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make the paper's optimizer, plain SGD; fused on a CUDA device, which helps the eager baselines."""
    is_cuda = next(model.parameters()).is_cuda
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=is_cuda)
