"""What a program will take before it runs: pools simulated, slabs laid out, memory and time foretold."""

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
from trainmux.simulate._lanes import LaneClock, LaneTimes
from trainmux.simulate._measured_timeline import measured_timeline
from trainmux.simulate._memory import live_bytes, memory, peak_live_bytes
from trainmux.simulate._reservation import PoolForecast, Reservation, find_reservation
from trainmux.simulate._rules import AllocatorRules, TieBreak
from trainmux.simulate._slab import Slab, Tenant, pack
from trainmux.simulate._timeline import lane_times, timeline

__all__ = [
    "NO_BLOCK",
    "Allocate",
    "AllocatorRules",
    "Block",
    "Event",
    "Free",
    "LaneClock",
    "LaneTimes",
    "PoolForecast",
    "PoolSimulator",
    "PoolUse",
    "Reservation",
    "Segment",
    "Slab",
    "Tenant",
    "TieBreak",
    "find_reservation",
    "lane_times",
    "live_bytes",
    "measured_timeline",
    "memory",
    "pack",
    "peak_live_bytes",
    "replay",
    "timeline",
]
