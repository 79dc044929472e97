"""Small models, batches and the plain torch loop that the fleet tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainmux.fleet._build as build_module
import trainmux.fleet._traces as traces_module
from trainmux import Fleet, Member

TOLERANCE = 1e-12
"""Largest difference, as a share of a tensor's largest value, between fused and plain training in fp64."""


# ---- models and data -----------------------------------------------------------------------------------


def _seeded(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Gives a model builder a seed of its own and leaves the global random state alone."""

    @functools.wraps(make)
    def build(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make(**options).to(dtype)

    return build


@_seeded
def mlp(hidden: int = 4, dropout: float | None = None) -> nn.Module:
    """Three numbers in, two out. Small graphs matter here: most of a test's time goes into building them."""
    layers = [nn.Linear(3, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, 2)]
    if dropout is not None:
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers)


@_seeded
def bn_mlp(dropout: float = 0.0) -> nn.Module:
    """With running statistics and, if asked for, dropout."""
    # No bias before the normalisation: its gradient would be nothing but rounding.
    norm = nn.BatchNorm1d(4, affine=False)
    return nn.Sequential(nn.Linear(3, 4, bias=False), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 2))


@_seeded
def bn_cnn() -> nn.Module:
    """Images of 3×3 in, two numbers out."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 2),
    )


def mse(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def l1(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).abs().mean()


def mse_with_metrics(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    error = model(inputs) - targets
    return error.square().mean(), {"largest": error.abs().max(), "per_output": error.mean(0)}


def vectors(seed: int = 0, size: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A batch for the MLPs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randn(size, 2, generator=generator, dtype=torch.float64).to(dtype)


def images(seed: int = 0, size: int = 5) -> tuple[Tensor, Tensor]:
    """A batch for the CNN."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 1, 3, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(size, 2, generator=generator, dtype=torch.float64)


BATCHES = [vectors(seed) for seed in range(12)]
EXAMPLE = BATCHES[0]


# ---- optimizers ----------------------------------------------------------------------------------------


def _split(model: nn.Module, i: int) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.03, "betas": (0.7, 0.9)}]
    return torch.optim.AdamW(groups, lr=0.01 * (i + 1))


def _last_layer(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(model.parameters())[-2:], lr=0.02 * (i + 1))


OPTIMIZERS: dict[str, Callable[[nn.Module, int], torch.optim.Optimizer]] = {
    "sgd": lambda m, i: torch.optim.SGD(m.parameters(), lr=0.1 / (i + 1), weight_decay=0.01 * i),
    "sgd-momentum": lambda m, i: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9 - 0.3 * i, dampening=0.1 * i
    ),
    "adam": lambda m, i: torch.optim.Adam(m.parameters(), lr=0.02, weight_decay=0.1 * i),
    "adam-amsgrad": lambda m, i: torch.optim.Adam(m.parameters(), lr=0.01 * (i + 1), amsgrad=True),
    "adamw": lambda m, i: torch.optim.AdamW(m.parameters(), lr=0.01 * (i + 1), betas=(0.9 - 0.4 * i, 0.99)),
    "rmsprop-centered": lambda m, i: torch.optim.RMSprop(
        m.parameters(), lr=0.01 * (i + 1), centered=True, momentum=0.5, eps=1e-3
    ),
    "adagrad": lambda m, i: torch.optim.Adagrad(
        m.parameters(), lr=0.1, lr_decay=0.1 * i, initial_accumulator_value=0.2 * i
    ),
    "adadelta": lambda m, i: torch.optim.Adadelta(m.parameters(), lr=1.0, rho=0.9 - 0.3 * i),
    "param-groups": _split,
    "last-layer": _last_layer,
}
ONE_OF_EACH = (
    "sgd-momentum",
    "adam-amsgrad",
    "adamw",
    "rmsprop-centered",
    "adagrad",
    "adadelta",
    "param-groups",
)
"""Every class once, with all the state it can have."""


def sgd_member(i: int, name: str | None = None, **options: Any) -> Member:
    """Member ``i`` of the plainest kind: an MLP under SGD with momentum."""
    model = mlp(i)
    return Member(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1 / (i + 1), momentum=0.9),
        name or f"m{i}",
        **options,
    )


def adam_member(i: int, name: str | None = None, **options: Any) -> Member:
    """Member ``i`` of another plain kind: an MLP under Adam, which counts its steps."""
    model = mlp(i)
    return Member(model, torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1)), name or f"m{i}", **options)


def dropout_member(i: int, name: str | None = None, **options: Any) -> Member:
    """Member ``i`` with running statistics and dropout, under Adam."""
    model = bn_mlp(i, dropout=0.4)
    return Member(model, torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1)), name or f"m{i}", **options)


# ---- plain torch ---------------------------------------------------------------------------------------


def train_alone(
    member: Member,
    batches: Iterable[Any],
    loss: Callable[..., Any] = mse,
    *,
    accumulate: int = 1,
) -> list[float]:
    """Trains the member's own objects as anyone would without a fleet; returns the losses."""
    losses = []
    loss = member.loss or loss
    for number, batch in enumerate(batches, 1):
        value = loss(member.model, batch)
        value = value[0] if isinstance(value, tuple) else value
        (value / accumulate).backward()
        losses.append(value.item())
        if number % accumulate:
            continue
        if member.clip_norm is not None:
            nn.utils.clip_grad_norm_(member.model.parameters(), member.clip_norm)
        if member.clip_value is not None:
            nn.utils.clip_grad_value_(member.model.parameters(), member.clip_value)
        member.optimizer.step()
        member.model.zero_grad()
        if member.scheduler is not None and not member.steps_by_epoch:
            member.scheduler.step()
    return losses


# ---- comparing -----------------------------------------------------------------------------------------


def state_of(member: Member) -> dict[str, Tensor]:
    """Copies of everything a member's own objects hold: weights, buffers, optimizer state."""
    found = {f"parameter {name}": value for name, value in member.model.named_parameters()}
    found |= {f"buffer {name}": value for name, value in member.model.named_buffers()}
    for index, state in member.optimizer.state_dict()["state"].items():
        found |= {f"state {index} {key}": value for key, value in state.items() if value is not None}
    return {name: torch.as_tensor(value).detach().clone() for name, value in found.items()}


def states_of(fleet: Fleet) -> dict[str, dict[str, Tensor]]:
    """``state_of`` all members after a ``sync``."""
    fleet.sync()
    return {name: state_of(member) for name, member in zip(fleet.names, fleet.members, strict=True)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, the sign of zero and NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Two states are bitwise the same."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    different = [name for name in expected if not same_bits(got[name], expected[name])]
    assert not different, different


def assert_same_states(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """States of several members, by name, are bitwise the same."""
    assert got.keys() == expected.keys()
    for name in expected:
        assert_same(got[name], expected[name])


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], share: float = TOLERANCE) -> None:
    """Two states differ by no more than ``share`` of each tensor's largest value; counts are equal."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    errors = {}
    for name, want in expected.items():
        have = got[name]
        assert have.shape == want.shape, name
        assert have.dtype == want.dtype, name
        if name.endswith(" step") or not want.dtype.is_floating_point:
            assert torch.equal(have, want), name
        elif want.numel():
            errors[name] = ((have - want).abs().max() / want.abs().max().clamp(min=1e-300)).item()
    too_far = {name: error for name, error in errors.items() if not error <= share}
    assert not too_far, too_far


def assert_alone(
    fleet: Fleet, *expected: tuple[Member, Iterable[Any]], loss: Callable[..., Any] = mse, accumulate: int = 1
) -> None:
    """Members of the fleet are as new ones of their names that plain torch trains on these batches."""
    states = states_of(fleet)
    for member, batches in expected:
        train_alone(member, batches, loss, accumulate=accumulate)
        assert_close(states[member.name or ""], state_of(member))


def assert_trains_alone(
    fleet: Fleet,
    make: Callable[[int], Member],
    batches: Sequence[Any],
    loss: Callable[..., Any] = mse,
    *,
    accumulate: int = 1,
) -> None:
    """Steps the fleet over ``batches`` and compares member ``i`` with ``make(i)`` trained by itself."""
    got = torch.stack([fleet.step(batch) for batch in batches])
    states = states_of(fleet)
    for i, name in enumerate(fleet.names):
        alone = make(i)
        losses = torch.tensor(train_alone(alone, batches, loss, accumulate=accumulate), dtype=torch.float64)
        torch.testing.assert_close(got[:, i], losses, rtol=TOLERANCE, atol=TOLERANCE)
        assert_close(states[name], state_of(alone))


# ---- what the fleet does behind the scenes -------------------------------------------------------------


@dataclass
class Work:
    """How often something expensive was done."""

    traces: int = 0
    fusions: int = 0

    @property
    def total(self) -> int:
        return self.traces + self.fusions


def count_work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts traces and fused programs from here on."""
    work = Work()

    def counted(original: Callable[..., Any], field: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            setattr(work, field, getattr(work, field) + 1)
            return original(*args, **kwargs)

        return call

    for name in ("trace_joint", "trace_forward"):
        monkeypatch.setattr(traces_module, name, counted(getattr(traces_module, name), "traces"))
    monkeypatch.setattr(build_module, "fuse", counted(build_module.fuse, "fusions"))
    return work
