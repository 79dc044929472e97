"""Dependencies between a step and tiny copies: where they are, and what each of them costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainmux.profiling import _measured
from trainmux.profiling._sync_cost import sync_points


@given(st.integers(0, 5000))
def test_copies_have_time_to_end_before_they_are_waited_for(num_nodes: int) -> None:
    """Each is waited for once, three nodes later at least, and no two dependencies are at the same node."""
    copies, waits = sync_points(num_nodes)
    assert len(copies) == len(waits) <= 32
    assert len(copies) >= min(num_nodes // 8 - 1, 15)
    assert all(rank + 1 < num_nodes for rank in waits)  # a node follows that waits
    places = sorted([*copies, *(rank + 1 for rank in waits)])
    assert all(after - before >= 3 for before, after in pairwise(places))
    assert [rank in copies for rank in places] == [number % 2 == 0 for number in range(len(places))]


class Recorder:
    """A device that is made up: what is begun and ended, in order. A step with copies takes 13 seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int, fails_at: str = "") -> None:
        self.seen: list[str] = []
        self.fails_at = fails_at
        self.num_dependencies = sum(map(len, sync_points(num_nodes)))
        self._graph = SimpleNamespace(steps=[None] * num_nodes)
        monkeypatch.setattr(_measured, "TinyCopies", self.copies)
        monkeypatch.setattr(_measured, "capturing", lambda graph, stream: self.within("capture"))
        monkeypatch.setattr(_measured, "_sustained_seconds", lambda graph: 13.0)
        for name in ("CUDAGraph", "current_stream", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *arguments: self)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.seen.append(name)
        try:
            yield
        finally:
            self.seen.append(f"end of {name}")

    def copies(self, num_nodes: int, device: torch.device) -> Any:
        self._fail("memory")
        self._stream = self.within("copies")
        return self

    def __enter__(self) -> None:
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)

    def run_all(self, behind: Callable[[int], None]) -> None:
        self.seen.append("step")
        self._fail("step")

    def seconds(self, without: float) -> float:
        given: Any = (self._graph, lambda: self, torch.device("cuda"), without)
        return _measured._sync_seconds(*given)

    def _fail(self, what: str) -> None:
        if self.fails_at == what:
            raise RuntimeError("out of memory")


def test_a_step_is_captured_with_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Recorder(monkeypatch, num_nodes=40)
    assert device.seconds(without=10.0) == 3.0 / device.num_dependencies
    assert device.seen == ["capture", "copies", "step", "end of copies", "end of capture"]
    assert device.seconds(without=14.0) == 0.0


def test_what_cannot_be_captured_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the stream of copies is joined before the capture ends."""
    device = Recorder(monkeypatch, num_nodes=40, fails_at="step")
    assert device.seconds(without=10.0) == 0.0
    assert device.seen == ["capture", "copies", "step", "end of copies", "end of capture"]
    for num_nodes, fails_at in ((40, "memory"), (8, "")):
        device = Recorder(monkeypatch, num_nodes, fails_at)
        assert device.seconds(without=10.0) == 0.0
        assert device.seen == []
