"""Small jobs, and the same jobs trained alone, that the co-location tests share."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import SMALL, LSTMLanguageModel, TokenBatch, TransformerClassifier
from benchmarks.workloads.seeding import seeded
from torch import Tensor, nn

import trainmux as tm
from trainmux.colocate import _colocation
from trainmux.colocate._demand import SegmentRef, cut_segments
from trainmux.colocate._host_device import HostDevice
from trainmux.colocate._protocols import Ended
from trainmux.colocate._step_layout import StepKernels, StepLayout

SMALL_CUTS = 2048
"""Bytes of feature maps between two cuts that make many segments of small models."""

ONE_LAYER = {
    "lstm": seeded(LSTMLanguageModel, num_layers=1),
    "transformer_with_dropout": seeded(TransformerClassifier, num_layers=1, dropout=0.2),
}
"""Workloads whose graphs are shorter here than elsewhere: building them is most of a test's time."""


def small_fleet(name: str, num_members: int = 1, **options: Any) -> tm.Fleet:
    """Members of a small workload."""
    workload = SMALL[name]
    build = ONE_LAYER.get(name, workload.build)
    members = []
    for number in range(num_members):
        model = build(number).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 * (number + 1))
        members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
    return tm.Fleet(members, workload.loss, batches_of(name)[0], deterministic=True, **options)


@functools.cache
def batches_of(name: str) -> list[Any]:
    """Three batches of a small workload; those of the recurrent one are few tokens long."""
    batches = [SMALL[name].batch(number, torch.float32) for number in range(3)]
    if name != "lstm":
        return batches
    return [TokenBatch(batch.tokens[:, :3], batch.targets[:, :3]) for batch in batches]


# ---- tiny jobs -----------------------------------------------------------------------------------------


def tiny_model(seed: int, hidden: int = 16) -> nn.Module:
    """Four numbers in, one out."""
    return seeded(lambda: nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1)))(seed)


def tiny_batches(seed: int, num_batches: int = 3, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches of random numbers, always the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator))
        for _ in range(num_batches)
    ]


def mse(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared error."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def tiny_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every tiny job."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def tiny_member(seed: int, name: str | None = None) -> tm.Member:
    """A member of a new tiny model."""
    model = tiny_model(seed)
    return tm.Member(model, tiny_optimizer(model), name=name or f"m{seed}", seed=seed)


def trio() -> tm.Fleet:
    """A fleet of three tiny models."""
    members = [tiny_member(seed) for seed in range(3)]
    return tm.Fleet(members, mse, tiny_batches(0)[0], deterministic=True)


@functools.cache
def fleet_of_one(number: int) -> tm.Fleet:
    """A fleet that `tiny_fleet` puts members into."""
    return tm.Fleet([tiny_member(number)], mse, tiny_batches(0)[0], deterministic=True)


def tiny_fleet(seed: int, name: str, number: int) -> tm.Fleet:
    """A fleet of one new tiny model; fleets of one number are one and the same, which saves the tracing."""
    fleet = fleet_of_one(number)
    fleet.replace(fleet.names[0], tiny_member(seed, name))
    return fleet


def tiny_job(name: str, seed: int = 0, steps: int | None = 4, **options: Any) -> tm.Job:
    """A job of a new tiny model; jobs of one test have different seeds. ``options`` override."""
    given: dict[str, Any] = {"fleet": tiny_fleet(seed, name, seed), "loader": tiny_batches(seed)}
    return tm.Job(name, steps=steps, **{**given, **options})


def model_job(name: str, seed: int = 0, steps: int | None = 4, **options: Any) -> tm.Job:
    """The same given as a model; ``options`` override."""
    model = tiny_model(seed)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": tiny_optimizer(model),
        "loss": mse,
        "loader": tiny_batches(seed),
        "deterministic": True,
    }
    return tm.Job(name, steps=steps, **{**given, **options})


def model_of(job: tm.Job) -> nn.Module:
    """The model that a job trains."""
    if job.fleet is not None:
        return job.fleet.members[0].model
    assert job.model is not None
    return job.model


_ALONE = -1


@functools.cache
def trained_alone(seed: int, steps: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the tiny job of a seed loses at each step when it trains alone, and its weights then."""
    fleet = tiny_fleet(seed, "alone", _ALONE)
    losses = [fleet.step(batch).clone() for batch in cycled(tiny_batches(seed), steps)]
    fleet.sync()
    return torch.stack(losses), tuple(p.detach().clone() for p in fleet.members[0].model.parameters())


def assert_as_alone(result: tm.ColocationResult, job: tm.Job, seed: int, steps: int) -> None:
    """A tiny job's losses and weights bit for bit as if it had trained alone."""
    losses, weights = trained_alone(seed, steps)
    assert torch.equal(result[job.name].losses, losses), job.name
    for found, expected in zip(model_of(job).parameters(), weights, strict=True):
        assert torch.equal(found, expected), job.name


def cycled(batches: Sequence[Any], steps: int) -> Iterator[Any]:
    """``steps`` batches, from the beginning again and again."""
    for step in range(steps):
        yield batches[step % len(batches)]


def smallest_budget(colocation: tm.Colocation) -> int:
    """The least bytes with which these jobs can be trained."""
    jobs = colocation.results().jobs.values()
    return sum(job.local_bytes for job in jobs) + max(job.peak_bytes for job in jobs)


def sum_of_peaks(colocation: tm.Colocation) -> int:
    """The bytes with which no job ever waits for another."""
    return sum(job.local_bytes + job.peak_bytes for job in colocation.results().jobs.values())


def state_of(fleet: tm.Fleet) -> dict[str, Tensor]:
    """All members' tensors, optimizer state included, as copies."""
    fleet.sync()
    found: dict[str, Tensor] = {}
    for member in fleet.members:
        found |= {f"{member.name} {key}": value for key, value in member.model.state_dict().items()}
        for number, entry in member.optimizer.state_dict()["state"].items():
            found |= {f"{member.name} {number} {key}": torch.as_tensor(v) for key, v in entry.items()}
    return {key: value.clone() for key, value in found.items()}


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Every tensor bit for bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), f"{what}: {key}"


def assert_members_as_alone(
    result: tm.JobResult, job: tm.Job, alone: tm.Fleet, change: Callable[[tm.Fleet, int], None] | None = None
) -> None:
    """A job's fleet bit for bit as ``alone``, if ``change`` is called with it after each step; NaN for
    absent members."""
    assert isinstance(job.loader, list)
    rows = []
    for step, batch in enumerate(cycled(job.loader, result.num_steps), start=1):
        rows.append(dict(zip(alone.names, alone.step(batch).tolist(), strict=True)))
        if change is not None:
            change(alone, step)
    expected = torch.tensor([[row.get(name, torch.nan) for name in result.members] for row in rows])
    assert result.error is None
    assert torch.equal(result.losses.isnan(), expected.isnan())
    assert torch.equal(result.losses.nan_to_num(), expected.nan_to_num())
    assert job.fleet is not None
    assert_same_state(state_of(job.fleet), state_of(alone), job.name)


def cut_by(monkeypatch: pytest.MonkeyPatch, tracking_bytes: Callable[[StepKernels, float], int]) -> None:
    """Cut steps by a function of their kernels and their duration."""

    def cut(self: StepLayout, given: int | None, device: Any, seconds: float) -> tuple[int, ...]:
        return cut_segments(self.kernels.iteration, tracking_bytes(self.kernels, seconds))

    monkeypatch.setattr(StepLayout, "cut", cut)


class AheadDevice(HostDevice):
    """Runs segments when they are enqueued and tells of their ends later, as a CUDA device does.

    What a segment has to wait for was enqueued before it, so it may run at once.
    """

    def __init__(self, *, poisons: bool = False) -> None:
        super().__init__(poisons=poisons)
        self._ran: deque[Ended] = deque()
        self._last_end: dict[str, float] = {}
        self._has_waited = False
        """Whether the caller was last told to ask again."""

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        super().enqueue(ref, after, work)
        ended = super().next_ended()
        assert ended is not None
        started_at = self._last_end.get(ref.job, ended.started_at)  # the host takes no time
        self._last_end[ref.job] = ended.ended_at
        self._ran.append(ended._replace(started_at=started_at))

    @property
    def is_busy(self) -> bool:
        return bool(self._ran)

    def next_ended(self, until: float | None = None) -> Ended | None:
        waits = until is not None and (until == 0 or self.now() < until) and len(self._ran) % 3 == 1
        if waits and not self._has_waited:
            self._has_waited = True
            return None  # nothing ends before; the caller is to ask again
        self._has_waited = False
        return self._ran.popleft() if self._ran else None


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs run on an `AheadDevice`."""
    monkeypatch.setattr(
        _colocation, "make_device", lambda where, region_bytes, *, poisons: AheadDevice(poisons=poisons)
    )


class Breaking(list[Any]):
    """Batches after which a loader raises, in each pass."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise OSError("the disk is gone")
