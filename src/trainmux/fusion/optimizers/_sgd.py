"""Stochastic gradient descent, with momentum, dampening and Nesterov's look-ahead."""

from __future__ import annotations

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
    blend_,
    choose,
    descent_direction,
    plus_product,
    times,
    unswitched_momentum,
)

_GRADIENT = (ScalarSpec("sign", 1.0), ScalarSpec("weight_decay", 0.0))
_SETTINGS = (
    NumericSetting("lr"),
    NumericSetting("momentum"),
    NumericSetting("dampening"),
    NumericSetting("weight_decay"),
)
_STEP = (ScalarSpec("step", -0.0),)
_HEAVY_BALL = (ScalarSpec("keep", 0.0), ScalarSpec("gain", 1.0), ScalarSpec("write", -0.0))
_NESTEROV = (ScalarSpec("keep", 1.0), ScalarSpec("gain", -0.0), ScalarSpec("look_ahead", 0.0))


@dataclass(frozen=True)
class SgdRule(UpdateRule):
    """Torch starts the momentum buffer as a copy of the first direction, undampened: keep 0, gain 1."""

    momentum: bool
    nesterov: bool

    kind: ClassVar[str] = "SGD"
    settings: ClassVar[tuple[NumericSetting, ...]] = _SETTINGS
    counts_steps: ClassVar[bool] = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def scalars(self) -> tuple[ScalarSpec, ...]:
        if not self.momentum:
            return _GRADIENT + _STEP
        return _GRADIENT + (_NESTEROV if self.nesterov else _HEAVY_BALL) + _STEP

    def formula(self, numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        sign, decay, step = numbers["sign"], numbers["weight_decay"], -numbers["lr"]
        momentum = unswitched_momentum(numbers, had_momentum=self.momentum)
        if not self.momentum:
            return sign, decay, step
        first = steps_done == 0
        keep = choose(first, 0.0, momentum)
        gain = choose(first, 1.0, 1.0 - numbers["dampening"])
        return sign, decay, keep, gain, (momentum if self.nesterov else 1.0), step

    def update(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], at: ScalarAt, idle: frozenset[str]
    ) -> None:
        direction = descent_direction(param, grad, at, idle)
        if not self.momentum:
            param.addcmul_(direction, at("step"))
            return
        buffer = state["momentum_buffer"]
        if self.nesterov:
            buffer.mul_(at("keep")).addcmul_(direction, at("gain"))
            direction = plus_product(direction, buffer, at("look_ahead"), grad=grad)
            param.addcmul_(direction, at("step"))
            return
        # The new buffer is not computed in place. A frozen row thus has a direction of +0.0 to step
        # along, which the buffer itself, being state, could not be.
        if "dampening" not in idle:
            direction = times(direction, at("gain"), grad=grad)
        direction = plus_product(direction, buffer, at("keep"), grad=grad)
        param.addcmul_(direction, at("step"))
        blend_(buffer, direction, at("write"))


def _read_flags(settings: Settings) -> dict[str, bool]:
    momentum = float(settings["momentum"]) != 0.0
    # Torch looks at nesterov only where there is momentum.
    return {"momentum": momentum, "nesterov": momentum and bool(settings["nesterov"])}


SGD = OptimizerFamily(torch.optim.SGD, SgdRule, _read_flags)
