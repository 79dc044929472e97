"""The trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from sample_plans import MIB, Sample, ring_sample, turns_sample

from trainmux.errors import PlanError
from trainmux.ir import Compute, Lane, Offload, Prefetch, Recompute, Timeline
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


def test_it_is_the_object_form_and_says_what_it_shows(sample: Sample) -> None:
    found = trace(sample, sample.measured)
    assert found["displayTimeUnit"] == "ms"
    assert found["otherData"]["source"] == "measured"
    assert found["otherData"]["plan"] == "mutwo: 7 members in 2 sub-arrays (4 + 3), as a ring"
    assert found["otherData"]["budget"].endswith("GiB")


def test_three_threads_have_the_names_of_the_lanes_in_their_order(sample: Sample) -> None:
    names = events(trace(sample, sample.predicted), "M")
    assert [name["args"]["name"] for name in names if name["name"] == "process_name"] == [
        "trainmux, predicted"
    ]
    threads = {name["tid"]: name["args"]["name"] for name in names if name["name"] == "thread_name"}
    assert threads == dict(enumerate(LANES))
    order = {name["tid"]: name["args"]["sort_index"] for name in names if name["name"] == "thread_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_events_are_in_order_and_never_overlap_on_a_lane(sample: Sample, source: str) -> None:
    found = trace(sample, getattr(sample, source))
    timed = [event for event in found["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    by_lane = defaultdict(list)
    for event in events(found, "X"):
        assert event["dur"] >= 0
        by_lane[event["tid"]].append(event)
    assert sorted(by_lane) == [0, 1, 2]
    for lane in by_lane.values():
        for before, after in pairwise(lane):
            assert round(before["ts"] + before["dur"], 3) <= after["ts"]


def test_every_node_and_copy_is_an_event_in_microseconds(sample: Sample) -> None:
    timeline = sample.predicted
    work = {
        event["args"]["instruction"]: event
        for event in events(trace(sample, timeline), "X")
        if event["cat"] != "idle"
    }
    assert len(work) == len(timeline.spans)
    for span in timeline.spans:
        event = work[span.instruction]
        assert event["ts"] == pytest.approx(span.start * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=2e-3)
        assert LANES[event["tid"]] == span.lane.value
        instruction = sample.program.body.instructions[span.instruction]
        assert isinstance(instruction, Compute | Recompute | Offload | Prefetch)
        profile = sample.profiles[sample.plan.partition[instruction.sub_array].profile]
        assert event["cat"] == f"sub-array {instruction.sub_array}"
        match instruction:
            case Compute(_, node):
                assert event["name"] == event["args"]["node"] == profile.nodes[node].name
                assert event["args"]["phase"] == profile.nodes[node].phase.value
            case Recompute(_, node, keeps):
                assert event["name"] == f"recompute {profile.nodes[node].name}"
                kept = [profile.tensors[position].name for position in keeps]
                assert event["args"]["makes again"] == ", ".join(kept)
            case Offload(_, tensor) | Prefetch(_, tensor):
                verb = "offload" if isinstance(instruction, Offload) else "prefetch"
                assert event["name"] == f"{verb} {profile.tensors[tensor].name}"
                assert event["args"]["bytes"] == profile.tensors[tensor].size_bytes
                assert event["args"]["class"] == profile.tensors[tensor].byte_class.value


def test_a_sub_array_keeps_its_colour(sample: Sample) -> None:
    colours = defaultdict(set)
    for event in events(trace(sample, sample.predicted), "X"):
        colours[event["cat"]].add(event["cname"])
    assert all(len(found) == 1 for found in colours.values())
    assert len({next(iter(found)) for found in colours.values()}) == len(colours) == 3


def test_a_gap_says_what_it_waits_for(sample: Sample) -> None:
    idle = [event for event in events(trace(sample, sample.predicted), "X") if event["cat"] == "idle"]
    assert sum(event["dur"] for event in idle) == pytest.approx(sample.predicted.stall_seconds * 1e6, abs=1)
    assert idle
    for event in idle:
        cause = sample.program.body.instructions[event["args"]["waits for instruction"]]
        assert isinstance(cause, Prefetch | Offload)
        name = sample.profiles[cause.sub_array].tensors[cause.tensor].name
        assert event["name"].endswith(name)


def test_the_counter_has_the_byte_classes_in_mebibytes(sample: Sample) -> None:
    counters = events(trace(sample, sample.predicted), "C")
    assert {event["name"] for event in counters} == {"memory in MiB"}
    fixed = sample.plan.fixed_bytes / MIB
    assert all(event["args"]["libraries and graphs"] == fixed for event in counters)
    peak = max(
        sum(size for _, size in point.bytes_by_class) + point.workspace_bytes
        for point in sample.predicted.memory
    )
    assert max(sum(event["args"].values()) for event in counters) == pytest.approx(
        fixed + peak / MIB, abs=0.01
    )
    series = {frozenset(event["args"]) for event in counters}
    assert len(series) == 1
    assert {"parameter", "feature map", "workspace"} <= next(iter(series))
    assert all(a["args"] != b["args"] for a, b in pairwise(counters))


def test_a_timeline_without_memory_has_no_counter(sample: Sample) -> None:
    assert events(trace(sample, replace(sample.measured, memory=())), "C") == []


def test_the_smallest_plan() -> None:
    sample = turns_sample()
    found = trace(sample, sample.predicted)
    assert [(event["name"], event["ts"], event["dur"]) for event in events(found, "X")] == [
        ("forward", 0, 1000),
        ("update", 1000, 500),
    ]


def test_any_name_makes_a_readable_trace() -> None:
    sample = ring_sample(num_layers=3, layer_name='</script>"\n\ud800µ')
    text = chrome_trace(sample.plan, sample.program, sample.profiles, sample.predicted)
    assert text.isascii()
    names = {event["name"] for event in json.loads(text)["traceEvents"]}
    assert '</script>"\\n\\ud800µ.0.attention' in names


def test_a_timeline_or_profiles_of_another_plan_are_refused(sample: Sample) -> None:
    other = turns_sample()
    with pytest.raises(PlanError, match="instructions, but the timeline names number"):
        chrome_trace(other.plan, other.program, other.profiles, sample.predicted)
    with pytest.raises(PlanError, match="made from profiles"):
        chrome_trace(sample.plan, sample.program, other.profiles, sample.predicted)
    spans = tuple(replace(span, lane=Lane.IN) for span in sample.predicted.spans)
    with pytest.raises(PlanError, match="but the timeline has it on 'host to device'"):
        trace(sample, replace(sample.predicted, spans=spans))
