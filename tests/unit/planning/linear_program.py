"""A linear or mixed integer program, written row by row and solved by SciPy's HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

Terms = Sequence[tuple[float, int]]
"""Coefficients and the variables that they belong to."""


@dataclass
class LinearProgram:
    """Variables from 0 up with their costs, and rows; the sum of costs is minimised."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)

    def number(self, upper: float = np.inf, cost: float = 0.0, is_integer: bool = False) -> int:
        self.costs.append(cost)
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.costs) - 1

    def choice(self, allowed: bool = True) -> int:
        return self.number(1.0 if allowed else 0.0, is_integer=True)

    def at_most(self, terms: Terms, limit: float, low: float = -np.inf) -> None:
        self.entries += [(len(self.lows), variable, coefficient) for coefficient, variable in terms]
        self.lows.append(low)
        self.highs.append(limit)

    def equal(self, terms: Terms, value: float) -> None:
        self.at_most(terms, value, low=value)

    def solve(self, seconds: float = 60.0, gap: float = 1e-6) -> tuple[np.ndarray, float] | None:
        """Values, and what the cost is proved not to be below; ``None`` where no values satisfy all rows."""
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self.lows), len(self.costs)))
        result = milp(
            np.array(self.costs),
            constraints=LinearConstraint(matrix, np.array(self.lows), np.array(self.highs)),
            integrality=np.array(self.is_integer, dtype=int),
            bounds=Bounds(0.0, np.array(self.upper)),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        if result.x is None:
            assert result.status == 2, result.message
            return None
        return result.x, float(result.mip_dual_bound if any(self.is_integer) else result.fun)
