"""Numbers out of a torch param group: which values a setting may take, and the reads that rules share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmux.errors import OptimizerError

Settings = Mapping[str, Any]
"""A torch param group: settings by name. A number may be a Python number or a tensor with one element."""


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


def sign_and_decay(settings: Settings) -> tuple[float, float]:
    """The scalars ``sign`` (-1 where the member maximizes) and ``weight_decay``."""
    return (-1.0 if settings["maximize"] else 1.0), float(settings["weight_decay"])


def unswitched_momentum(settings: Settings, *, had_momentum: bool) -> float:
    """The momentum. Refuses one that became zero, or stopped being zero, after the rule was chosen."""
    momentum = float(settings["momentum"])
    if (momentum != 0.0) is not had_momentum:
        expected = "above zero" if had_momentum else "zero"
        raise OptimizerError(
            f"expected momentum to stay {expected}, as it was when the optimizer was described, got "
            f"{momentum!r}: switching momentum on or off changes the update itself. Schedule it without "
            "crossing zero, or describe the optimizer again."
        )
    return momentum
