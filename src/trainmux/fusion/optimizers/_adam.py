"""Adam and AdamW: one rule, with the weight decay either in the gradient or applied to the parameter.

Torch divides ``sqrt(exp_avg_sq)`` by the root of the second bias correction, one pass over memory. Here
both sides of the fraction are multiplied by that root, which moves it into the scalars ``eps`` and ``step``.
"""

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
    power,
    quotient,
    root,
)

_MOMENTS = (
    ScalarSpec("one_minus_beta1", -0.0),
    ScalarSpec("beta2", 1.0),
    ScalarSpec("one_minus_beta2", -0.0),
    ScalarSpec("eps", math.inf),
    ScalarSpec("zero", 0.0),
    ScalarSpec("step", -0.0),
)
_COUPLED = (ScalarSpec("sign", 1.0), ScalarSpec("weight_decay", 0.0), *_MOMENTS)
_DECOUPLED = (ScalarSpec("sign", 1.0), ScalarSpec("shrink", 1.0), *_MOMENTS)
_DECAY_IS_ELSEWHERE = frozenset({"weight_decay"})
_SETTINGS = (
    NumericSetting("lr"),
    NumericSetting("betas", index=0, upper=1.0),
    NumericSetting("betas", index=1, upper=1.0),
    NumericSetting("eps"),
    NumericSetting("weight_decay"),
)


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    amsgrad: bool
    decoupled: bool

    kind: ClassVar[str] = "Adam"
    settings: ClassVar[tuple[NumericSetting, ...]] = _SETTINGS

    @property
    def state_names(self) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if self.amsgrad else names

    @property
    def scalars(self) -> tuple[ScalarSpec, ...]:
        return _DECOUPLED if self.decoupled else _COUPLED

    def formula(self, numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        lr, decay = numbers["lr"], numbers["weight_decay"]
        beta1, beta2 = numbers["betas[0]"], numbers["betas[1]"]
        step = steps_done + 1
        root_correction2 = root(1.0 - power(beta2, step))
        return (
            numbers["sign"],
            1.0 - lr * decay if self.decoupled else decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            numbers["eps"] * root_correction2,
            0.0,
            -(lr / (1.0 - power(beta1, step))) * root_correction2,
        )

    def update(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], at: ScalarAt, idle: frozenset[str]
    ) -> None:
        exp_avg, second_moment = state["exp_avg"], state["exp_avg_sq"]
        in_gradient = idle | _DECAY_IS_ELSEWHERE if self.decoupled else idle
        direction = descent_direction(param, grad, at, in_gradient)
        blend_(exp_avg, direction, at("one_minus_beta1"))
        accumulate_square_(second_moment, direction, at("beta2"), at("one_minus_beta2"))
        if self.amsgrad:
            second_moment = state["max_exp_avg_sq"].clamp_min_(second_moment)
        denominator = second_moment.sqrt().add_(at("eps"))
        # A frozen row divides by infinity, and the sum with zero drops the sign of what remains of exp_avg.
        step = quotient(at("zero"), exp_avg, denominator)
        if self.decoupled and "weight_decay" not in idle:
            param.mul_(at("shrink"))
        param.addcmul_(step, at("step"))


def _read_adam_flags(settings: Settings) -> dict[str, bool]:
    return {
        "amsgrad": bool(settings["amsgrad"]),
        "decoupled": bool(settings.get("decoupled_weight_decay", False)),
    }


def _read_adamw_flags(settings: Settings) -> dict[str, bool]:
    return {"amsgrad": bool(settings["amsgrad"]), "decoupled": True}


ADAM = OptimizerFamily(torch.optim.Adam, AdamRule, _read_adam_flags)
ADAMW = OptimizerFamily(torch.optim.AdamW, AdamRule, _read_adamw_flags)
