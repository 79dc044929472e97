"""Small models, batches and the plain torch loop that the fleet tests share."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from equivalence import assert_same, distance, in_two_groups, snapshot, train_member
from short_workloads import SHORT, member_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

import trainmux.fleet._build as build_module
import trainmux.fleet._traces as traces_module
from trainmux import Device, Fleet, Member

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
def bn_mlp(hidden: int = 4, dropout: float = 0.0, outputs: int = 2) -> nn.Module:
    """With running statistics and, if asked for, dropout."""
    # No bias before the normalisation: its gradient would be nothing but rounding.
    layers = (nn.Linear(3, hidden, bias=False), nn.BatchNorm1d(hidden, affine=False), nn.Tanh())
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(hidden, outputs))


def _shifted(model: Any, x: Tensor) -> Any:
    return model.last(model.act(model.norm(model.first(x))) + model.shift) * model.scale


@_seeded
def net(hidden: int = 4, shift: float = 0.0) -> nn.Module:
    """Two layers around a batch norm, a number, and a constant that members may share."""
    layers = {"first": nn.Linear(3, hidden, bias=False), "last": nn.Linear(hidden, 2)}
    norm, act = nn.BatchNorm1d(hidden), nn.Tanh()
    return Made(_shifted, **layers, norm=norm, act=act, shift=torch.tensor(shift), scale=1.0)


class Made(nn.Module):
    """A forward pass that is a function, with attributes for it to use; tensors are buffers."""

    def __init__(self, code: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.code = code
        for name, value in attributes.items():
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *given: Any) -> Any:
        return self.code(self, *given)


def coded(code: Callable[[Any, Tensor], Any], **attributes: Any) -> Any:
    """The same with an MLP as its layer, unless another is given."""
    return Made(code, **{"layer": mlp(), **attributes})


class Slotted:
    """One value, where it cannot be looked into from outside: there is no ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def projected(seed: int, constant: float) -> nn.Module:
    """A fixed projection and a frozen weight: part of the model, shared by members where they are equal."""
    return coded(
        lambda model, x: model.layer(x * model.projection) * model.frozen,
        layer=mlp(seed),
        projection=torch.full((3,), constant, dtype=torch.float64),
        frozen=nn.Parameter(torch.full((2,), constant, dtype=torch.float64), requires_grad=False),
    )


def mse(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def mse_any(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """In the model's own dtype."""
    dtype = next(model.parameters()).dtype
    return mse(model, [leaf.to(dtype) for leaf in batch])


def mse_with_metrics(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    error = model(inputs) - targets
    return error.square().mean(), {"largest": error.abs().max(), "per_output": error.mean(0)}


def vectors(seed: int = 0, size: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A batch for the MLPs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randn(size, 2, generator=generator, dtype=torch.float64).to(dtype)


def stacked(*seeds: int, size: int = 5) -> tuple[Tensor, ...]:
    """A batch with one of its own for each member."""
    return tuple(torch.stack(leaves) for leaves in zip(*(vectors(seed, size) for seed in seeds), strict=True))


BATCHES = [vectors(seed) for seed in range(12)]
EXAMPLE = BATCHES[0]


# ---- optimizers ----------------------------------------------------------------------------------------


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
    "param-groups": in_two_groups(
        lambda m, i: torch.optim.AdamW(m.parameters(), lr=0.01 * (i + 1), betas=(0.9 - 0.2 * i, 0.99))
    ),
    "last-layer": _last_layer,
}
ONE_OF_EACH = tuple(name for name in OPTIMIZERS if name not in ("sgd", "adam", "last-layer"))
"""Every class once, with all the state it can have."""


def sgd(model: nn.Module, name: str = "a", lr: float = 0.1, momentum: float = 0.0, **options: Any) -> Member:
    """The model under SGD."""
    return Member(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), name, **options)


def adam(model: nn.Module, name: str = "a", lr: float = 0.02, **options: Any) -> Member:
    """The model under Adam, which counts its steps."""
    return Member(model, torch.optim.Adam(model.parameters(), lr=lr), name, **options)


def sgd_member(i: int, name: str | None = None, **options: Any) -> Member:
    """Member ``i`` of the plainest kind: an MLP under SGD with momentum."""
    return sgd(mlp(i), name or f"m{i}", 0.1 / (i + 1), 0.9, **options)


def adam_member(i: int, name: str | None = None, **options: Any) -> Member:
    """Member ``i`` of another plain kind: an MLP under Adam."""
    return adam(mlp(i), name or f"m{i}", 0.02 * (i + 1), **options)


def dropout_member(i: int, name: str | None = None, **options: Any) -> Member:
    """Member ``i`` with running statistics and dropout, under Adam."""
    return adam(bn_mlp(i, dropout=0.4), name or f"m{i}", 0.02 * (i + 1), **options)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(
        o, [lambda count: 0.9**count, lambda count: 1.0 / (count + 1)][: len(o.param_groups)]
    ),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12),  # the momentum as well
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 7], 0.3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "none": lambda o: None,
}


def scheduled(
    member: Member, make: Callable[[Any], Any] = SCHEDULERS["step"], interval: str = "step", **settings: Any
) -> Member:
    """The member with a schedule of its optimizer."""
    member.scheduler, member.scheduler_interval = make(member.optimizer), interval
    for name, value in settings.items():
        setattr(member, name, value)
    return member


# ---- fleets of the registry's models -------------------------------------------------------------------

TOY = Device("toy", 1 << 30, 1 << 32, 8, 1e12, 1e12, 1e11, 1e10, 1e10)


def short_fleet(name: str = "mlp", num_members: int = 2, *, lr: float = 1e-3, **options: Any) -> Fleet:
    """Members of a workload under AdamW."""
    workload = SHORT[name]
    members = [member_of(workload, number, lr=lr) for number in range(num_members)]
    options = {"lowering": "aten", **options}
    return Fleet(members, workload.loss, workload.batch(0, torch.float32), **options)


# ---- plain torch ---------------------------------------------------------------------------------------


def train_alone(
    member: Member, batches: Iterable[Any], loss: Callable[..., Any] = mse, **options: Any
) -> list[float]:
    """Train the member's own objects as anyone would without a fleet; returns the losses."""
    results = train_member(member, batches, loss, **options).results
    return [value.item() for name, value in results.items() if name.startswith("loss ")]


def train(fleet: Fleet, batches: Iterable[Any]) -> None:
    """A step with each batch."""
    for batch in batches:
        fleet.step(batch)


# ---- comparing -----------------------------------------------------------------------------------------


def copies_of(tensor: Tensor) -> set[int]:
    """Memories in this process that hold as many numbers."""
    gc.collect()
    size = tensor.numel()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return {item.untyped_storage().data_ptr() for item in tensors if item.numel() == size}


def state_of(member: Member) -> dict[str, Tensor]:
    """Copies of everything a member's own objects hold: weights, buffers, optimizer state."""
    return snapshot(member.model, member.optimizer)


def states_of(fleet: Fleet) -> dict[str, dict[str, Tensor]]:
    """``state_of`` all members after a ``sync``."""
    fleet.sync()
    return {name: state_of(member) for name, member in zip(fleet.names, fleet.members, strict=True)}


def assert_same_states(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """States of several members, by name, are bitwise the same."""
    assert got.keys() == expected.keys()
    for name in expected:
        assert_same(got[name], expected[name])


def assert_same_fleets(one: Fleet, other: Fleet) -> None:
    """Two fleets are bitwise the same in all that a checkpoint has."""
    assert (one.names, one.num_steps, one.stopped()) == (other.names, other.num_steps, other.stopped())
    assert_same_states(states_of(one), states_of(other))
    for a, b in zip(one.members, other.members, strict=True):
        assert a.num_draws == b.num_draws
        assert a.scheduler is None or repr(a.scheduler.state_dict()) == repr(b.scheduler.state_dict())
        groups = [repr(member.optimizer.state_dict()["param_groups"]) for member in (a, b)]
        assert groups[0] == groups[1]


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], share: float = TOLERANCE) -> None:
    """Two states differ by no more than ``share`` of each tensor's largest value; counts are equal."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    errors = {}
    for name, want in expected.items():
        assert got[name].dtype == want.dtype, name
        is_count = name.endswith("/step") or not want.dtype.is_floating_point
        errors[name] = (distance(got[name], want), 0.0 if is_count else share)
    assert not {name: error for name, (error, allowed) in errors.items() if not error <= allowed}


def assert_alone(
    fleet: Fleet, *expected: tuple[Member, Iterable[Any]], loss: Callable[..., Any] = mse, **options: Any
) -> None:
    """Members of the fleet are as new ones of their names that plain torch trains on these batches."""
    states = states_of(fleet)
    for member, batches in expected:
        train_alone(member, batches, loss, **options)
        assert_close(states[member.name or ""], state_of(member))


def assert_trains_alone(
    fleet: Fleet, make: Callable[[int], Member], batches: Sequence[Any], loss: Callable[..., Any] = mse
) -> None:
    """Steps the fleet over ``batches`` and compares member ``i`` with ``make(i)`` trained by itself."""
    got = torch.stack([fleet.step(batch) for batch in batches])
    states = states_of(fleet)
    for i, name in enumerate(fleet.names):
        alone = make(i)
        losses = torch.tensor(train_alone(alone, batches, loss), dtype=torch.float64)
        torch.testing.assert_close(got[:, i], losses, rtol=TOLERANCE, atol=TOLERANCE)
        assert_close(states[name], state_of(alone))


# ---- what the fleet does behind the scenes -------------------------------------------------------------


def count_work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts ``traces`` and ``fusions``, which are expensive, from here on."""
    work: Counter[str] = Counter()

    def counted(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            work[kind] += 1
            return original(*args, **kwargs)

        return call

    for name in ("trace_joint", "trace_forward"):
        monkeypatch.setattr(traces_module, name, counted(getattr(traces_module, name), "traces"))
    monkeypatch.setattr(build_module, "fuse", counted(build_module.fuse, "fusions"))
    return work
