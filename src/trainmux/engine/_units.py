"""Parameters grouped into units whose updates are one region to lowering, and one or a few kernels."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

SMALL = 1 << 14
"""Parameters of up to so many elements are updated together with others: a kernel each would mostly wait."""
MOST_TOGETHER = 24
"""So many parameters are one region."""
MAX_BUCKET = 1 << 24
"""Elements of all members in one bucket: AdamW in fp32 moves 28 bytes for each, 0.1 ms on an H200."""


@dataclass(frozen=True)
class Unit:
    """Positions of parameters whose updates are one region. ``is_bucket``: and as few kernels as can be."""

    number: int
    positions: tuple[int, ...]
    is_bucket: bool = False


def large_alone(tensors: Sequence[Tensor]) -> list[Unit]:
    """Large ones by themselves, then the small ones many together."""
    large, small = _by_size(tensors)
    together = _filled(small, _member_sizes(tensors), math.inf)
    return _numbered(large, together, len(tensors))


def as_ready(tensors: Sequence[Tensor], ready: Sequence[int]) -> list[Unit]:
    """Units in the order in which they can be updated; ``ready`` gives the place of each parameter.

    Small ones are together with their neighbours in that order, and only while all of them are no more than a
    large one: what waits for the others takes memory.
    """
    large, small = _by_size(tensors)
    together = _filled(sorted(small, key=ready.__getitem__), _member_sizes(tensors), SMALL)
    units = _numbered(large, together, len(tensors))
    return sorted(units, key=lambda unit: max(ready[position] for position in unit.positions))


def _numbered(large: Sequence[int], together: Iterable[tuple[int, ...]], first: int) -> list[Unit]:
    """A unit for each large one, with its number, and for those together, numbered from ``first`` on."""
    units = [Unit(position, (position,)) for position in large]
    return units + [Unit(first + number, positions) for number, positions in enumerate(together)]


def buckets(tensors: Sequence[Tensor], kinds: Sequence[Hashable | None]) -> list[Unit]:
    """Parameters of one kind in buckets, those of one size next to each other; ``None`` is by itself.

    Buckets of equal parameters are alike, and like regions are compiled once.
    """
    by_kind: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        by_kind.setdefault(("alone", position) if kind is None else ("kind", kind), []).append(position)
    sizes = [tensor.numel() for tensor in tensors]
    found = [
        positions
        for of_kind in by_kind.values()
        for positions in _filled(
            sorted(of_kind, key=lambda p: (-sizes[p], tuple(tensors[p].shape), p)), sizes, MAX_BUCKET
        )
    ]
    return [Unit(number, positions, len(positions) > 1) for number, positions in enumerate(found)]


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The positions of large ones, and of small ones."""
    large: list[int] = []
    small: list[int] = []
    for position, size in enumerate(_member_sizes(tensors)):
        (small if size <= SMALL else large).append(position)
    return large, small


def _member_sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Elements of one member in each."""
    return [math.prod(tensor.shape[1:]) for tensor in tensors]


def _filled(positions: Sequence[int], sizes: Sequence[int], limit: float) -> Iterator[tuple[int, ...]]:
    """Positions in their order, many together, with at most ``limit`` elements where there are several."""
    together: list[int] = []
    for position in positions:
        total = sizes[position] + sum(sizes[other] for other in together)
        if together and (len(together) == MOST_TOGETHER or total > limit):
            yield tuple(together)
            together = []
        together.append(position)
    if together:
        yield tuple(together)
