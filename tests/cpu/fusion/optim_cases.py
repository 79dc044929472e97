"""Cases and a small stacked trainer that the optimizer contract tests share."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainmux.fusion import optimizers as optim

SHAPES = ((3, 5), (7,), ())
NUM_MEMBERS = 3


@dataclass(frozen=True)
class Case:
    """One optimizer class with one choice of its switches, and settings that differ between members."""

    name: str
    torch_class: type[torch.optim.Optimizer]
    switches: dict[str, Any] = field(default_factory=dict)
    settings: tuple[dict[str, Any], ...] = ({}, {}, {})


def _with(settings: tuple[dict[str, Any], ...], **columns: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """The members' settings with others beside them or in their place."""
    rows = zip(*columns.values(), strict=True)
    return tuple(
        {**own, **dict(zip(columns, row, strict=True))} for own, row in zip(settings, rows, strict=True)
    )


_SGD = (
    {"lr": 0.1, "weight_decay": 0.0},
    {"lr": 0.02, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.0, "weight_decay": 0.01},
)
_MOMENTUM = _with(_SGD, momentum=(0.9, 0.5, 1.1), dampening=(0.0, 0.3, 1.2))
_NESTEROV = _with(_MOMENTUM, dampening=(0.0, 0.0, 0.0))
_ADAM = (
    {"lr": 0.01, "weight_decay": 0.0},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.0, "betas": (0.0, 0.0), "weight_decay": 0.01},
)
_RMSPROP = (
    {"lr": 0.01},
    {"lr": 0.1, "alpha": 0.5, "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.02, "alpha": 0.0, "weight_decay": 0.01, "eps": 1e-2},
)
_RMSPROP_MOMENTUM = _with(_RMSPROP, momentum=(0.9, 0.5, 0.1))
# A centered average of one sample is zero up to rounding, so alpha stays away from zero there.
_CENTERED = _with(_RMSPROP, alpha=(0.99, 0.5, 0.8))
_CENTERED_MOMENTUM = _with(_CENTERED, momentum=(0.9, 0.5, 0.1))
_ADAGRAD = (
    {"lr": 0.1},
    {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True, "initial_accumulator_value": 0.5},
    {"lr": 0.0, "lr_decay": 0.01, "eps": 1e-3, "initial_accumulator_value": 2.0},
)
_ADADELTA = (
    {"lr": 1.0},
    {"lr": 0.1, "rho": 0.5, "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.5, "rho": 1.0, "weight_decay": 0.01},
)

CASES = (
    Case("sgd", torch.optim.SGD, {}, _SGD),
    Case("sgd-momentum", torch.optim.SGD, {}, _MOMENTUM),
    Case("sgd-nesterov", torch.optim.SGD, {"nesterov": True}, _NESTEROV),
    Case("adam", torch.optim.Adam, {}, _ADAM),
    Case("adam-amsgrad", torch.optim.Adam, {"amsgrad": True}, _ADAM),
    Case("adam-decoupled", torch.optim.Adam, {"decoupled_weight_decay": True}, _ADAM),
    Case("adamw", torch.optim.AdamW, {}, _ADAM),
    Case("adamw-amsgrad", torch.optim.AdamW, {"amsgrad": True}, _ADAM),
    Case("rmsprop", torch.optim.RMSprop, {}, _RMSPROP),
    Case("rmsprop-momentum", torch.optim.RMSprop, {}, _RMSPROP_MOMENTUM),
    Case("rmsprop-centered", torch.optim.RMSprop, {"centered": True}, _CENTERED),
    Case("rmsprop-centered-momentum", torch.optim.RMSprop, {"centered": True}, _CENTERED_MOMENTUM),
    Case("adagrad", torch.optim.Adagrad, {}, _ADAGRAD),
    Case("adadelta", torch.optim.Adadelta, {}, _ADADELTA),
)


@dataclass(frozen=True)
class Member:
    """Parameters in two param groups, the second with a learning rate of its own."""

    params: list[Tensor]
    optimizer: torch.optim.Optimizer

    def step(self, grads: Sequence[Tensor]) -> None:
        """In plain torch."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        self.optimizer.step()

    @property
    def state(self) -> list[dict[str, Tensor]]:
        return [self.optimizer.state.get(param, {}) for param in self.params]


def _drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in SHAPES]


def grads_of(step: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """By member."""
    return [_drawn(1000 + 10 * step + number, dtype) for number in range(NUM_MEMBERS)]


def members_of(case: Case, dtype: torch.dtype = torch.float64, **extra: Any) -> list[Member]:
    members = []
    for number, own in enumerate(case.settings):
        settings = {**case.switches, **own, **extra}
        params = _drawn(number, dtype)
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5 * settings["lr"]}]
        members.append(Member(params, case.torch_class(groups, foreach=False, **settings)))
    return members


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Moves every setting that people schedule, and the weight decay to zero and back."""
    for group in optimizer.param_groups:
        base = group.setdefault("base", {name: value for name, value in group.items() if name != "params"})
        wave = 0.9 + 0.1 * math.cos(step)
        group["lr"] = base["lr"] * (1.0 + 0.5 * math.sin(step))
        group["weight_decay"] = 0.0 if step % 7 == 3 else base["weight_decay"]
        if base.get("momentum"):
            group["momentum"] = base["momentum"] * wave
        if "betas" in base:
            group["betas"] = (base["betas"][0] * wave, base["betas"][1])


def write_state(optimizer: torch.optim.Optimizer, number: int, param: Any, rows: Any, steps: int) -> None:
    """What a fleet does on export, one tensor after another."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    group = optim.describe(optimizer, params, member="m").groups[number]
    for fresh, value in optim.write_state(optimizer, number, group, param, rows, steps):
        fresh.copy_(value)


class Fleet:
    """Members stacked and stepped through the public functions, rows padded in memory."""

    def __init__(self, members: Sequence[Member], *, use_idle: bool = False) -> None:
        self.members, self.use_idle = members, use_idle
        (self.structure,) = {optim.describe(each.optimizer, each.params, member="m") for each in members}
        used = range(len(SHAPES))
        self.steps = [
            list(optim.read_steps(each.optimizer, self.structure, each.params, used)) for each in members
        ]
        self.stacked = [_stack_padded(column) for column in zip(*(m.params for m in members), strict=True)]
        self.state: dict[int, dict[str, Tensor]] = {}
        for number, group in enumerate(self.structure.groups):
            for index in group.params:
                like = members[0].params[index]
                rows = [optim.read_state(m.optimizer, number, group, m.params[index])[0] for m in members]
                self.state[index] = {
                    name: _stack_padded([torch.as_tensor(row[name]).to(like).expand_as(like) for row in rows])
                    for name in (entry.name for entry in optim.state_entries(group, members[0].params[index]))
                }

    def scalars(self, number: int, frozen: Collection[int] = ()) -> dict[str, Tensor]:
        group = self.structure.groups[number]
        neutral = optim.rule_of(group).scalars
        rows = [
            tuple(neutral.values())
            if i in frozen
            else optim.scalar_values(group, each.optimizer.param_groups[number], self.steps[i][number])
            for i, each in enumerate(self.members)
        ]
        dtype = optim.scalar_dtype(self.stacked[0].dtype)
        columns = zip(neutral, zip(*rows, strict=True), strict=True)
        return {name: torch.tensor(column, dtype=dtype) for name, column in columns}

    def idle(self, number: int) -> frozenset[str]:
        groups = [each.optimizer.param_groups[number] for each in self.members]
        return frozenset.intersection(*map(optim.idle_settings, groups)) if self.use_idle else frozenset()

    def step(self, grads: Sequence[Sequence[Tensor]], frozen: Collection[int] = ()) -> None:
        for number, group in enumerate(self.structure.groups):
            scalars, idle = self.scalars(number, frozen), self.idle(number)
            for index in group.params:
                rows = [torch.zeros_like(g[index]) if i in frozen else g[index] for i, g in enumerate(grads)]
                grad = torch.stack(rows)
                before = grad.clone()
                optim.apply_update(group, self.stacked[index], grad, self.state[index], scalars, idle=idle)
                assert bits_equal(grad, before)
            for i, steps in enumerate(self.steps):
                steps[number] += i not in frozen

    def unload(self) -> None:
        """Writes parameters and state back into the members."""
        for number, group in enumerate(self.structure.groups):
            for index in group.params:
                for i, each in enumerate(self.members):
                    each.params[index].copy_(self.stacked[index][i])
                    rows = {name: tensor[i] for name, tensor in self.state[index].items()}
                    write_state(each.optimizer, number, each.params[index], rows, self.steps[i][number])


def _stack_padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of one tensor with gaps between them; the gaps hold NaN, which must never spread."""
    shape, size = rows[0].shape, rows[0].numel()
    storage = torch.full((len(rows), size + 3), math.nan, dtype=rows[0].dtype)
    stacked = storage[:, :size].unflatten(1, shape) if shape else storage[:, 0]
    return stacked.copy_(torch.stack(list(rows)))


def bits_equal(left: Tensor, right: Tensor) -> bool:
    """Equality that tells the two zeros apart."""
    return torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )
