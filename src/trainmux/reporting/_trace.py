"""A plan on the clock as a trace for Perfetto and chrome://tracing (Trace Event Format, object form)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from trainmux.ir import (
    ByteClass,
    Compute,
    Lane,
    Offload,
    PlanRecord,
    Prefetch,
    Profile,
    Program,
    Recompute,
    Timeline,
)
from trainmux.reporting._plan_clock import LANES, ClockedPart, MemoryStep, Work, WorkSpan, clocked
from trainmux.reporting._plan_facts import PlanLookup, how_it_trains
from trainmux.reporting._units import format_seconds, one_line
from trainmux.sizes import format_bytes

_PROCESS = 1
_MIB = 1024 * 1024
_STALL_COLOUR = "terrible"
# Names of colours that chrome://tracing knows; Perfetto colours by the name of the event.
_SUB_ARRAY_COLOURS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_load",
    "thread_state_iowait",
    "startup",
    "cq_build_attempt_passed",
    "thread_state_unknown",
)

Event = dict[str, Any]


def chrome_trace(plan: PlanRecord, program: Program, profiles: Sequence[Profile], timeline: Timeline) -> str:
    """The program's body on ``timeline``'s clock, as JSON text.

    Three threads are the three lanes; a sub-array is a category; arguments carry node, tensor and bytes. What
    the compute lane waits for is an event of its own, so that a gap has a reason. The counter "memory in MiB"
    has the byte classes. Refused with `PlanError`: profiles, a program or a timeline of another plan.
    """
    lookup = PlanLookup.of(plan, profiles)
    on_clock = clocked(program.body, timeline)
    timed = [
        *(_work(lookup, span) for span in on_clock.work),
        *_stalls(lookup, on_clock),
        *_memory(plan, on_clock.memory),
    ]
    trace = {
        "displayTimeUnit": "ms",
        "otherData": _about(plan, on_clock),
        "traceEvents": [*_names(on_clock.source), *sorted(timed, key=lambda event: event["ts"])],
    }
    return json.dumps(trace, separators=(",", ":"), allow_nan=False)


def _microseconds(time_ns: int) -> float:
    return time_ns / 1000


def _about(plan: PlanRecord, on_clock: ClockedPart) -> dict[str, str]:
    return {
        "plan": f"{one_line(plan.policy)}: {how_it_trains(plan)}",
        "source": on_clock.source,
        "step": format_seconds(on_clock.duration_ns / 1e9),
        "budget": format_bytes(plan.budget_bytes),
        "reserved": format_bytes(plan.peak_bytes),
        "libraries and graphs": format_bytes(plan.fixed_bytes),
    }


def _names(source: str) -> Iterator[Event]:
    yield _metadata("process_name", 0, {"name": f"trainmux, {source}"})
    for thread, lane in enumerate(LANES):
        yield _metadata("thread_name", thread, {"name": lane.value})
        yield _metadata("thread_sort_index", thread, {"sort_index": thread})


def _metadata(name: str, thread: int, arguments: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": thread, "args": arguments}


def _work(lookup: PlanLookup, span: WorkSpan) -> Event:
    title, arguments = _described(lookup, span.work)
    event = _complete(title, span.lane, span.start_ns, span.end_ns)
    event["cat"] = f"sub-array {span.work.sub_array}"
    event["cname"] = _SUB_ARRAY_COLOURS[span.work.sub_array % len(_SUB_ARRAY_COLOURS)]
    event["args"] = {"instruction": span.instruction, **arguments}
    return event


def _complete(name: str, lane: Lane, start_ns: int, end_ns: int) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": _PROCESS,
        "tid": LANES.index(lane),
        "ts": _microseconds(start_ns),
        "dur": _microseconds(end_ns - start_ns),
    }


def _described(lookup: PlanLookup, work: Work) -> tuple[str, dict[str, str | int]]:
    """The title of a node or a copy, and what is known of it."""
    match work:
        case Compute(sub_array, rank) | Recompute(sub_array, rank):
            node = lookup.node(sub_array, rank)
            name = one_line(node.name)
            arguments: dict[str, str | int] = {
                "node": name,
                "rank": rank,
                "phase": node.phase.value,
                "workspace": format_bytes(node.workspace_bytes),
                "workspace_bytes": node.workspace_bytes,
            }
            if isinstance(work, Compute):
                return name, arguments
            kept = [one_line(lookup.tensor(sub_array, position).name) for position in work.keeps]
            return f"recompute {name}", {**arguments, "makes again": ", ".join(kept)}
        case Offload(sub_array, position) | Prefetch(sub_array, position):
            tensor = lookup.tensor(sub_array, position)
            name = one_line(tensor.name)
            verb = "offload" if isinstance(work, Offload) else "prefetch"
            return f"{verb} {name}", {
                "tensor": name,
                "class": tensor.byte_class.value,
                "size": format_bytes(tensor.size_bytes),
                "bytes": tensor.size_bytes,
            }


def _stalls(lookup: PlanLookup, on_clock: ClockedPart) -> Iterator[Event]:
    work_at = {span.instruction: span.work for span in on_clock.work}
    for stall in on_clock.stalls:
        event = _complete("idle", Lane.COMPUTE, stall.start_ns, stall.end_ns)
        event["cat"] = "idle"
        event["cname"] = _STALL_COLOUR
        if stall.waits_for in work_at:
            event["name"] = f"waits for {_described(lookup, work_at[stall.waits_for])[0]}"
            event["args"] = {"waits for instruction": stall.waits_for}
        yield event


def _memory(plan: PlanRecord, steps: Sequence[MemoryStep]) -> Iterator[Event]:
    """One counter with the byte classes in MiB, only where something changed."""
    used = {name for step in steps for name, size in step.bytes_by_class if size}
    classes = [name for name in ByteClass if name in used]
    before: dict[str, float] | None = None
    for step in steps:
        sizes = dict.fromkeys(classes, 0)
        for name, size in step.bytes_by_class:
            if size:
                sizes[name] += size
        now = {"libraries and graphs": _mebibytes(plan.fixed_bytes)}
        now |= {name.value: _mebibytes(size) for name, size in sizes.items()}
        now["workspace"] = _mebibytes(step.workspace_bytes)
        if now != before:
            yield {
                "name": "memory in MiB",
                "ph": "C",
                "pid": _PROCESS,
                "tid": 0,
                "ts": _microseconds(step.time_ns),
                "args": now,
            }
        before = now


def _mebibytes(size_bytes: int) -> float:
    return round(size_bytes / _MIB, 3)
