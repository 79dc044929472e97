"""Where copies wait for a step's nodes and nodes for copies, and what each of these costs."""

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
from trainmux.profiling._meetings import meeting_places, meeting_seconds


@given(st.integers(0, 5000))
def test_copies_that_are_met_have_time_to_end(num_nodes: int) -> None:
    """Each is waited for once, three nodes later at least, and no two meetings are at the same node."""
    copies, waits = meeting_places(num_nodes)
    assert len(copies) == len(waits) <= 32
    assert len(copies) >= min(num_nodes // 8 - 1, 15)
    assert all(rank + 1 < num_nodes for rank in waits)  # behind which there is a node that waits
    places = sorted([*copies, *(rank + 1 for rank in waits)])
    assert all(after - before >= 3 for before, after in pairwise(places))
    assert [rank in copies for rank in places] == [number % 2 == 0 for number in range(len(places))]


def test_what_a_meeting_costs() -> None:
    assert meeting_seconds(10.0, 13.0, 6) == 0.5
    assert meeting_seconds(10.0, 9.9, 6) == 0.0
    assert meeting_seconds(10.0, 13.0, 0) == 0.0  # a step of a few nodes: not known


class Recorder:
    """A device that is made up: what is begun and ended, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int, fails_at: str = "") -> None:
        self.seen: list[str] = []
        self.fails_at = fails_at
        self._graph = SimpleNamespace(steps=[None] * num_nodes)
        monkeypatch.setattr(_measured, "Meetings", self.meetings)
        monkeypatch.setattr(_measured, "capturing", lambda graph, stream: self.within("capture"))
        monkeypatch.setattr(_measured, "_sustained_seconds", lambda graph: 13.0)
        for name in ("CUDAGraph", "current_stream", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.seen.append(name)
        try:
            yield
        finally:
            self.seen.append(f"end of {name}")

    def meetings(self, num_nodes: int, device: torch.device) -> Any:
        self._fail("memory")
        return FakeMeetings(self, sum(map(len, meeting_places(num_nodes))))

    def run_all(self, behind: Callable[[int], None]) -> None:
        self.seen.append("step")
        self._fail("step")

    def seconds(self) -> float:
        given: Any = (self._graph, lambda: self, torch.device("cuda"), 10.0)
        return _measured._meeting_seconds(*given)

    def _fail(self, what: str) -> None:
        if self.fails_at == what:
            raise RuntimeError("out of memory")


class FakeMeetings:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self.number = number
        self._lane = recorder.within("lane")

    def __enter__(self) -> None:
        self._lane.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lane.__exit__(*error)

    def __call__(self, rank: int) -> None:
        """Nothing to do."""


def test_a_step_is_captured_with_its_meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Recorder(monkeypatch, num_nodes=40)
    copies, waits = meeting_places(40)
    assert device.seconds() == 3.0 / (len(copies) + len(waits))
    assert device.seen == ["capture", "lane", "step", "end of lane", "end of capture"]


def test_what_cannot_be_captured_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the lane of copies ends before the capture does."""
    device = Recorder(monkeypatch, num_nodes=40, fails_at="step")
    assert device.seconds() == 0.0
    assert device.seen == ["capture", "lane", "step", "end of lane", "end of capture"]
    for num_nodes, fails_at in ((40, "memory"), (8, "")):
        device = Recorder(monkeypatch, num_nodes, fails_at)
        assert device.seconds() == 0.0
        assert device.seen == []
