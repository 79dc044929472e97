"""Numbers out of a torch param group: which values a setting may take, and what rules compute with them.

A rule's formula is written once, for numbers that are floats (the same for all members) or arrays (an entry
per member). Both give the same bits: numpy rounds sums, products, quotients and roots as Python does. Powers
it does not, so those are always Python's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainmux.errors import OptimizerError

Settings = Mapping[str, Any]
"""A torch param group: settings by name. A number may be a Python number or a tensor with one element."""

Number = Any
"""A float for all members, or an array of float64 with an entry for each."""

Numbers = Mapping[str, Number]
"""The settings that a rule reads, by label, and ``sign``: -1 where the member maximizes, else 1."""


@dataclass(frozen=True)
class Setting:
    """A numeric hyper-parameter and the values it may take: from zero up to ``upper``.

    ``index`` picks one entry of a setting that is a tuple, such as Adam's ``betas``.
    """

    name: str
    index: int | None = None
    upper: float = math.inf
    upper_included: bool = False

    @property
    def label(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if math.isinf(self.upper):
            return "a finite number that is not negative"
        return f"a number in [0, {self.upper:g}{']' if self.upper_included else ')'}"

    def read(self, settings: Settings) -> Any:
        value = settings[self.name]
        return value if self.index is None else value[self.index]

    def allows(self, value: float) -> bool:
        if not math.isfinite(value) or value < 0.0:
            return False
        return value <= self.upper if self.upper_included else value < self.upper


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
