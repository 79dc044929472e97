"""A job as its user describes it, and the batches that it is fed."""

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
    """An iteration that has ended, as callbacks see it.

    ``step`` counts from 1. ``losses`` has one entry per member. ``colocation`` takes ``add``, ``remove`` and
    ``set_budget`` from within a callback.
    """

    colocation: Colocation
    job: str
    step: int
    losses: Tensor
    metrics: Mapping[str, Any]


JobCallback = Callable[[JobStep], object]

MAX_CONCURRENT_MICRO_BATCHES = 2


@dataclass(frozen=True, eq=False)
class Job:
    """Something to be trained beside other things: a model by itself, or a fleet.

    ``loss(model, batch)`` is as for a fleet. ``steps`` iterations are run, over ``loader`` again and again;
    without ``steps``, one pass over it. A job with twice the ``share`` of another gets twice the device time
    where both want the same memory; of two different jobs with equal shares, one may get half more than the
    other. Each of ``callbacks`` is called with a `JobStep` after every iteration.
    ``seed``, ``scheduler``, ``precision``, ``device``, ``deterministic`` and ``accumulate`` are for a model,
    as of `Member` and `Fleet`; a fleet has its own. Where gradients are accumulated, an iteration is a
    micro-batch.

    With ``concurrent_micro_batches=2`` two micro-batches between two updates run side by side where memory
    allows it, with the numbers that they have one after the other. Callbacks are then called after the
    update, for each micro-batch in turn.

    A loader draws its order from random numbers of the job's own, which begin as torch's are when the job is
    handed over: other jobs do not change it. Refused with `ConfigError`: a job with both a model and a fleet,
    or with neither, and settings that are no use.
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
    concurrent_micro_batches: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a job's name must be a non-empty string, but got {self.name!r}; name it")
        label = f"job {self.name!r}"
        parts = {"model": self.model, "optimizer": self.optimizer, "loss": self.loss}
        if self.fleet is None:
            missing = [name for name, part in parts.items() if part is None]
            if missing:
                raise ConfigError(
                    f"{label} must have a fleet, or a model, an optimizer and a loss, but got no "
                    f"{missing[0]}; pass it"
                )
        else:
            beside = [name for name, part in parts.items() if part is not None]
            if beside:
                raise ConfigError(
                    f"{label} must have a fleet or a model, but got a fleet and {beside[0]} beside it; leave "
                    "one out"
                )
            if not isinstance(self.fleet, Fleet):
                raise ConfigError(
                    f"{label}: fleet must be a trainmux.Fleet, but got {type(self.fleet).__name__}; build one"
                )
        if self.loader is None:
            raise ConfigError(f"{label} must have a loader, but got none; pass what gives its batches")
        if self.steps is not None and not _is_count(self.steps):
            raise ConfigError(
                f"{label}: steps must be a whole number of at least 1, but got {self.steps!r}; leave it out "
                "for one pass over the loader"
            )
        if not isinstance(self.share, int | float) or not self.share > 0:
            raise ConfigError(f"{label}: share must be above 0, but got {self.share!r}; 1.0 is usual")
        if not all(callable(callback) for callback in self.callbacks):
            raise ConfigError(
                f"{label}: callbacks must be callable with a JobStep, but got {self.callbacks!r}"
            )
        self._check_micro_batches(label)

    def _check_micro_batches(self, label: str) -> None:
        if not _is_count(self.accumulate):
            raise ConfigError(
                f"{label}: accumulate must be a whole number of at least 1, but got {self.accumulate!r}; "
                "leave it out to update with every batch"
            )
        if self.fleet is not None and self.accumulate != 1:
            raise ConfigError(
                f"{label}: accumulate is for a model, but got {self.accumulate} beside a fleet; pass it to "
                "the fleet"
            )
        at_once = self.concurrent_micro_batches
        if not _is_count(at_once) or at_once > MAX_CONCURRENT_MICRO_BATCHES:
            raise ConfigError(
                f"{label}: concurrent_micro_batches must be 1 or {MAX_CONCURRENT_MICRO_BATCHES}, one for "
                f"each end of an arena, but got {at_once!r}; leave it out for one after the other"
            )
        accumulate = self.accumulate if self.fleet is None else self.fleet._config.accumulate
        if at_once > accumulate:
            raise ConfigError(
                f"{label}: concurrent_micro_batches={at_once} must not be above accumulate, but got "
                f"accumulate={accumulate}; only micro-batches between two updates can run at once"
            )

    @property
    def num_lanes(self) -> int:
        """How many of its iterations may run side by side."""
        at_once = self.concurrent_micro_batches
        return at_once if self.steps is None or self.steps >= at_once else 1

    @property
    def where(self) -> torch.device:
        """The device that it trains on. Refused with `ConfigError`: what is no device."""
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
            return found  # where there is none, the fleet says so
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


class _RandomState:
    """Torch's random state as it is now, on the CPU and on a CUDA device if ``device`` is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if self._on_cuda else None

    def apply(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)


class JobBatches:
    """The batches of a job, with random numbers of its own; the first can be looked at beforehand."""

    def __init__(self, job: Job) -> None:
        assert job.loader is not None
        self._cursor = BatchCursor(job.loader, f"the loader of job {job.name!r}")
        self._cycles = job.steps is not None
        self._random = _RandomState(job.where)
        self._first: list[Any] = []

    @contextmanager
    def own_random(self) -> Iterator[None]:
        """Inside, torch's random numbers are the job's own, on the CPU and on the job's device."""
        others = _RandomState(self._random.device)
        self._random.apply()
        try:
            yield
        finally:
            self._random = _RandomState(others.device)
            others.apply()

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
    """Refuse what cannot be scheduled whatever it trains."""
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
    _check_apart(jobs)


def _check_apart(jobs: Sequence[Job]) -> None:
    """Refuse two jobs that would train the same model or fleet."""
    owners: dict[int, str] = {}
    for job in jobs:
        for trained in (job.fleet, job.model):
            if trained is not None and owners.setdefault(id(trained), job.name) != job.name:
                raise ConfigError(
                    f"jobs must train models of their own, but got one and the same in "
                    f"{owners[id(trained)]!r} and {job.name!r}; build another"
                )
