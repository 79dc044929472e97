"""The contract of an update rule, and the pieces that rules are made of.

A rule rewrites one optimizer's update as operations on stacked tensors of shape ``[k, *shape]``, where all
that differs between members comes in as scalars of shape ``[k]``. Every scalar has a *neutral* value. A row
that is fed neutral scalars and a gradient of +0.0 must keep its parameter and its state bit for bit, because
this is how a member is frozen while its neighbours train on. Three facts of IEEE arithmetic carry that:

* ``x * 1.0 == x`` and ``x + -0.0 == x`` hold for every finite x and both signs of zero, whereas
  ``-0.0 + 0.0`` is ``+0.0``. So what a frozen row adds must be -0.0: factors that are neutral at zero are
  neutral at **-0.0**, and meet an operand that is +0.0.
* ``0.0 + (-0.0)`` is ``+0.0``: a sum that starts from +0.0 forgets the sign of whatever else is zero in it.
  This turns a product with arbitrary state into the +0.0 that the first fact asks for.
* ``lerp(x, y, -0.0)`` is x when y is zero, also for x = -0.0, because there ``y - x`` is +0.0.

A frozen row whose gradient is -0.0 instead of +0.0 keeps all its values, but entries that are -0.0 may turn
into +0.0. ``torch.where`` and ``masked_fill`` yield the +0.0 that is asked for.

Numbers: a rule's formula is written once, for numbers that are floats (the same for all members) or arrays
(an entry per member). Both give the same bits: numpy rounds sums, products, quotients and roots as Python
does. Powers it does not, so those are always Python's.

Half precision: such parameters come with float32 scalars, since a coefficient like 0.999 is 1.0 in bfloat16.
Torch's own optimizers do the same: a Python number meets half precision tensors in float32 arithmetic, and
only the result of each operation is rounded. The functions on tensors here keep to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainmux.errors import OptimizerError

Settings = Mapping[str, Any]
"""A torch param group: settings by name. A number may be a Python number or a tensor with one element."""

Number = Any
"""A float for all members, or an array of float64 with an entry for each."""

Numbers = Mapping[str, Number]
"""The settings that a rule reads, by label, and ``sign``: -1 where the member maximizes, else 1."""


@dataclass(frozen=True)
class NumericSetting:
    """A numeric hyper-parameter and the values it may take: from zero up to ``upper``, all if ``signed``.

    ``index`` picks one entry of a setting that is a tuple, such as Adam's ``betas``.
    """

    name: str
    index: int | None = None
    upper: float = math.inf
    upper_included: bool = False
    signed: bool = False

    @property
    def label(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.signed:
            return "a finite number"
        if math.isinf(self.upper):
            return "a finite number that is not negative"
        return f"a number in [0, {self.upper:g}{']' if self.upper_included else ')'}"

    def read(self, settings: Settings) -> Any:
        value = settings[self.name]
        return value if self.index is None else value[self.index]

    def allows(self, value: float) -> bool:
        if not math.isfinite(value) or (value < 0.0 and not self.signed):
            return False
        return value <= self.upper if self.upper_included else value < self.upper


ScalarAt = Callable[[str], Tensor]
"""Looks up a per-member scalar by name, shaped so that it broadcasts over a stacked parameter."""


@dataclass(frozen=True)
class UpdateRule:
    """The update of one optimizer with its flags decided."""

    settings: tuple[NumericSetting, ...]
    """The numbers that ``formula`` reads, besides ``maximize``."""

    state_names: tuple[str, ...]
    """Names of the state tensors, as torch spells and orders them, without ``step``."""

    scalars: Mapping[str, float]
    """The per-member scalars that ``update`` may look up, in the order in which ``formula`` returns them, and
    for each the value that makes the update a no-op."""

    formula: Callable[[Numbers, Number], tuple[Number, ...]]
    """``(numbers, steps_done)`` to the scalars of the update number ``steps_done + 1``.

    ``numbers`` has ``settings`` by label, and ``sign``. Where the update is undefined, floats raise as Python
    does, and arrays as ``numpy.errstate`` has it.
    """

    update: Callable[[Tensor, Tensor, Mapping[str, Tensor], ScalarAt, frozenset[str]], None]
    """``(param, grad, state, at, idle)``: changes ``param`` and ``state`` in place, and not ``grad``.

    ``idle`` names settings that have no effect for any member; what only they need may be skipped.
    """

    counts_steps: bool = True
    """Whether torch keeps a ``step`` besides the state tensors."""

    initial_setting: str | None = None
    """A constructor's setting that fills the state as the optimizer is made; without one, state starts from
    zeros at the first step."""


@dataclass(frozen=True)
class OptimizerFamily:
    """A supported torch class, the name of its rule, and how to read its flags off a torch param group.

    ``make_rule`` takes the flags by name; classes with one ``kind`` share it.
    """

    torch_class: type[torch.optim.Optimizer]
    kind: str
    settings: tuple[NumericSetting, ...]
    make_rule: Callable[..., UpdateRule]
    read_flags: Callable[[Settings], dict[str, bool]] = lambda settings: {}


# ---- numbers on the host -----------------------------------------------------------------------------------


def power(base: Number, exponent: Number) -> Number:
    """``base ** exponent`` by Python's own power."""
    if isinstance(base, np.ndarray) or isinstance(exponent, np.ndarray):
        bases, exponents = np.broadcast_arrays(base, exponent)
        return np.array([b**e for b, e in zip(bases.tolist(), exponents.tolist(), strict=True)])
    return base**exponent


def root(value: Number) -> Number:
    """The square root."""
    return np.sqrt(value) if isinstance(value, np.ndarray) else math.sqrt(value)


def choose(condition: Any, then: Number, otherwise: Number) -> Number:
    """``then`` where ``condition`` holds, else ``otherwise``."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, then, otherwise)
    return then if condition else otherwise


def unswitched_momentum(numbers: Numbers, *, had_momentum: bool) -> Number:
    """The momentum. Refuses one that became zero, or stopped being zero, after the rule was chosen."""
    momentum = numbers["momentum"]
    switched = (momentum != 0.0) != had_momentum
    if switched.any() if isinstance(switched, np.ndarray) else switched:
        expected = "above zero" if had_momentum else "zero"
        raise OptimizerError(
            f"expected momentum to stay {expected}, as it was when the optimizer was described, got "
            f"{momentum!r}: switching momentum on or off changes the update itself. Schedule it without "
            "crossing zero, or describe the optimizer again."
        )
    return momentum


def scalar_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scalars are fed: the parameter's, but float32 for half precision parameters."""
    return torch.float32 if param_dtype in (torch.float16, torch.bfloat16) else param_dtype


# ---- operations on stacked tensors -------------------------------------------------------------------------


def descent_direction(param: Tensor, grad: Tensor, at: ScalarAt, idle: frozenset[str]) -> Tensor:
    """``sign * grad + weight_decay * param``; this is ``grad`` itself when both settings are idle."""
    direction = grad
    if "maximize" not in idle:
        direction = torch.mul(grad, at("sign")).to(grad.dtype)
    if "weight_decay" not in idle:
        direction = plus_product(direction, param, at("weight_decay"), grad=grad)
    return direction


def plus_product(base: Tensor, tensor: Tensor, factor: Tensor, *, grad: Tensor) -> Tensor:
    """``base + tensor * factor``, in the memory of ``base`` unless that is the caller's gradient."""
    if base is grad:
        return torch.addcmul(base, tensor, factor).to(base.dtype)
    return base.addcmul_(tensor, factor)


def times(base: Tensor, factor: Tensor, *, grad: Tensor) -> Tensor:
    """``base * factor``, in the memory of ``base`` unless that is the caller's gradient."""
    if base is grad:
        return torch.mul(base, factor).to(base.dtype)
    return base.mul_(factor)


def blend_(state: Tensor, target: Tensor, weight: Tensor) -> None:
    """Moves ``state`` towards ``target``: weight 0 keeps it, weight 1 replaces it."""
    if state.dtype == weight.dtype:
        state.lerp_(target, weight)
    else:
        # lerp wants one dtype throughout.
        wide = weight.dtype
        state.copy_(torch.lerp(state.to(wide), target.to(wide), weight))


def accumulate_square_(state: Tensor, tensor: Tensor, keep: Tensor, gain: Tensor) -> None:
    """``state = keep * state + gain * tensor ** 2``.

    Not written as a lerp with weight ``gain``: 1 - 0.999 and 0.001 differ in float32 by 1e-5 of their
    value, and a running average turns that into a drift away from torch.
    """
    state.mul_(keep).addcmul_(tensor, torch.mul(tensor, gain))


def quotient(zero: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """``zero + numerator / denominator`` in the memory of ``denominator`` where the dtypes allow it.

    Fresh memory costs a CPU more than the division does.
    """
    if denominator.dtype == zero.dtype:
        return torch.addcdiv(zero, numerator, denominator, out=denominator)
    return torch.addcdiv(zero, numerator, denominator)
