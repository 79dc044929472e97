"""Who holds the device's memory during a test, for assertions and their messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from wide_jobs import MIB, cuda

import trainmux as tm
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.runtime import num_streams_known


@dataclass
class MemoryFacts:
    """One look at a device, in bytes: by holder, by job, and in pools of torch's allocator.

    ``usual_pool_bytes`` is what the pool holds that allocations go to unless told otherwise.
    """

    held: dict[str, int]
    job_pools: dict[str, int] = field(default_factory=dict)
    usual_pool_bytes: int = 0

    def table(self, before: MemoryFacts | None = None) -> str:
        """The facts in MiB, a line each, with the change since ``before``."""
        rows = []
        for name, size in self.held.items():
            change = "" if before is None else f" ({(size - before.held.get(name, 0)) / MIB:+.1f})"
            rows.append(f"{name:<40}{size / MIB:.1f} MiB{change}")
        return "\n".join(rows)


def look_at_memory(device: torch.device, colocation: tm.Colocation | None = None) -> MemoryFacts:
    """Look at ``device``, and at what ``colocation`` has laid out there."""
    free, total = torch.cuda.mem_get_info(device)
    facts = MemoryFacts(
        {
            "device in use": total - free,
            "torch reserved": torch.cuda.memory_reserved(device),
            "torch allocated": torch.cuda.memory_allocated(device),
            f"streams ever lent: {num_streams_known(device)[0]}": 0,
        }
    )
    if colocation is not None and isinstance(colocation._device, CudaDevice):
        arenas = colocation._device._arenas.values()
        facts.held["arenas"] = sum(block.size_bytes for blocks in arenas for block in blocks)
        for name, placed in colocation._device._placed.items():
            work = colocation._jobs[name]._work
            facts.job_pools[name] = getattr(work, "pool_bytes", 0)
            facts.held[f"job {name}: area"] = placed.demand.area_bytes
            facts.held[f"job {name}: pool"] = facts.job_pools[name]
            facts.held[f"job {name}: graphs"] = getattr(work, "graph_bytes", 0)
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        if segment["device"] == device.index:
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            name = f"pool {pool} stream {segment['stream']:#x}"
            facts.held[name] = facts.held.get(name, 0) + segment["total_size"]
            facts.usual_pool_bytes += segment["total_size"] if pool == (0, 0) else 0
    return facts


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
        return [facts.held["device in use"] - self.before.held["device in use"] for facts in self.seen]

    def report(self, budget_bytes: int, number: int | None = None) -> str:
        """Who held what at a look, or at the one with most, against the beginning."""
        number = self.held.index(max(self.held)) if number is None else number
        title = f"look {number + 1} of {len(self.held)}: {self.held[number] / MIB:.1f} MiB held"
        return f"{title}, budget {budget_bytes / MIB:.1f} MiB\n{self.seen[number].table(self.before)}"

    def growth(self, first: int) -> str:
        """Who holds what at the last look against look ``first``, and how it came to that."""
        steps = ", ".join(f"{(held - self.held[0]) / MIB:.1f}" for held in self.held)
        return f"MiB beyond the first look: {steps}\n{self.seen[-1].table(self.seen[first])}"
