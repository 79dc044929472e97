"""Adagrad with a decaying learning rate. Its state exists from construction, filled with a chosen value."""

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
    descent_direction,
    quotient,
)

_SCALARS = (
    ScalarSpec("sign", 1.0),
    ScalarSpec("weight_decay", 0.0),
    ScalarSpec("eps", math.inf),
    ScalarSpec("zero", 0.0),
    ScalarSpec("step", -0.0),
)
_SETTINGS = (
    NumericSetting("lr"),
    NumericSetting("lr_decay"),
    NumericSetting("eps"),
    NumericSetting("weight_decay"),
    NumericSetting("initial_accumulator_value"),
)


@dataclass(frozen=True)
class AdagradRule(UpdateRule):
    kind: ClassVar[str] = "Adagrad"
    settings: ClassVar[tuple[NumericSetting, ...]] = _SETTINGS
    has_state_before_first_step: ClassVar[bool] = True

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def scalars(self) -> tuple[ScalarSpec, ...]:
        return _SCALARS

    def formula(self, numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        lr = numbers["lr"] / (1.0 + steps_done * numbers["lr_decay"])
        return numbers["sign"], numbers["weight_decay"], numbers["eps"], 0.0, -lr

    def update(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], at: ScalarAt, idle: frozenset[str]
    ) -> None:
        direction = descent_direction(param, grad, at, idle)
        accumulator = state["sum"].addcmul_(direction, direction)
        denominator = accumulator.sqrt().add_(at("eps"))
        param.addcmul_(quotient(at("zero"), direction, denominator), at("step"))

    def initial_value(self, name: str, defaults: Settings) -> float:
        # Torch takes this from the constructor for every group, also where a group names another value.
        return float(defaults["initial_accumulator_value"])


ADAGRAD = OptimizerFamily(torch.optim.Adagrad, AdagradRule)
