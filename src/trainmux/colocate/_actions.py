"""What the scheduler tells whoever drives the device, and what it reports of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trainmux.colocate._lane import SegmentRef
from trainmux.colocate._layout import Layout


class Enqueue(NamedTuple):
    """Enqueue ``ref`` on its job's stream now, behind the segments ``after``, all of which are enqueued."""

    ref: SegmentRef
    after: tuple[SegmentRef, ...]


class Remap(NamedTuple):
    """From now on memory is laid out as in ``layout``, within ``budget_bytes``.

    No job whose place changes has anything in flight. Jobs that are named for the first time get their
    local memory now; what belonged to jobs that are no longer named is free.
    """

    layout: Layout
    budget_bytes: int


class Idle(NamedTuple):
    """Nothing to enqueue: ask again when a segment is complete, at the latest at ``wake_at`` if given."""

    wake_at: float | None


Action = Enqueue | Remap | Idle


@dataclass(frozen=True)
class JobReport:
    """How a job fared: iterations run, how long they were shifted in all and last, how often it stalled."""

    name: str
    num_iterations: int
    total_shift_seconds: float
    last_shift_seconds: float
    num_mispredicted: int
    solo_seconds: tuple[float, ...]
    """What each segment takes alone, as far as was learned."""
    shared_seconds: tuple[float, ...]
    """What each segment takes beside the other jobs, as far as was learned."""
