"""Memory and time of a program before it runs: slabs laid out, live bytes, a timeline of three lanes."""

from trainmux.simulate._lanes import LaneClock, LaneTimes
from trainmux.simulate._measured_timeline import measured_timeline
from trainmux.simulate._memory import live_bytes, memory, peak_live_bytes
from trainmux.simulate._offsets import Lifetime, Placement, check, max_live_bytes, place
from trainmux.simulate._slab import Slab, Tenant, pack
from trainmux.simulate._timeline import lane_times, timeline

__all__ = [
    "LaneClock",
    "LaneTimes",
    "Lifetime",
    "Placement",
    "Slab",
    "Tenant",
    "check",
    "lane_times",
    "live_bytes",
    "max_live_bytes",
    "measured_timeline",
    "memory",
    "pack",
    "peak_live_bytes",
    "place",
    "timeline",
]
