"""A small clock for hand-made programs: three lanes, each in issue order, held where a wait says so."""

from __future__ import annotations

import random

from trainmux.ir import (
    Compute,
    Free,
    Lane,
    MemoryPoint,
    Offload,
    Part,
    Prefetch,
    Profile,
    Recompute,
    Span,
    Timeline,
    Wait,
)


def clock(
    source: str,
    part: Part,
    profiles: tuple[Profile, ...],
    memory: list[MemoryPoint],
    jitter: random.Random | None,
) -> Timeline:
    """One pass through ``part``; with ``jitter`` every time is a little off and every start a little late."""
    lanes = dict.fromkeys(Lane, 0.0)
    ends = [0.0] * len(part.instructions)
    spans: list[Span] = []
    compute = recompute = 0.0
    for position, instruction in enumerate(part.instructions):
        match instruction:
            case Compute(sub_array, node) | Recompute(sub_array, node):
                lane, seconds = Lane.COMPUTE, profiles[sub_array].nodes[node].seconds
            case Offload(sub_array, tensor):
                lane, seconds = Lane.OUT, profiles[sub_array].tensors[tensor].swap_out_seconds
            case Prefetch(sub_array, tensor):
                lane, seconds = Lane.IN, profiles[sub_array].tensors[tensor].swap_in_seconds
            case Free():
                ends[position] = lanes[Lane.COMPUTE]
                continue
            case Wait(lane, on):
                lanes[lane] = max(lanes[lane], ends[on])
                ends[position] = lanes[lane]
                continue
        if jitter is not None:
            seconds *= jitter.lognormvariate(0.02, 0.06)
            lanes[lane] += jitter.uniform(0.5e-6, 3e-6)
        if isinstance(instruction, Compute | Recompute):
            compute += seconds
            recompute += seconds if isinstance(instruction, Recompute) else 0.0
        spans.append(Span(lane, position, lanes[lane], lanes[lane] + seconds))
        lanes[lane] += seconds
        ends[position] = lanes[lane]
    total = max(lanes.values())
    copies = _union([span for span in spans if span.lane is not Lane.COMPUTE])
    nodes = _union([span for span in spans if span.lane is Lane.COMPUTE])
    hidden = _overlap(copies, nodes)
    return Timeline(
        source,
        total,
        compute,
        recompute,
        total - compute,
        sum(end - start for start, end in copies),
        hidden,
        tuple(spans),
        tuple(memory),
    )


def _overlap(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    shared, at = 0.0, 0
    for begin, end in some:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        for position in range(at, len(others)):
            if others[position][0] >= end:
                break
            shared += min(end, others[position][1]) - max(begin, others[position][0])
    return shared


def _union(spans: list[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda one: one.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged
