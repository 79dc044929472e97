"""Lanes of replayed steps, from the events of torch's profiler."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_scripts import benchmark_script


def event(category: str, name: str, begin: float, seconds: float) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": begin, "dur": seconds}


def test_lanes_of_two_steps() -> None:
    found = benchmark_script("planned_trace").lanes_of(
        [
            event("kernel", "product", 0, 1000),
            event("kernel", "sum", 500, 1000),  # on another branch
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1200, 600),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1700, 200),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1504, 96),
            event("gpu_memset", "Memset (Device)", 1900, 100),
            event("cpu_op", "aten::mm", 0, 99999),
            {"ph": "M", "name": "process_name"},
        ],
        2,
    )
    assert found["step_ms"] == pytest.approx(1.0)
    assert found["compute_ms"] == pytest.approx((1500 + 96 + 100) / 2e3)
    assert found["stall_ms"] == pytest.approx(304 / 2e3)
    assert found["copy_ms"] == pytest.approx(700 / 2e3)
    assert found["hidden_copy_ms"] == pytest.approx((300 + 96) / 2e3)
    assert found["busy_ms_by_lane"]["host to device"] == pytest.approx(0.3)
    assert found["busy_ms_by_lane"]["device to host"] == pytest.approx(0.1)
    gaps = {most: row for most, row in found["gaps_by_most_us"].items() if row["count"]}
    assert gaps == {"5": {"count": 0.5, "ms": 0.002}, "inf": {"count": 0.5, "ms": pytest.approx(0.15)}}
    assert list(found["ms_by_kernel"]) == [
        "product",
        "sum",
        "Memset (Device)",
        "Memcpy DtoD (Device -> Device)",
    ]


def test_nothing_is_known_where_no_kernel_was_seen() -> None:
    trace = benchmark_script("planned_trace")
    assert trace.lanes_of([event("cpu_op", "aten::mm", 0, 10)], 1) == {}
    ran = []
    assert trace.traced_lanes(lambda: ran.append(1), 1) == {}
    assert ran == [1]
