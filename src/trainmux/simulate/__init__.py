"""What a program will reserve on the device, known before it runs: pools simulated, slabs laid out."""

from trainmux.simulate._allocator import (
    NO_BLOCK,
    Allocate,
    Block,
    Event,
    Free,
    PoolSimulator,
    PoolUse,
    Segment,
    replay,
)
from trainmux.simulate._offsets import Lifetime, Placement, check, max_live_bytes, place
from trainmux.simulate._rules import AllocatorRules, TieBreak

__all__ = [
    "NO_BLOCK",
    "Allocate",
    "AllocatorRules",
    "Block",
    "Event",
    "Free",
    "Lifetime",
    "Placement",
    "PoolSimulator",
    "PoolUse",
    "Segment",
    "TieBreak",
    "check",
    "max_live_bytes",
    "place",
    "replay",
]
