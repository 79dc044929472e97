"""A captured graph is destroyed only when no graph captured beside it is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainmux.engine import _cuda_graphs
from trainmux.engine._cuda_graphs import CudaGraphEngine, _Captured


class Program:
    pass


def engine_with(*programs: Any) -> CudaGraphEngine:
    """An engine that has captured ``programs``, without a device."""
    engine = object.__new__(CudaGraphEngine)
    engine._retired = []
    engine._captured = {id(program): (program, captured()) for program in programs}
    return engine


def captured() -> _Captured:
    return _Captured(object(), (), (), ())  # type: ignore[arg-type]


def test_a_graph_lives_on_while_its_neighbour_is_in_use() -> None:
    first, second = Program(), Program()
    engine = engine_with(first, second)
    graph = engine._captured[id(first)][1].graph  # type: ignore[union-attr]
    engine.forget([first])  # type: ignore[list-item]
    assert engine._retired == [graph]
    assert id(first) not in engine._captured
    engine.forget([second])  # type: ignore[list-item]
    assert engine._retired == []
    assert engine._captured == {}


def test_programs_that_were_never_captured_leave_nothing_behind() -> None:
    program, uncaptured = Program(), Program()
    engine = engine_with(program)
    engine._captured[id(uncaptured)] = (uncaptured, None)  # type: ignore[assignment]
    engine.forget([uncaptured, Program()])  # type: ignore[list-item]
    assert engine._retired == []
    assert list(engine._captured) == [id(program)]
    engine._captured[id(uncaptured)] = (uncaptured, None)  # type: ignore[assignment]
    engine.forget([program])  # type: ignore[list-item]
    assert engine._retired == []


def test_their_number_is_bounded() -> None:
    kept = Program()
    engine = engine_with(kept)
    for _ in range(_cuda_graphs._MAX_RETIRED + 1):
        program = Program()
        engine._captured[id(program)] = (program, captured())  # type: ignore[assignment]
        engine.forget([program])  # type: ignore[list-item]
    assert engine._retired == []
    assert engine._captured == {}, "expected the neighbour to be captured anew at its next run"


def test_an_engine_that_captures_nothing_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a stream's workspaces were taken")

    monkeypatch.setattr(_cuda_graphs, "CaptureRoom", refuse)
    engine = CudaGraphEngine(torch.device("cuda", 0))
    engine.forget([Program()])  # type: ignore[list-item]
    assert engine.num_captures == 0
    assert engine.memory is None
