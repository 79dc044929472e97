"""RMSprop, plain or centered, with or without momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trainmux.fusion.optimizers._rule import (
    Number,
    Numbers,
    NumericSetting,
    OptimizerFamily,
    ScalarAt,
    ScalarSpec,
    Settings,
    UpdateRule,
    accumulate_square_,
    blend_,
    descent_direction,
    plus_product,
    quotient,
    unswitched_momentum,
)

_PLAIN = (
    ScalarSpec("sign", 1.0),
    ScalarSpec("weight_decay", 0.0),
    ScalarSpec("alpha", 1.0),
    ScalarSpec("one_minus_alpha", -0.0),
    ScalarSpec("eps", math.inf),
    ScalarSpec("zero", 0.0),
    ScalarSpec("step", -0.0),
)
_WITH_MOMENTUM = (*_PLAIN, ScalarSpec("momentum", 0.0), ScalarSpec("write", -0.0))
_SETTINGS = (
    NumericSetting("lr"),
    NumericSetting("alpha"),
    NumericSetting("eps"),
    NumericSetting("weight_decay"),
    NumericSetting("momentum"),
)


@dataclass(frozen=True)
class RmspropRule(UpdateRule):
    """A centered row whose ``square_avg`` is below ``grad_avg ** 2`` yields NaN, as it does in torch.

    That holds for a frozen row as well, but no state that an active step left finite is of this kind.
    """

    centered: bool
    momentum: bool

    kind: ClassVar[str] = "RMSprop"
    settings: ClassVar[tuple[NumericSetting, ...]] = _SETTINGS

    @property
    def state_names(self) -> tuple[str, ...]:
        names = ["square_avg"]
        if self.momentum:
            names.append("momentum_buffer")
        if self.centered:
            names.append("grad_avg")
        return tuple(names)

    @property
    def scalars(self) -> tuple[ScalarSpec, ...]:
        return _WITH_MOMENTUM if self.momentum else _PLAIN

    def formula(self, numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        sign, decay, alpha = numbers["sign"], numbers["weight_decay"], numbers["alpha"]
        momentum = unswitched_momentum(numbers, had_momentum=self.momentum)
        plain = (sign, decay, alpha, 1.0 - alpha, numbers["eps"], 0.0, -numbers["lr"])
        return (*plain, momentum, 1.0) if self.momentum else plain

    def update(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], at: ScalarAt, idle: frozenset[str]
    ) -> None:
        square_avg = state["square_avg"]
        direction = descent_direction(param, grad, at, idle)
        accumulate_square_(square_avg, direction, at("alpha"), at("one_minus_alpha"))
        if self.centered:
            grad_avg = state["grad_avg"]
            blend_(grad_avg, direction, at("one_minus_alpha"))
            denominator = torch.addcmul(square_avg, grad_avg, grad_avg, value=-1).sqrt_()
        else:
            denominator = square_avg.sqrt()
        denominator.add_(at("eps"))
        step = quotient(at("zero"), direction, denominator)
        if not self.momentum:
            param.addcmul_(step, at("step"))
            return
        # As in SGD: the new buffer is not computed in place, so that a frozen row steps by zero.
        buffer = state["momentum_buffer"]
        step = plus_product(step, buffer, at("momentum"), grad=grad)
        param.addcmul_(step, at("step"))
        blend_(buffer, step, at("write"))


def _read_flags(settings: Settings) -> dict[str, bool]:
    return {"centered": bool(settings["centered"]), "momentum": float(settings["momentum"]) > 0.0}


RMSPROP = OptimizerFamily(torch.optim.RMSprop, RmspropRule, _read_flags)
