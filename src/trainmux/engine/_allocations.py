"""What torch's caching allocator is asked for while something runs, one event after another.

Torch can write down every allocation. That history is the process's own: where the user has it running, it
is left alone and nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_MAX_EVENTS = 1_000_000


@dataclass(frozen=True)
class AllocationEvent:
    """Bytes taken (``is_free`` false) or given back, at an address, for a stream."""

    address: int
    size_bytes: int
    stream: int
    is_free: bool


@dataclass
class AllocationRecord:
    """Filled when recording ends; ``events`` is ``None`` where nothing could be recorded."""

    events: list[AllocationEvent] | None = field(default=None)


@contextmanager
def record_allocations(device: torch.device) -> Iterator[AllocationRecord]:
    """Write down what happens on ``device`` meanwhile. Frees of what was there before are left out."""
    record = AllocationRecord()
    if _is_recording():
        yield record
        return
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MAX_EVENTS)
    try:
        yield record
        trace = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
        record.events = _events(trace)
    finally:
        torch.cuda.memory._record_memory_history(None)


def _is_recording() -> bool:
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(is_enabled()) if is_enabled is not None else False


def _events(trace: list[dict[str, object]]) -> list[AllocationEvent]:
    live: set[int] = set()
    events = []
    for entry in trace:
        action, address = entry["action"], int(entry["addr"])  # type: ignore[call-overload]
        if action == "alloc":
            live.add(address)
        elif action == "free_completed" and address in live:
            live.discard(address)
        else:
            continue
        size, stream = int(entry["size"]), int(entry["stream"])  # type: ignore[call-overload]
        events.append(AllocationEvent(address, size, stream, is_free=action != "alloc"))
    return events
