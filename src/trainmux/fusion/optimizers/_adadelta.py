"""Adadelta: the step length follows from the running averages of squared gradients and squared steps."""

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
    UpdateRule,
    accumulate_square_,
    descent_direction,
)

# eps is neutral at one and not at infinity: here it stands on both sides of a fraction.
_SCALARS = (
    ScalarSpec("sign", 1.0),
    ScalarSpec("weight_decay", 0.0),
    ScalarSpec("rho", 1.0),
    ScalarSpec("one_minus_rho", -0.0),
    ScalarSpec("eps", 1.0),
    ScalarSpec("step", -0.0),
)
_SETTINGS = (
    NumericSetting("lr"),
    NumericSetting("rho", upper=1.0, upper_included=True),
    NumericSetting("eps"),
    NumericSetting("weight_decay"),
)


@dataclass(frozen=True)
class AdadeltaRule(UpdateRule):
    kind: ClassVar[str] = "Adadelta"
    settings: ClassVar[tuple[NumericSetting, ...]] = _SETTINGS

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    @property
    def scalars(self) -> tuple[ScalarSpec, ...]:
        return _SCALARS

    def formula(self, numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        rho = numbers["rho"]
        return numbers["sign"], numbers["weight_decay"], rho, 1.0 - rho, numbers["eps"], -numbers["lr"]

    def update(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], at: ScalarAt, idle: frozenset[str]
    ) -> None:
        square_avg, acc_delta = state["square_avg"], state["acc_delta"]
        eps, rho, one_minus_rho = at("eps"), at("rho"), at("one_minus_rho")
        direction = descent_direction(param, grad, at, idle)
        accumulate_square_(square_avg, direction, rho, one_minus_rho)
        # Two roots and then the quotient, though the other order saves a pass: in half precision the
        # quotient of the squares leaves the range of the dtype where the quotient of the roots does not.
        root = torch.add(square_avg, eps).to(param.dtype).sqrt_()
        delta = torch.add(acc_delta, eps).to(param.dtype).sqrt_().div_(root).mul_(direction)
        accumulate_square_(acc_delta, delta, rho, one_minus_rho)
        param.addcmul_(delta, at("step"))


ADADELTA = OptimizerFamily(torch.optim.Adadelta, AdadeltaRule)
