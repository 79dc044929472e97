"""Lanes of steps as they are replayed: which kernels and copies the device ran when, by torch's profiler.

`Fleet.watch` has a time for every instruction, but of a step that is run instruction by instruction and takes
longer for it. Here the captured graphs run as they do in training.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trainmux.simulate._measured_timeline import Interval, _common, _length, _union

_GAPS_US = (1, 2, 3, 5, 10, 20, 50, math.inf)
_COPIES = {"HtoD": "host to device", "DtoH": "device to host"}


def traced_lanes(train: Callable[[], None], num_steps: int) -> dict[str, Any]:
    """What ``num_steps`` steps that ``train`` runs did on the device, for one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        train()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return lanes_of(events, num_steps)


def lanes_of(events: Iterable[Mapping[str, Any]], num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step in which nodes ran, in which copies did, and in which both did; and the gaps."""
    spans: dict[str, list[Interval]] = {lane: [] for lane in ("compute", *_COPIES.values())}
    by_kernel: dict[str, float] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        lane = _lane_of(event)
        spans[lane].append((event["ts"], event["ts"] + event["dur"]))
        if lane == "compute":
            by_kernel[event["name"]] = by_kernel.get(event["name"], 0.0) + event["dur"] / 1e3 / num_steps
    if not spans["compute"]:
        return {}
    busy = {lane: _union(found) for lane, found in spans.items()}
    copies = _union(interval for lane in _COPIES.values() for interval in busy[lane])
    everything = [interval for found in busy.values() for interval in found]
    begin, end = min(first for first, _ in everything), max(last for _, last in everything)

    def each_ms(intervals: Iterable[Interval]) -> float:
        return _length(intervals) / 1e3 / num_steps

    compute = busy["compute"]
    between = [(before[1], after[0]) for before, after in pairwise(compute)]
    step_ms, compute_ms = (end - begin) / 1e3 / num_steps, each_ms(compute)
    longest = sorted(by_kernel.items(), key=lambda row: -row[1])
    return {
        "step_ms": step_ms,
        "compute_ms": compute_ms,
        "stall_ms": step_ms - compute_ms,
        "gaps_by_most_us": {
            str(most): {"count": len(found) / num_steps, "ms": each_ms(found)}
            for most, found in _by_length(between).items()
        },
        "copy_ms": each_ms(copies),
        "hidden_copy_ms": each_ms(_common(compute, copies)),
        "busy_ms_by_lane": {lane: each_ms(found) for lane, found in busy.items()},
        "ms_by_kernel": dict(longest[:40]),
    }


def _lane_of(event: Mapping[str, Any]) -> str:
    """Copies that stay on the device are compute."""
    if event["cat"] == "gpu_memcpy":
        for way, lane in _COPIES.items():
            if way in event["name"]:
                return lane
    return "compute"


def _by_length(gaps: Iterable[Interval]) -> dict[float, list[Interval]]:
    """Intervals that last no longer than each of `_GAPS_US`, and longer than the one before."""
    found: dict[float, list[Interval]] = {most: [] for most in _GAPS_US}
    for begin, end in gaps:
        found[next(most for most in _GAPS_US if end - begin <= most)].append((begin, end))
    return found
