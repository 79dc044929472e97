"""Who holds the device's memory during a test, for assertions and their messages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from wide_jobs import MIB, cuda

import trainmux as tm
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.runtime import num_streams_known


@dataclass(frozen=True)
class MemoryFacts:
    """One look at a device: bytes by holder, and one line each for streams, jobs and allocator pools."""

    used_bytes: int
    held: dict[str, int]
    lines: tuple[str, ...]

    def table(self, before: MemoryFacts | None = None) -> str:
        """The facts in MiB, a line each, with the change since ``before``."""
        rows = []
        for name, size in self.held.items():
            change = "" if before is None else f" ({(size - before.held[name]) / MIB:+.1f})"
            rows.append(f"{name:<32}{_mib(size)}{change}")
        return "\n".join((*rows, *self.lines))


def look_at_memory(device: torch.device, colocation: tm.Colocation | None = None) -> MemoryFacts:
    """Look at ``device``, and at what ``colocation`` has laid out there."""
    free, total = torch.cuda.mem_get_info(device)
    known, lent = num_streams_known(device)
    lines = [f"streams: {known} ever lent, {lent} lent now"]
    area_bytes = arena_bytes = 0
    if colocation is not None and isinstance(colocation._device, CudaDevice):
        arenas = colocation._device._arenas.values()
        arena_bytes = sum(block.size_bytes for blocks in arenas for block in blocks)
        for name, placed in colocation._device._placed.items():
            work = colocation._jobs[name]._work
            area_bytes += placed.need.area_bytes
            lines.append(
                f"job {name}: area{_mib(placed.need.area_bytes)}, promised scratch"
                f"{_mib(placed.need.local_bytes - placed.need.area_bytes)}, its pool"
                f"{_mib(getattr(work, 'pool_bytes', 0))}, {getattr(work, 'num_captures', 0)} graphs with"
                f"{_mib(getattr(work, 'graph_bytes', 0))}"
            )
    pools: defaultdict[tuple[tuple[int, ...], int], list[tuple[int, int]]] = defaultdict(list)
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        if segment["device"] == device.index:
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            pools[pool, segment["stream"]].append((segment["total_size"], segment["allocated_size"]))
    for (pool, stream), rows in pools.items():
        reserved, allocated = (sum(sizes) for sizes in zip(*rows, strict=True))
        lines.append(
            f"pool {pool} stream {stream:#x}: {len(rows)} segments{_mib(reserved)}, of which allocated"
            f"{_mib(allocated)}"
        )
    used, reserved = total - free, torch.cuda.memory_reserved(device)
    held = {
        "device in use": used,
        "torch reserved": reserved,
        "torch allocated": torch.cuda.memory_allocated(device),
        "jobs' areas": area_bytes,
        "arenas": arena_bytes,
        "rest: context, graphs, others": used - reserved - area_bytes - arena_bytes,
    }
    return MemoryFacts(used, held, tuple(lines))


def _mib(size_bytes: int) -> str:
    return f" {size_bytes / MIB:.1f} MiB"


class MemoryWatch:
    """Looks at the device now, and whenever `look` is called."""

    def __init__(self) -> None:
        self.before = look_at_memory(cuda())
        self.seen: list[MemoryFacts] = []

    def look(self, colocation: tm.Colocation | None = None) -> int:
        """The bytes held now beyond those held at first."""
        self.seen.append(look_at_memory(cuda(), colocation))
        return self.held[-1]

    @property
    def held(self) -> list[int]:
        """The bytes of every look."""
        return [facts.used_bytes - self.before.used_bytes for facts in self.seen]

    def report(self, budget_bytes: int, number: int | None = None) -> str:
        """Who held what at a look, or at the one with most, against the beginning."""
        held = self.held
        if number is None:
            number = held.index(max(held))
        return (
            f"look {number + 1} of {len(held)}: {held[number] / MIB:.1f} MiB held, budget "
            f"{budget_bytes / MIB:.1f} MiB\n{self.seen[number].table(self.before)}"
        )

    def growth(self, first: int) -> str:
        """Who holds what at the last look against look ``first``, and how it came to that."""
        steps = ", ".join(f"{(held - self.held[0]) / MIB:.1f}" for held in self.held)
        return f"MiB beyond the first look: {steps}\n{self.seen[-1].table(self.seen[first])}"
