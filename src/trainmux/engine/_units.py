"""Parameters grouped into units whose updates are one region to lowering, and one or a few kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

SMALL = 1 << 14
"""Parameters of up to so many elements are updated together with others: a kernel each would mostly wait."""
MOST_TOGETHER = 24
"""The most parameters that make up one region."""


@dataclass(frozen=True)
class Unit:
    """Positions of parameters whose updates are one region."""

    number: int
    positions: tuple[int, ...]


def large_alone(tensors: Sequence[Tensor]) -> list[Unit]:
    """Give each large parameter a unit of its own, and put small ones together."""
    sizes = [math.prod(tensor.shape[1:]) for tensor in tensors]  # of one member
    small = [position for position, size in enumerate(sizes) if size <= SMALL]
    units = [Unit(position, (position,)) for position, size in enumerate(sizes) if size > SMALL]
    for first in range(0, len(small), MOST_TOGETHER):
        number = len(tensors) + first // MOST_TOGETHER
        units.append(Unit(number, tuple(small[first : first + MOST_TOGETHER])))
    return units
