"""What `bench zico` speaks of: a job that can be trained in several ways, and what came of each way.

What a way does per second is counted in *solo seconds*: an iteration of a job counts as much as it takes
alone, as a graph. In turns, as graphs, that is 1 but for what changing over costs; it is the paper's
Temporal. A way that runs twice as many iterations of both jobs has 2.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import trainmux as tm

from .batches import to_device
from .zico_cases import optimizer_of, zico_case

NUM_BATCHES = 2
LEAST_STEPS = 4
_NUM_BLOCKS = 5

PairNames = tuple[str, str]


@dataclass(frozen=True)
class WayResult:
    """One way to run a pair: iterations per second of each job, and solo seconds of work per second."""

    way: str
    iterations_per_second: tuple[float, ...]
    work: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PairResult:
    """A pair of jobs: what each takes alone and needs in memory, and what came of every way."""

    names: PairNames
    solo_ms: tuple[float, float]
    local_bytes: tuple[int, int]
    peak_bytes: tuple[int, int]
    ways: tuple[WayResult, ...]

    def row(self, way: str) -> WayResult | None:
        """Of one way; ``None`` where it was not measured."""
        return next((row for row in self.ways if row.way == way), None)

    def work(self, way: str) -> float | None:
        """Of one way; ``None`` where it was not measured."""
        row = self.row(way)
        return None if row is None else row.work

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PairResult:
        """What `to_json` gave, read back from a file."""
        ways = tuple(
            WayResult(row["way"], tuple(row["iterations_per_second"]), row["work"], row["detail"])
            for row in document["ways"]
        )
        names, solo, local, peaks = (
            tuple(document[name]) for name in ("names", "solo_ms", "local_bytes", "peak_bytes")
        )
        return cls(names, solo, local, peaks, ways)


@dataclass(frozen=True)
class Failure:
    """A way that could not be measured, and why."""

    names: tuple[str, ...]
    way: str
    error: str

    @classmethod
    def of(cls, names: tuple[str, ...], way: str, error: BaseException) -> Failure:
        """With the error's type, and the first lines of what it says."""
        return cls(names, way, f"{type(error).__name__}: {error}"[:500])


@dataclass(frozen=True)
class ZicoOptions:
    """``lowering`` and ``precision`` are as of `trainmux.Fleet`; every way runs for ``seconds``.

    ``has_machine`` adds the paper's machines' memory as a budget, ``has_processes`` two processes and MPS.
    """

    device: str
    lowering: str
    precision: str
    seconds: float
    has_eager: bool = True
    has_machine: bool = False
    has_processes: bool = False

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)


class BenchJob:
    """A model to train: its batches on the device, its fleet, and what an iteration takes alone."""

    def __init__(self, name: str, seed: int, options: ZicoOptions) -> None:
        self.case = zico_case(name)
        self.seed = seed
        self._options = options
        self.batches = [
            to_device(self.case.batch(NUM_BATCHES * seed + number), options.where)
            for number in range(NUM_BATCHES)
        ]
        self.state_bytes = 0
        """Of parameters and buffers, once there is a fleet; plain SGD has no state of its own."""

    @functools.cached_property
    def fleet(self) -> tm.Fleet:
        """Traced, and compiled where it is to be, when it is first asked for."""
        model = self.case.build(self.seed).train()
        self.state_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        member = tm.Member(model, optimizer_of(model), name=f"{self.case.name} {self.seed}", seed=self.seed)
        return tm.Fleet(
            [member],
            self.case.loss,
            self.batches[0],
            device=self._options.device,
            precision=self._options.precision,
            lowering=self._options.lowering,
        )

    def batch(self, number: int) -> Any:
        """One of a few, again and again."""
        return self.batches[number % NUM_BATCHES]

    def step(self, number: int) -> None:
        """An iteration by the fleet itself, as a graph where the device has them."""
        self.fleet.step(self.batch(number))

    def eager_step(self) -> Callable[[int], None]:
        """The same in plain torch, on a model of its own."""
        layout = {"memory_format": torch.channels_last} if self.case.is_image else {}
        model = self.case.build(self.seed).train().to(self._options.where, **layout)  # type: ignore[call-overload]
        optimizer = optimizer_of(model)
        half = self._options.precision == "bf16"

        def step(number: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._options.where.type, torch.bfloat16, enabled=half):
                loss = self.case.loss(model, self.batch(number))
            loss.backward()
            optimizer.step()

        return step

    @functools.cached_property
    def solo_seconds(self) -> float:
        """What an iteration takes with nothing beside it, as a graph."""
        for number in range(3):
            self.step(number)
        wait_for(self._options.where)
        blocks = []
        for _ in range(_NUM_BLOCKS):
            num, taken = train_for(self.step, self._options.seconds / 10, self._options.where)
            blocks.append(taken / num)
        return statistics.median(blocks)

    @functools.cached_property
    def memory(self) -> tm.IterationMemory:
        """What an iteration allocates; its kernels' times are those worked out for an H200."""
        return tm.iteration_memory(self.fleet, self.batches[0])


def endless_jobs(jobs: Sequence[BenchJob]) -> list[tm.Job]:
    """Jobs to co-locate that go on until they are removed; they are called by their places."""
    return [
        tm.Job(str(index), fleet=job.fleet, loader=job.batches, steps=10**9) for index, job in enumerate(jobs)
    ]


def sizes_of(result: tm.ColocationResult) -> tuple[int, int]:
    """What all jobs need at their peaks, and at least, by turns."""
    local = sum(row.local_bytes for row in result.jobs.values())
    peaks = [row.peak_bytes for row in result.jobs.values()]
    return local + sum(peaks), local + max(peaks)


def train_for(step: Callable[[int], object], seconds: float, device: torch.device) -> tuple[int, float]:
    """Step for that long, at least a few times, the host a few steps ahead; how often, and for how long."""
    begin, num = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or num < LEAST_STEPS:
        step(num)
        num += 1
        if num % LEAST_STEPS == 0:
            wait_for(device)
    wait_for(device)
    return num, time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_cached(device: torch.device) -> None:
    """Give back to the device what torch keeps for later."""
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def used_bytes(device: torch.device) -> int:
    """What is in use on the device, by anybody; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@contextmanager
def searched_convolutions() -> Iterator[None]:
    """Have cuDNN search its algorithms, which pays for plain torch: every shape is fixed."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def is_lost(device: torch.device) -> bool:
    """Whether the device answers no more: an error that stays until the process ends."""
    try:
        wait_for(device)
        torch.zeros(1, device=device).add_(1)
        wait_for(device)
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False
