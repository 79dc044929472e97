"""Who holds what on a CUDA device while jobs share it: the answer to "why is it more than the budget".

What the device has in use is put together from what can be asked: torch's allocator by pool and stream, jobs'
areas and arenas, and the rest, which is the context, graphs that were instantiated, and other programs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainmux.colocate._cuda_device import CudaDevice
from trainmux.runtime import num_streams_known

if TYPE_CHECKING:
    from trainmux.colocate._colocation import Colocation

_MIB = 1 << 20


@dataclass(frozen=True)
class PoolFacts:
    """Segments of torch's allocator in one pool for one stream; the pool (0, 0) is the usual one."""

    pool: tuple[int, int]
    stream: int
    num_segments: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class JobFacts:
    """A job that is laid out: its area, what it was promised beside it, what its own pool and graphs have."""

    name: str
    area_bytes: int
    beside_bytes: int
    pool_bytes: int
    graph_bytes: int
    num_captures: int


@dataclass(frozen=True)
class MemoryFacts:
    """One look at a device. ``used_bytes`` are everybody's, ``reserved_bytes`` torch's."""

    used_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    arena_bytes: int
    num_streams_known: int
    num_streams_lent: int
    pools: tuple[PoolFacts, ...]
    jobs: tuple[JobFacts, ...]

    @property
    def area_bytes(self) -> int:
        """All jobs' areas."""
        return sum(job.area_bytes for job in self.jobs)

    @property
    def rest_bytes(self) -> int:
        """What is neither torch's nor laid out: the context, graphs, other programs."""
        return self.used_bytes - self.reserved_bytes - self.area_bytes - self.arena_bytes

    def table(self, before: MemoryFacts | None = None) -> str:
        """The facts in MiB, a line each, beside those of ``before``."""
        rows = [
            (name, getattr(self, f"{key}_bytes"), None if before is None else getattr(before, f"{key}_bytes"))
            for name, key in (
                ("device in use", "used"),
                ("torch reserved", "reserved"),
                ("torch allocated", "allocated"),
                ("jobs' areas", "area"),
                ("arenas", "arena"),
                ("rest: context, graphs, others", "rest"),
            )
        ]
        lines = [f"{name:<32}{_mib(now)}" + _change(now, then) for name, now, then in rows]
        lines.append(f"streams: {self.num_streams_known} ever lent, {self.num_streams_lent} lent now")
        lines += [
            f"job {job.name}: area{_mib(job.area_bytes)}, promised beside it{_mib(job.beside_bytes)}, its "
            f"pool{_mib(job.pool_bytes)}, {job.num_captures} graphs with{_mib(job.graph_bytes)}"
            for job in self.jobs
        ]
        lines += [
            f"pool {pool.pool} stream {pool.stream:#x}: {pool.num_segments} segments"
            f"{_mib(pool.reserved_bytes)}, of which allocated{_mib(pool.allocated_bytes)}"
            for pool in self.pools
        ]
        return "\n".join(lines)


def look_at_memory(device: torch.device, colocation: Colocation | None = None) -> MemoryFacts:
    """Look at ``device``, and at what ``colocation`` has laid out there."""
    free, total = torch.cuda.mem_get_info(device)
    known, lent = num_streams_known(device)
    jobs: list[JobFacts] = []
    arena_bytes = 0
    if colocation is not None and isinstance(colocation._device, CudaDevice):
        arena_bytes, needs = colocation._device.laid_out()
        for name, need in needs.items():
            tenant, lane = colocation._lanes[name]
            work = tenant._works[lane] if tenant._works else None
            jobs.append(
                JobFacts(
                    name,
                    need.area_bytes,
                    need.local_bytes - need.area_bytes,
                    getattr(work, "pool_bytes", 0),
                    getattr(work, "graph_bytes", 0),
                    getattr(work, "num_captures", 0),
                )
            )
    return MemoryFacts(
        total - free,
        torch.cuda.memory_reserved(device),
        torch.cuda.memory_allocated(device),
        arena_bytes,
        known,
        lent,
        _pools(device),
        tuple(jobs),
    )


def _pools(device: torch.device) -> tuple[PoolFacts, ...]:
    """Torch's segments by pool and stream, the largest first."""
    found: dict[tuple[tuple[int, int], int], list[dict[str, int]]] = {}
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        if segment["device"] == device.index:
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            found.setdefault((pool, segment["stream"]), []).append(segment)
    rows = [
        PoolFacts(pool, stream, len(rows), _sum(rows, "total_size"), _sum(rows, "allocated_size"))
        for (pool, stream), rows in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.reserved_bytes))


def _sum(rows: Iterable[dict[str, int]], key: str) -> int:
    return sum(row[key] for row in rows)


def _mib(size_bytes: int) -> str:
    return f" {size_bytes / _MIB:.1f} MiB"


def _change(now: int, then: int | None) -> str:
    return "" if then is None else f" ({(now - then) / _MIB:+.1f})"
