"""Cases and a small stacked trainer that the optimizer contract tests share."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainmux.fusion import optimizers as optim

SHAPES = ((3, 5), (7,), ())
NUM_MEMBERS = 3


def write_state(optimizer: torch.optim.Optimizer, number: int, param: Any, rows: Any, steps: int) -> None:
    """What a fleet does on export, one tensor after another."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    group = optim.describe(optimizer, params, member="m").groups[number]
    for fresh, value in optim.write_state(optimizer, number, group, param, rows, steps):
        fresh.copy_(value)


@dataclass(frozen=True)
class Case:
    """One optimizer class with one choice of its switches, and settings that differ between members."""

    name: str
    torch_class: type[torch.optim.Optimizer]
    switches: dict[str, Any] = field(default_factory=dict)
    members: tuple[dict[str, Any], ...] = ({}, {}, {})

    def build(self, member: int, params: Sequence[Tensor], **extra: Any) -> torch.optim.Optimizer:
        """Two param groups, the second with a learning rate of its own."""
        settings = {**self.switches, **self.members[member], **extra}
        second = {"params": list(params[1:]), "lr": 0.5 * settings["lr"]}
        return self.torch_class([{"params": [params[0]]}, second], foreach=False, **settings)


_SGD = (
    {"lr": 0.1, "weight_decay": 0.0},
    {"lr": 0.02, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.0, "weight_decay": 0.01},
)
_MOMENTUM = (
    {**_SGD[0], "momentum": 0.9, "dampening": 0.0},
    {**_SGD[1], "momentum": 0.5, "dampening": 0.3},
    {**_SGD[2], "momentum": 1.1, "dampening": 1.2},
)
_NESTEROV = tuple({**m, "dampening": 0.0} for m in _MOMENTUM)
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
_RMSPROP_MOMENTUM = tuple(
    {**m, "momentum": momentum} for m, momentum in zip(_RMSPROP, (0.9, 0.5, 0.1), strict=True)
)
# A centered average of one sample is zero up to rounding, so alpha stays away from zero there.
_CENTERED = tuple({**m, "alpha": alpha} for m, alpha in zip(_RMSPROP, (0.99, 0.5, 0.8), strict=True))
_CENTERED_MOMENTUM = tuple(
    {**m, "momentum": momentum} for m, momentum in zip(_CENTERED, (0.9, 0.5, 0.1), strict=True)
)
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


def random_params(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in SHAPES]


def random_grads(step: int, member: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return random_params(1000 + 10 * step + member, dtype)


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Moves every setting that people schedule, and the weight decay to zero and back."""
    for group in optimizer.param_groups:
        base = group.setdefault("base", copy.copy({k: v for k, v in group.items() if k != "params"}))
        wave = 1.0 + 0.5 * math.sin(step)
        group["lr"] = base["lr"] * wave
        group["weight_decay"] = 0.0 if step % 7 == 3 else base["weight_decay"]
        if base.get("momentum"):
            group["momentum"] = base["momentum"] * (0.9 + 0.1 * math.cos(step))
        if "betas" in base:
            group["betas"] = (base["betas"][0] * (0.9 + 0.1 * math.cos(step)), base["betas"][1])


class Fleet:
    """Members stacked and stepped through the public functions, rows padded in memory."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        params: Sequence[Sequence[Tensor]],
        *,
        use_idle: bool = False,
    ) -> None:
        self.optimizers = optimizers
        self.params = params
        self.use_idle = use_idle
        structures = [
            optim.describe(o, p, member=str(i))
            for i, (o, p) in enumerate(zip(optimizers, params, strict=True))
        ]
        assert len(set(structures)) == 1
        self.structure = structures[0]
        used = range(len(params[0]))
        self.steps = [
            list(optim.read_steps(o, self.structure, p, used))
            for o, p in zip(optimizers, params, strict=True)
        ]
        self.stacked = [stack_padded(list(column)) for column in zip(*params, strict=True)]
        self.state: dict[int, dict[str, Tensor]] = {}
        for number, group in enumerate(self.structure.groups):
            for index in group.params:
                rows = [
                    optim.read_state(o, number, p[index])[0] for o, p in zip(optimizers, params, strict=True)
                ]
                self.state[index] = {
                    name: stack_padded(
                        [
                            row[name]
                            if isinstance(row[name], Tensor)
                            else torch.full_like(self.stacked[index][i], row[name])
                            for i, row in enumerate(rows)
                        ]
                    )
                    for name in optim.state_names(group)
                }

    def scalars(self, number: int, frozen: Collection[int] = ()) -> dict[str, Tensor]:
        group = self.structure.groups[number]
        specs = optim.scalar_specs(group)
        neutral = tuple(spec.neutral for spec in specs)
        rows = [
            neutral
            if i in frozen
            else optim.scalar_values(group, o.param_groups[number], self.steps[i][number])
            for i, o in enumerate(self.optimizers)
        ]
        dtype, device = optim.scalar_dtype(self.stacked[0].dtype), self.stacked[0].device
        return {
            spec.name: torch.tensor(column, dtype=dtype, device=device)
            for spec, column in zip(specs, zip(*rows, strict=True), strict=True)
        }

    def idle(self, number: int) -> frozenset[str]:
        if not self.use_idle:
            return frozenset()
        return frozenset.intersection(*(optim.idle_settings(o.param_groups[number]) for o in self.optimizers))

    def step(self, grads: Sequence[Sequence[Tensor]], frozen: Collection[int] = ()) -> None:
        for number, group in enumerate(self.structure.groups):
            scalars = self.scalars(number, frozen)
            for index in group.params:
                rows = [torch.zeros_like(g[index]) if i in frozen else g[index] for i, g in enumerate(grads)]
                grad = torch.stack(rows)
                before = grad.clone()
                optim.apply_update(
                    group,
                    self.stacked[index],
                    grad,
                    self.state[index],
                    scalars,
                    idle=self.idle(number),
                )
                assert bits_equal(grad, before)
            for i, steps in enumerate(self.steps):
                steps[number] += i not in frozen

    def unload(self) -> None:
        """Writes parameters and state back into the members."""
        for number, group in enumerate(self.structure.groups):
            for index in group.params:
                for i, (optimizer, params) in enumerate(zip(self.optimizers, self.params, strict=True)):
                    params[index].copy_(self.stacked[index][i])
                    rows = {name: tensor[i] for name, tensor in self.state[index].items()}
                    write_state(optimizer, number, params[index], rows, self.steps[i][number])


def stack_padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of one tensor with gaps between them; the gaps hold NaN, which must never spread."""
    shape, size = rows[0].shape, rows[0].numel()
    storage = torch.full((len(rows), size + 3), math.nan, dtype=rows[0].dtype, device=rows[0].device)
    stacked = storage[:, :size].unflatten(1, shape) if shape else storage[:, 0]
    for target, row in zip(stacked, rows, strict=True):
        target.copy_(row)
    return stacked


def plain_step(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def bits_equal(left: Tensor, right: Tensor) -> bool:
    """Equality that tells the two zeros apart."""
    integer = _INTEGERS[left.element_size()]
    return torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))
