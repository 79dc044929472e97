"""The data of the page's charts and of its tensor table, as compact JSON.

Columns instead of records, whole nanoseconds instead of seconds, memory as what changes from step to step:
ten thousand instructions with two timelines stay well below three megabytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Offload,
    Part,
    Phase,
    Prefetch,
    Profile,
    Recompute,
    Timeline,
    Wait,
)
from trainmux.reporting._plan_clock import LANES, ClockedPart, MemoryStep, clocked, nanoseconds
from trainmux.reporting._plan_facts import PlanFacts
from trainmux.reporting._units import shortened

Json = None | bool | int | str | Sequence["Json"] | dict[str, "Json"]

WORKSPACE = "workspace"
CLASS_NAMES = (*(found.value for found in ByteClass), WORKSPACE)
PHASE_LETTERS = {Phase.FORWARD: "f", Phase.BACKWARD: "b", Phase.UPDATE: "u"}
KIND_LETTERS: dict[type[Instruction], str] = {
    Compute: "C",
    Recompute: "R",
    Offload: "O",
    Prefetch: "P",
    Free: "F",
    Wait: "W",
}
_MAX_NAME_LENGTH = 160
_CLASS_POSITION = {found: position for position, found in enumerate(ByteClass)}


@dataclass(frozen=True)
class Around:
    """A part that runs once, before the first pass through the body or after the last one."""

    name: str
    part: Part
    timeline: Timeline


def page_data(
    facts: PlanFacts,
    part: Part,
    timelines: Sequence[Timeline],
    around: Sequence[Around],
    budget_curve: Sequence[tuple[int, float]],
) -> Json:
    """Everything that is drawn; ``timelines`` is the predicted one and, where there is one, the measured."""
    plan = facts.plan
    return {
        "budget": plan.budget_bytes,
        "fixed": plan.fixed_bytes,
        "reserved": plan.peak_bytes,
        "step": nanoseconds(plan.step_seconds),
        "classes": list(CLASS_NAMES),
        "lanes": [lane.value for lane in LANES],
        "subArrays": [
            {"profile": sub_array.profile, "members": [_name(member) for member in sub_array.members]}
            for sub_array in plan.partition
        ],
        "profiles": [_profile(profile) for profile in facts.profiles],
        "instructions": _instructions(facts, part),
        "timelines": [_timeline(part, timeline, timelines[0]) for timeline in timelines],
        "around": [_around(facts, found) for found in around],
        "decisions": _decisions(facts),
        "budgetCurve": [
            [budget, nanoseconds(seconds) if math.isfinite(seconds) else None]
            for budget, seconds in sorted(budget_curve)
        ],
    }


def script_safe(data: Json) -> str:
    """JSON that may stand inside a script element: no name can end the element or open a comment in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _name(name: str) -> str:
    return shortened(name, _MAX_NAME_LENGTH)


def _profile(profile: Profile) -> Json:
    return {
        "nodes": [_name(node.name) for node in profile.nodes],
        "phases": "".join(PHASE_LETTERS[node.phase] for node in profile.nodes),
        "tensors": [_name(tensor.name) for tensor in profile.tensors],
        "classes": [_CLASS_POSITION[tensor.byte_class] for tensor in profile.tensors],
        "sizes": [tensor.size_bytes for tensor in profile.tensors],
    }


def _instructions(facts: PlanFacts, part: Part) -> Json:
    """Kinds as letters; for each its sub-array, and its node or tensor. A wait has lane and target there."""
    kinds: list[str] = []
    sub_arrays: list[int] = []
    items: list[int] = []
    keeps: dict[str, Json] = {}
    for position, instruction in enumerate(part.instructions):
        kinds.append(KIND_LETTERS[type(instruction)])
        match instruction:
            case Compute(sub_array, item) | Recompute(sub_array, item):
                facts.node(sub_array, item)
            case Offload(sub_array, item) | Prefetch(sub_array, item) | Free(sub_array, item):
                facts.tensor(sub_array, item)
            case Wait(lane, item):
                sub_array = LANES.index(lane)
        if isinstance(instruction, Recompute):
            keeps[str(position)] = list(instruction.keeps)
        sub_arrays.append(sub_array)
        items.append(item)
    return {"kinds": "".join(kinds), "subArrays": sub_arrays, "items": items, "keeps": keeps}


def _timeline(part: Part, timeline: Timeline, predicted: Timeline) -> Json:
    """A timeline without memory of its own shows the predicted bytes on its own clock, and says so."""
    borrowed = not timeline.memory and bool(predicted.memory)
    on_clock = clocked(part, replace(timeline, memory=predicted.memory) if borrowed else timeline)
    return {
        "source": timeline.source,
        "duration": on_clock.duration_ns,
        "spans": _spans(on_clock),
        "stalls": {
            "starts": [stall.start_ns for stall in on_clock.stalls],
            "durations": [stall.end_ns - stall.start_ns for stall in on_clock.stalls],
            "waitsFor": [stall.waits_for for stall in on_clock.stalls],
        },
        "memory": _memory(on_clock.memory),
        "memoryIsPredicted": borrowed,
    }


def _around(facts: PlanFacts, around: Around) -> Json:
    on_clock = clocked(around.part, around.timeline)
    return {
        "name": around.name,
        "duration": on_clock.duration_ns,
        "instructions": _instructions(facts, around.part),
        "spans": _spans(on_clock),
    }


def _spans(on_clock: ClockedPart) -> Json:
    return {
        "lanes": "".join(str(LANES.index(span.lane)) for span in on_clock.work),
        "instructions": [span.instruction for span in on_clock.work],
        "starts": [span.start_ns for span in on_clock.work],
        "durations": [span.end_ns - span.start_ns for span in on_clock.work],
    }


def _memory(steps: Sequence[MemoryStep]) -> Json:
    """``changes`` is a row of (step, class, bytes from then on); every class begins at 0."""
    changes: list[int] = []
    now = [0] * len(CLASS_NAMES)
    for position, step in enumerate(steps):
        following = [0] * len(CLASS_NAMES)
        for byte_class, size_bytes in step.bytes_by_class:
            following[_CLASS_POSITION[byte_class]] += size_bytes
        following[-1] = step.workspace_bytes
        for index, size_bytes in enumerate(following):
            if size_bytes != now[index]:
                changes += (position, index, size_bytes)
        now = following
    return {
        "times": [step.time_ns for step in steps],
        "instructions": [step.instruction for step in steps],
        "changes": changes,
    }


def _decisions(facts: PlanFacts) -> Json:
    """Swaps, then recomputes: sub-array, tensor, kind, reason, and between which nodes.

    A recomputation's nodes are given by their number and time: listed, long chains would grow the page with
    the square of the graph.
    """
    decisions: list[Json] = []
    for swap in facts.plan.swaps:
        facts.tensor(swap.sub_array, swap.tensor)
        nodes = (swap.offload_after, swap.release_before, swap.prefetch_prompt)
        when = [number for node in nodes for number in _existing(facts, node)]
        decisions.append([swap.sub_array, swap.tensor, "swapped", swap.reason, when])
    for again in facts.plan.recomputes:
        facts.tensor(again.sub_array, again.tensor)
        seconds = sum(facts.node(again.sub_array, rank).seconds for rank in again.nodes)
        when = [*_existing(facts, again.before), len(again.nodes), nanoseconds(seconds)]
        decisions.append([again.sub_array, again.tensor, "recomputed", again.reason, when])
    return decisions


def _existing(facts: PlanFacts, node: tuple[int, int]) -> tuple[int, int]:
    facts.node(*node)
    return node
