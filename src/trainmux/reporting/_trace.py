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
from trainmux.reporting._plan_clock import LANES, ClockedPart, Work, clocked
from trainmux.reporting._plan_facts import PlanFacts
from trainmux.reporting._units import format_seconds, one_line
from trainmux.sizes import format_bytes

_PROCESS = 1
_MIB = 1024 * 1024
_STALL_COLOUR = "terrible"
# Names of colours that chrome://tracing knows; Perfetto colours by the name of the event.
_SUB_ARRAY_COLOURS = (
    *("thread_state_running", "rail_response", "rail_animation", "rail_load"),
    *("thread_state_iowait", "startup", "cq_build_attempt_passed", "thread_state_unknown"),
)

Event = dict[str, Any]


def chrome_trace(plan: PlanRecord, program: Program, profiles: Sequence[Profile], timeline: Timeline) -> str:
    """The program's body on ``timeline``'s clock, as JSON text.

    Three threads are the three lanes; a sub-array is a category; arguments carry node, tensor and bytes. What
    the compute lane waits for is an event of its own, so that a gap has a reason. The counter "memory in MiB"
    has the byte classes. Refused with `PlanError`: profiles, a program or a timeline of another plan.
    """
    facts = PlanFacts.of(plan, profiles)
    on_clock = clocked(program.body, timeline)
    timed = [*_work(facts, on_clock), *_stalls(facts, on_clock), *_memory(plan, on_clock)]
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": f"{one_line(plan.policy)}: {facts.how_it_trains}",
            "source": on_clock.source,
            "step": format_seconds(on_clock.duration_ns / 1e9),
            "budget": format_bytes(plan.budget_bytes),
            "reserved": format_bytes(plan.peak_bytes),
            "libraries and graphs": format_bytes(plan.fixed_bytes),
        },
        "traceEvents": [*_names(on_clock.source), *sorted(timed, key=lambda event: event["ts"])],
    }
    return json.dumps(trace, separators=(",", ":"), allow_nan=False)


def _names(source: str) -> Iterator[Event]:
    def named(kind: str, thread: int, **arguments: str | int) -> Event:
        return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": arguments}

    yield named("process_name", 0, name=f"trainmux, {source}")
    for thread, lane in enumerate(LANES):
        yield named("thread_name", thread, name=lane.value)
        yield named("thread_sort_index", thread, sort_index=thread)


def _span(name: str, lane: Lane, start_ns: int, end_ns: int, **more: Any) -> Event:
    place = {"ph": "X", "pid": _PROCESS, "tid": LANES.index(lane)}
    return {"name": name, **place, "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, **more}


def _work(facts: PlanFacts, on_clock: ClockedPart) -> Iterator[Event]:
    for span in on_clock.work:
        title, arguments = _described(facts, span.work)
        sub_array = span.work.sub_array
        yield _span(
            title,
            span.lane,
            span.start_ns,
            span.end_ns,
            cat=f"sub-array {sub_array}",
            cname=_SUB_ARRAY_COLOURS[sub_array % len(_SUB_ARRAY_COLOURS)],
            args={"instruction": span.instruction, **arguments},
        )


def _stalls(facts: PlanFacts, on_clock: ClockedPart) -> Iterator[Event]:
    work_at = {span.instruction: span.work for span in on_clock.work}
    for stall in on_clock.stalls:
        times = (Lane.COMPUTE, stall.start_ns, stall.end_ns)
        event = _span("idle", *times, cat="idle", cname=_STALL_COLOUR)
        if stall.waits_for in work_at:
            event["name"] = f"waits for {_described(facts, work_at[stall.waits_for])[0]}"
            event["args"] = {"waits for instruction": stall.waits_for}
        yield event


def _described(facts: PlanFacts, work: Work) -> tuple[str, dict[str, str | int]]:
    """The title of a node or a copy, and what is known of it."""
    match work:
        case Compute(sub_array, rank) | Recompute(sub_array, rank):
            node = facts.node(sub_array, rank)
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
            kept = [one_line(facts.tensor(sub_array, position).name) for position in work.keeps]
            return f"recompute {name}", {**arguments, "makes again": ", ".join(kept)}
        case Offload(sub_array, position) | Prefetch(sub_array, position):
            tensor = facts.tensor(sub_array, position)
            name = one_line(tensor.name)
            verb = "offload" if isinstance(work, Offload) else "prefetch"
            return f"{verb} {name}", {
                "tensor": name,
                "class": tensor.byte_class.value,
                "size": format_bytes(tensor.size_bytes),
                "bytes": tensor.size_bytes,
            }


def _memory(plan: PlanRecord, on_clock: ClockedPart) -> Iterator[Event]:
    """One counter with the byte classes in MiB, only where something changed."""
    used = {name for step in on_clock.memory for name, size in step.bytes_by_class if size}
    before: dict[str, float] | None = None
    for step in on_clock.memory:
        sizes = {"libraries and graphs": plan.fixed_bytes}
        sizes |= {name.value: 0 for name in ByteClass if name in used}
        for name, size in step.bytes_by_class:
            if size:
                sizes[name.value] += size
        sizes["workspace"] = step.workspace_bytes
        now = {name: round(size / _MIB, 3) for name, size in sizes.items()}
        if now != before:
            place = {"ph": "C", "pid": _PROCESS, "tid": 0, "ts": step.time_ns / 1000}
            yield {"name": "memory in MiB", **place, "args": now}
        before = now
