"""Who holds the device's memory during a test, for assertions and their messages."""

from __future__ import annotations

import torch
from settled import settle
from wide_jobs import MIB, cuda, warm_up

import trainmux as tm

USED = "device in use"
USUAL = "pool (0, 0)"
"""The pool that allocations go to unless told otherwise."""


def look_at_memory(colocation: tm.Colocation | None = None) -> dict[str, int]:
    """Bytes on the device by holder: pools of torch's allocator, and those of jobs."""
    free, total = torch.cuda.mem_get_info(cuda())
    held = {USED: total - free, "torch allocated": torch.cuda.memory_allocated(cuda())}
    for name, admitted in ({} if colocation is None else colocation._jobs).items():
        for kind in ("pool_bytes", "graph_bytes"):
            held[f"{kind} of {name}"] = getattr(admitted._work, kind, 0)
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        name = f"pool {tuple(segment.get('segment_pool_id', (0, 0)))}"
        held[name] = held.get(name, 0) + segment["total_size"]
    return held


class MemoryWatch:
    """Looks at the device now, when it has all kernels of wide jobs, and whenever `look` is called."""

    def __init__(self) -> None:
        warm_up()
        settle(clears_workspaces=True)
        self.before = look_at_memory()
        self.seen: list[dict[str, int]] = []

    def look(self, colocation: tm.Colocation | None = None) -> int:
        """The bytes in use now beyond those at first."""
        self.seen.append(look_at_memory(colocation))
        return self.held[-1]

    @property
    def held(self) -> list[int]:
        """The bytes of every look."""
        return [held[USED] - self.before[USED] for held in self.seen]

    def report(self, number: int | None = None, since: int | None = None) -> str:
        """Who held what at a look, or at the one with most, against the beginning or another look; in MiB."""
        number = self.held.index(max(self.held)) if number is None else number
        before = self.before if since is None else self.seen[since]
        lines = [f"at each look: {', '.join(f'{held / MIB:.1f}' for held in self.held)}"]
        for name, size in self.seen[number].items():
            lines.append(f"{name:<40}{size / MIB:.1f} ({(size - before.get(name, 0)) / MIB:+.1f})")
        return "\n".join(lines)
