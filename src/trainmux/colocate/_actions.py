"""What the scheduler tells whoever drives the device."""

from __future__ import annotations

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
