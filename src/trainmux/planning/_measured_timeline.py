"""A measured timeline: the numbers that `timeline` predicts, from when instructions really ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainmux.ir import Lane, Part, Profile, Recompute, Span, Timeline
from trainmux.planning._memory import memory

Interval = tuple[float, float]


def measured_timeline(
    part: Part, profiles: Sequence[Profile], spans: Sequence[Span], seconds: float
) -> Timeline:
    """Summarise ``spans``, measured since the part began; ``seconds`` is the time of the whole part."""
    compute = _union((span.start, span.end) for span in spans if span.lane is Lane.COMPUTE)
    copies = _union((span.start, span.end) for span in spans if span.lane is not Lane.COMPUTE)
    busy = _length(compute)
    return Timeline(
        source="measured",
        seconds=seconds,
        compute_seconds=busy,
        recompute_seconds=sum(
            span.end - span.start
            for span in spans
            if isinstance(part.instructions[span.instruction], Recompute)
        ),
        stall_seconds=max(0.0, seconds - busy),
        copy_seconds=_length(copies),
        hidden_copy_seconds=_length(_common(compute, copies)),
        spans=tuple(sorted(spans, key=lambda span: span.instruction)),
        memory=memory(part, profiles),
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of the intervals covers, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time that both of two rows of disjoint intervals cover."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
