"""The trace that Perfetto and chrome://tracing open, and through it the clock that pages share with it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from sample_plans import MIB, Sample, ring_sample, turns_sample

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Lane,
    MemoryPoint,
    Offload,
    Part,
    Prefetch,
    Recompute,
    Span,
    Timeline,
    Wait,
)
from trainmux.reporting import chrome_trace

LANES = ["compute", "device to host", "host to device"]


def trace(sample: Sample, timeline: Timeline) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(chrome_trace(sample.plan, sample.program, sample.profiles, timeline))
    return loaded


def events(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == kind]


@pytest.fixture(scope="module")
def sample() -> Sample:
    return ring_sample()


# Offload a tensor beside a node, wait for it, free it, fetch another, wait for it, use it.
INSTRUCTIONS = (
    Compute(0, 0),
    Wait(Lane.OUT, 0),
    Offload(0, 0),
    Compute(0, 1),
    Wait(Lane.COMPUTE, 2),
    Free(0, 0),
    Wait(Lane.IN, 3),
    Prefetch(0, 1),
    Wait(Lane.COMPUTE, 7),
    Compute(0, 1),
)
WORK = {0: (0.0, 1.0), 2: (1.0, 3.0), 3: (1.0, 2.0), 7: (3.0, 4.5), 9: (4.5, 5.0)}
LANE = {0: Lane.COMPUTE, 2: Lane.OUT, 3: Lane.COMPUTE, 7: Lane.IN, 9: Lane.COMPUTE}


def handmade(
    work: dict[int, tuple[float, float]] = WORK,
    seconds: float = 5.0,
    memory: tuple[MemoryPoint, ...] = (),
    extra: tuple[Span, ...] = (),
) -> dict[str, Any]:
    """The trace of a few instructions, in seconds by position."""
    other = turns_sample()
    spans = (*(Span(LANE[position], position, *times) for position, times in work.items()), *extra)
    timeline = Timeline("predicted", seconds, 2.5, 0.0, 2.5, 3.5, 1.0, spans, memory)
    program = replace(other.program, body=Part(INSTRUCTIONS, ()))
    return trace(replace(other, program=program), timeline)


@pytest.mark.parametrize(
    ("work", "seconds", "stalls"),
    [
        (WORK, 5.0, [(2.0, 4.5, 7)]),
        (WORK | {2: (1.0, 4.6), 9: (4.6, 5.0)}, 5.0, [(2.0, 4.6, 2)]),  # of two waits the one that ended last
        (WORK | {3: (1.25, 2.0)}, 5.0, [(1.0, 1.25, None), (2.0, 4.5, 7)]),  # told to wait for nothing
        (WORK | {7: (3.0, 5.5), 9: (4.5, 5.0)}, 5.5, [(2.0, 4.5, 7), (5.0, 5.5, 7)]),  # lanes join at the end
        (WORK, 5.5, [(2.0, 4.5, 7), (5.0, 5.5, None)]),
    ],
)
def test_a_gap_says_what_it_waits_for(
    work: dict[int, tuple[float, float]], seconds: float, stalls: list[tuple[float, float, int | None]]
) -> None:
    idle = [event for event in events(handmade(work, seconds), "X") if event["cat"] == "idle"]
    times = [(one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in idle]
    waits = [one.get("args", {"waits for instruction": None})["waits for instruction"] for one in idle]
    assert [(*time, on) for time, on in zip(times, waits, strict=True)] == stalls


def test_memory_follows_the_issue_order_on_the_compute_lane() -> None:
    sizes = [MemoryPoint(position, ((ByteClass.FEATURE_MAP, position * MIB),), 0) for position in range(10)]
    counters = events(handmade(memory=tuple(reversed(sizes))), "C")
    # The free takes place when the offload has ended, the prefetch takes its bytes right after it.
    assert [event["ts"] / 1e6 for event in counters] == [0, 1, 1, 1, 2, 3, 3, 3, 3, 4.5]
    assert [event["args"]["feature map"] for event in counters] == list(range(10))
    # A workspace is given back when its node has run.
    counters = events(handmade(memory=(MemoryPoint(0, (), 7 * MIB), MemoryPoint(9, (), 3 * MIB))), "C")
    found = {one["ts"] / 1e6: one["args"]["workspace"] for one in counters}
    assert found == {0: 7, 1: 0, 4.5: 3, 5: 0}


@pytest.mark.parametrize(
    "bad", [Span(Lane.COMPUTE, 10, 0.0, 1.0), Span(Lane.COMPUTE, -1, 0.0, 1.0), Span(Lane.IN, 2, 0.0, 1.0)]
)
def test_a_timeline_of_another_program_is_refused(bad: Span) -> None:
    with pytest.raises(PlanError):
        handmade(extra=(bad,))
    with pytest.raises(PlanError):
        handmade(memory=(MemoryPoint(12, (), 0),))
    with pytest.raises(PlanError):
        trace(replace(ring_sample(), profiles=turns_sample().profiles), ring_sample().predicted)


def test_events_fill_the_compute_lane_and_never_overlap(sample: Sample) -> None:
    timeline = sample.measured
    found = trace(sample, timeline)
    assert (found["displayTimeUnit"], found["otherData"]["source"]) == ("ms", "measured")
    assert found["otherData"]["plan"] == "mutwo: 7 members in 2 sub-arrays (4 + 3), as a ring"
    names = [event["args"]["name"] for event in events(found, "M") if "name" in event["args"]]
    assert names == ["trainmux, measured", *LANES]
    starts = [event["ts"] for event in found["traceEvents"] if event["ph"] != "M"]
    assert starts == sorted(starts)
    by_lane = defaultdict(list)
    for event in events(found, "X"):
        by_lane[event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
    assert sorted(by_lane) == [0, 1, 2]
    for lane in by_lane.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(lane))
    assert by_lane[0][0][0] == 0
    assert by_lane[0][-1][1] == pytest.approx(timeline.seconds * 1e6, abs=1e-3)
    assert all(end == start for (_, end), (start, _) in pairwise(by_lane[0]))
    idle = [event["dur"] for event in events(found, "X") if event["cat"] == "idle"]
    assert sum(idle) == pytest.approx(timeline.stall_seconds * 1e6, abs=1)


def test_every_node_and_copy_is_an_event_in_microseconds(sample: Sample) -> None:
    timeline = sample.predicted
    shown = [event for event in events(trace(sample, timeline), "X") if event["cat"] != "idle"]
    work = {event["args"]["instruction"]: event for event in shown}
    assert len(work) == len(timeline.spans)
    verbs = {Compute: "", Recompute: "recompute ", Offload: "offload ", Prefetch: "prefetch "}
    for span in timeline.spans:
        event, one = work[span.instruction], sample.program.body.instructions[span.instruction]
        assert event["ts"] == pytest.approx(span.start * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=2e-3)
        assert (LANES[event["tid"]], event["cat"]) == (span.lane.value, f"sub-array {one.sub_array}")
        profile, arguments = sample.profiles[one.sub_array], event["args"]
        if isinstance(one, Compute | Recompute):
            node = profile.nodes[one.node]
            name = node.name
            assert (arguments["node"], arguments["phase"]) == (name, node.phase.value)
        else:
            tensor = profile.tensors[one.tensor]
            name = tensor.name
            assert (arguments["bytes"], arguments["class"]) == (tensor.size_bytes, tensor.byte_class.value)
        assert event["name"] == verbs[type(one)] + name
        if isinstance(one, Recompute):
            assert arguments["makes again"] == profile.tensors[one.keeps[0]].name
    colours = {(event["cat"], event["cname"]) for event in shown}
    assert len(colours) == len({colour for _, colour in colours}) == 2


def test_the_counter_has_the_byte_classes_in_mebibytes(sample: Sample) -> None:
    counters = events(trace(sample, sample.predicted), "C")
    assert {event["name"] for event in counters} == {"memory in MiB"}
    fixed = sample.plan.fixed_bytes / MIB
    assert all(event["args"]["libraries and graphs"] == fixed for event in counters)
    points = sample.predicted.memory
    peak = max(sum(size for _, size in point.bytes_by_class) + point.workspace_bytes for point in points)
    highest = max(sum(event["args"].values()) for event in counters)
    assert highest == pytest.approx(fixed + peak / MIB, abs=0.01)
    (series,) = {frozenset(event["args"]) for event in counters}
    assert {"parameter", "feature map", "workspace"} <= series
    assert all(a["args"] != b["args"] for a, b in pairwise(counters))
    assert events(trace(sample, replace(sample.measured, memory=())), "C") == []


def test_any_name_makes_a_readable_trace() -> None:
    sample = ring_sample(num_layers=3, layer_name='</script>"\n\ud800µ')
    text = chrome_trace(sample.plan, sample.program, sample.profiles, sample.predicted)
    assert text.isascii()
    names = {event["name"] for event in json.loads(text)["traceEvents"]}
    assert '</script>"\\n\\ud800µ.0.forward' in names
