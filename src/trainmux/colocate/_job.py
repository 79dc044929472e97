"""A job as the user describes it, its batches, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainmux.errors import ConfigError
from trainmux.fleet import END_OF_PASS, BatchCursor, Fleet, Member
from trainmux.tracing import LossFunction

if TYPE_CHECKING:
    from trainmux.colocate._colocation import Colocation


@dataclass(frozen=True)
class JobStep:
    """An iteration that has ended, for callbacks.

    ``job`` is its name. ``step`` counts from 1. ``losses`` has one entry per member, ``metrics`` one row
    each. A callback may call ``add``, ``remove`` and ``set_budget`` of ``colocation``.
    """

    colocation: Colocation
    job: str
    step: int
    losses: Tensor
    metrics: Mapping[str, Any]


JobCallback = Callable[[JobStep], object]


@dataclass(frozen=True, eq=False)
class Job:
    """One model, or a fleet, to be trained next to other jobs.

    ``loss(model, batch)`` is as for a fleet. ``steps`` iterations are run, cycling over ``loader``; without
    ``steps``, one pass over it. A job with twice the ``share`` gets twice the device time where jobs compete
    for memory; of two different jobs with equal shares, one may get half more than the other. Each of
    ``callbacks`` is called with a `JobStep` after every iteration. ``optimizer``, ``seed``, ``scheduler``,
    ``precision``, ``device``, ``deterministic`` and ``accumulate`` are for a model, as in `Member` and
    `Fleet`; a fleet has its own. Where gradients are accumulated, an iteration is a micro-batch.

    A loader draws its order from random numbers of the job's own, which start at torch's state when the job
    is handed over, so other jobs do not change it. Refused with `ConfigError`: a job with both a model and a
    fleet, or with neither, and settings out of range.
    """

    name: str
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    loss: LossFunction | None = None
    loader: Iterable[Any] | None = None
    fleet: Fleet | None = None
    steps: int | None = None
    share: float = 1.0
    callbacks: Sequence[JobCallback] = ()
    seed: int | None = None
    scheduler: Any = None
    precision: str = "fp32"
    device: str | torch.device = "cpu"
    deterministic: bool = False
    accumulate: int = 1

    def __post_init__(self) -> None:
        label = f"job {self.name!r}"

        def require(holds: bool, what: str) -> None:
            if not holds:
                raise ConfigError(f"{label} {what}")

        require(
            isinstance(self.name, str) and bool(self.name),
            "must have a non-empty string as its name; name it",
        )
        parts = {"model": self.model, "optimizer": self.optimizer, "loss": self.loss}
        given = [name for name, part in parts.items() if part is not None]
        missing = [name for name, part in parts.items() if part is None]
        if self.fleet is None:
            require(
                not missing,
                "must have a fleet, or a model, an optimizer and a loss, but got no "
                f"{' and no '.join(missing)}; pass it",
            )
        else:
            require(
                not given,
                f"must have a fleet or a model, but got a fleet and {' and '.join(given)}; leave one out",
            )
            require(
                isinstance(self.fleet, Fleet),
                f"must have a trainmux.Fleet as fleet, but got {type(self.fleet).__name__}; build one",
            )
            require(
                self.accumulate == 1,
                f"accumulate is for a model, but got {self.accumulate} and a fleet; pass it to the fleet",
            )
        require(self.loader is not None, "must have a loader, but got none; pass an iterable of batches")
        require(
            self.steps is None or _is_count(self.steps),
            f"steps must be a whole number of at least 1, but got {self.steps!r}; leave it out for one pass "
            "over the loader",
        )
        require(
            isinstance(self.share, int | float) and self.share > 0,
            f"share must be above 0, but got {self.share!r}; 1.0 is usual",
        )
        require(
            all(callable(callback) for callback in self.callbacks),
            f"callbacks must be callable with a JobStep, but got {self.callbacks!r}; pass functions",
        )
        require(
            _is_count(self.accumulate),
            f"accumulate must be a whole number of at least 1, but got {self.accumulate!r}; leave it out to "
            "update with every batch",
        )

    @property
    def where(self) -> torch.device:
        """The device that it trains on. Refused with `ConfigError`: an invalid device."""
        if self.fleet is not None:
            return self.fleet._config.device
        try:
            found = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"job {self.name!r}: device must be 'cpu' or 'cuda[:index]', but got {self.device!r}"
            ) from error
        index: int | None = found.index  # torch's stubs leave the None out
        if found.type != "cuda" or index is not None or not torch.cuda.is_available():
            return found  # without CUDA the fleet raises
        return torch.device("cuda", torch.cuda.current_device())

    def make_fleet(self, example: Any) -> Fleet:
        """The job's fleet: its own, or one of its model alone."""
        if self.fleet is not None:
            return self.fleet
        assert self.model is not None
        assert self.optimizer is not None
        member = Member(self.model, self.optimizer, name=self.name, scheduler=self.scheduler, seed=self.seed)
        return Fleet(
            [member],
            self.loss,
            example,
            device=self.device,
            precision=self.precision,
            deterministic=self.deterministic,
            accumulate=self.accumulate,
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class JobBatches:
    """The batches of a job, with random numbers of its own; the first can be read beforehand."""

    def __init__(self, job: Job) -> None:
        assert job.loader is not None
        self._cursor = BatchCursor(job.loader, f"the loader of job {job.name!r}")
        self._cycles = job.steps is not None
        on_cuda = job.where.type == "cuda" and torch.cuda.is_available()
        self._devices = [job.where] if on_cuda else []
        self._keep_random()
        self._first: list[Any] = []

    def _keep_random(self) -> None:
        """Note torch's random state, on the CPU and on the job's device, as the job's own."""
        self._host_random = torch.get_rng_state()
        self._device_random = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def own_random(self) -> Iterator[None]:
        """Use the job's own random state, on the CPU and on the job's device."""
        with torch.random.fork_rng(devices=self._devices, device_type="cuda"):
            torch.set_rng_state(self._host_random)
            for device, state in zip(self._devices, self._device_random, strict=True):
                torch.cuda.set_rng_state(state, device)
            try:
                yield
            finally:
                self._keep_random()

    def first(self) -> Any:
        """The batch that will come first."""
        if not self._first:
            with self.own_random():
                self._first = [self._cursor.next()]
        return self._first[0]

    def next(self) -> Any:
        """The next batch; `END_OF_PASS` where the job was to run one pass, which has ended."""
        if self._first:
            return self._first.pop()
        with self.own_random():
            batch = self._cursor.next()
            return self._cursor.next() if batch is END_OF_PASS and self._cycles else batch


def check_jobs(jobs: Sequence[Job]) -> None:
    """Refuse jobs that cannot be co-located whatever they train."""
    if not jobs:
        raise ConfigError("expected at least one job, but got none; pass a list of trainmux.Job")
    for job in jobs:
        if not isinstance(job, Job):
            raise ConfigError(f"expected jobs to be trainmux.Job, but got {type(job).__name__}; make one")
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"jobs must have different names, but got {twice[0]!r} twice; rename one of them")
    places = sorted({str(job.where) for job in jobs})
    if len(places) > 1:
        raise ConfigError(f"jobs must share one device, but got jobs on {places}; put them on one")
    owners: dict[int, str] = {}
    for job in jobs:
        for trained in (job.fleet, job.model):
            if trained is not None and owners.setdefault(id(trained), job.name) != job.name:
                raise ConfigError(
                    f"jobs must train models of their own, but got one and the same in "
                    f"{owners[id(trained)]!r} and {job.name!r}; build another"
                )


# ---- results ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobResult:
    """The result of one job.

    ``losses`` has a row per step and a column for each of ``members``, NaN where a member of a fleet was
    absent; ``metrics`` are those of the last step. ``seconds`` last from the job's admission to the end of
    its last step. ``num_mispredicted`` iterations were held up by memory that was not free as predicted;
    ``shift_seconds`` is how long iterations were held back on purpose. The job owned ``local_bytes`` and up
    to ``peak_bytes`` of the arena. An iteration had ``num_segments`` segments; a job that ``is_eager`` could
    not be traced and has one. ``error`` ended it early, if any.
    """

    name: str
    members: tuple[str, ...]
    num_steps: int
    losses: Tensor
    metrics: Mapping[str, Any]
    seconds: float
    num_mispredicted: int
    shift_seconds: float
    local_bytes: int
    peak_bytes: int
    num_segments: int
    is_eager: bool
    error: Exception | None

    @property
    def steps_per_second(self) -> float:
        """Its throughput, 0 where nothing ran."""
        return self.num_steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class ColocationResult:
    """All jobs by name, and the device's memory against the budget.

    ``peak_bytes`` is the most that was laid out at one time, ``used_bytes`` the most of it that was in use.
    ``budget_bytes`` is the last budget in force. Jobs that could share the device were time-sliced for a
    while ``num_fall_backs`` times, because their memory was mispredicted.
    """

    jobs: Mapping[str, JobResult]
    seconds: float
    budget_bytes: int
    peak_bytes: int
    used_bytes: int
    num_fall_backs: int = 0

    def __getitem__(self, name: str) -> JobResult:
        return self.jobs[name]

    @property
    def failed(self) -> tuple[str, ...]:
        """The jobs that ended with an error."""
        return tuple(name for name, job in self.jobs.items() if job.error is not None)


@dataclass(frozen=True)
class JobUsage:
    """A job at one moment: ``num_steps`` done of ``steps``, and the bytes that it holds.

    ``local_bytes`` are its own, ``arena_bytes`` those of the arena.
    """

    name: str
    local_bytes: int
    arena_bytes: int
    num_steps: int
    steps: int | None
    state: str
    """"waiting", "running", "done" or "failed"."""
