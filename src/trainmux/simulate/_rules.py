"""The sizes and choices that PyTorch's CUDA caching allocator works by.

Sources, torch 2.11, 2.12 and 2.13: the constants ``kMinBlockSize``, ``kSmallSize``, ``kSmallBuffer``,
``kMinLargeAlloc`` and ``kRoundLarge`` and the settings of ``AcceleratorAllocatorConfig`` are in
``c10/core/AllocatorConfig.h``; ``round_size``, ``get_allocation_size``, ``get_free_block``, ``should_split``
and the block comparators are in ``c10/cuda/CUDACachingAllocator.cpp``. The sizes and the splitting rule are
the same in the three versions, the order among free blocks of equal size is not (`TieBreak`): that was read
off the comparators in the released ``libc10_cuda.so`` of each.

Left out, because they are off by default: expandable segments, garbage collection, rounding to divisions of
a power of two, pools that never split, and what happens when the device is full.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from trainmux.errors import ConfigError

MIB = 1024 * 1024


class TieBreak(Enum):
    """Which of several free blocks of the same stream and size is taken."""

    ADDRESS = "address"
    """The one at the lowest address: torch 2.11 (``BlockComparatorSize``)."""

    BLOCK = "block"
    """The one whose record was made first: torch 2.12 (``BlockComparatorRegistrationCounter``). A split makes
    a new record for the part handed out and leaves the old one to the remainder; a merge keeps the record of
    the block being freed."""

    SEGMENT = "segment"
    """The one in the oldest segment, then at the lowest offset: torch 2.13
    (``BlockComparatorSizeCounterAddress``)."""


@dataclass(frozen=True)
class AllocatorRules:
    """The allocator's sizes; the defaults are those of torch without any setting.

    Refused with `ConfigError`: sizes that are not positive multiples of ``min_block_bytes``, segments too
    small for the requests they serve, and a ``max_split_bytes`` that would stop small requests from sharing
    a segment.
    """

    min_block_bytes: int = 512
    """Every request is rounded up to a multiple of this."""
    max_small_bytes: int = 1 * MIB
    """Requests up to this size are small; small and large ones never share a segment."""
    small_segment_bytes: int = 2 * MIB
    """What a small request reserves when no free block fits."""
    large_segment_bytes: int = 20 * MIB
    """What a large request below ``own_segment_from_bytes`` reserves (setting ``large_segment_size_mb``)."""
    own_segment_from_bytes: int = 10 * MIB
    """From here on a request reserves its own size, rounded up to ``segment_round_bytes``."""
    segment_round_bytes: int = 2 * MIB
    max_split_bytes: int | None = None
    """Blocks of this size and more are not split, nor given to smaller requests (setting
    ``max_split_size_mb``); ``None``: no limit."""
    max_unsplit_excess_bytes: int = 20 * MIB
    """By how much an unsplit block may exceed its request (setting ``max_non_split_rounding_mb``); matters
    only with ``max_split_bytes``."""
    tie_break: TieBreak = TieBreak.SEGMENT

    def __post_init__(self) -> None:
        unit = self.min_block_bytes
        sizes = {
            "min_block_bytes": unit,
            "max_small_bytes": self.max_small_bytes,
            "small_segment_bytes": self.small_segment_bytes,
            "large_segment_bytes": self.large_segment_bytes,
            "own_segment_from_bytes": self.own_segment_from_bytes,
            "segment_round_bytes": self.segment_round_bytes,
        }
        for name, size in sizes.items():
            if size <= 0 or size % unit:
                raise ConfigError(
                    f"{name} must be a positive multiple of min_block_bytes ({unit}), but got {size}; "
                    "leave it at its default unless torch was told otherwise"
                )
        if self.small_segment_bytes < self.max_small_bytes:
            raise ConfigError(
                f"small_segment_bytes must hold a request of max_small_bytes ({self.max_small_bytes}), "
                f"but got {self.small_segment_bytes}; use at least {self.max_small_bytes}"
            )
        if self.large_segment_bytes < self.own_segment_from_bytes:
            raise ConfigError(
                "large_segment_bytes must hold any request below own_segment_from_bytes "
                f"({self.own_segment_from_bytes}), but got {self.large_segment_bytes}; "
                f"use at least {self.own_segment_from_bytes}"
            )
        if self.max_split_bytes is not None and self.max_split_bytes <= self.large_segment_bytes:
            raise ConfigError(
                f"max_split_bytes must exceed large_segment_bytes ({self.large_segment_bytes}), as torch "
                f"demands, but got {self.max_split_bytes}; use None for no limit"
            )

    @classmethod
    def for_torch(cls, version: str) -> AllocatorRules:
        """The default rules of a torch version such as ``"2.11.0+cu130"``; below 2.11 is refused.

        A version after 2.13 gets the rules of 2.13: compare with the device before relying on it.
        """
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None or (number := (int(found[1]), int(found[2]))) < (2, 11):
            raise ConfigError(
                f"the allocator's rules are known from torch 2.11 on, but got {version!r}; "
                "pass torch.__version__ of a supported torch"
            )
        return cls(tie_break=_TIE_BREAKS.get(number, TieBreak.SEGMENT))

    def is_small(self, block_bytes: int) -> bool:
        """Whether a request rounded to ``block_bytes`` is served from small segments."""
        return block_bytes <= self.max_small_bytes

    def block_bytes(self, size_bytes: int) -> int:
        """The bytes of a block for a request of ``size_bytes`` > 0."""
        return round_up(size_bytes, self.min_block_bytes)

    def segment_bytes(self, block_bytes: int) -> int:
        """What is reserved for a block that no free block can serve."""
        if self.is_small(block_bytes):
            return self.small_segment_bytes
        if block_bytes < self.own_segment_from_bytes:
            return self.large_segment_bytes
        return round_up(block_bytes, self.segment_round_bytes)

    def may_use(self, free_bytes: int, block_bytes: int) -> bool:
        """Whether the best fitting free block of ``free_bytes`` may serve a request of ``block_bytes``."""
        if self.max_split_bytes is None:
            return True
        if block_bytes < self.max_split_bytes:
            return free_bytes < self.max_split_bytes
        return free_bytes < block_bytes + self.max_unsplit_excess_bytes

    def splits(self, free_bytes: int, block_bytes: int) -> bool:
        """Whether a free block of ``free_bytes`` is cut for a request, or handed out whole."""
        rest = free_bytes - block_bytes
        if self.is_small(block_bytes):
            return rest >= self.min_block_bytes
        below_limit = self.max_split_bytes is None or block_bytes < self.max_split_bytes
        return below_limit and rest > self.max_small_bytes


DEFAULT_RULES = AllocatorRules()
_TIE_BREAKS = {(2, 11): TieBreak.ADDRESS, (2, 12): TieBreak.BLOCK}


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``size``."""
    return -(-size // unit) * unit
