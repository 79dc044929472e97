"""Graphs, pools and copies of a CUDA device, as far as they can be seen without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainmux.engine import CudaGraphEngine, Transfers, _cuda_graphs, limited_growth
from trainmux.engine._capture_room import PoolNeed, peak_need
from trainmux.sizes import round_up

MIB = 1 << 20
MAIN, SIDE = 7, 8
DEVICE = torch.device("cuda", 0)


def event(action: str, address: int, size: int = 0, stream: int = MAIN) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": stream}


def test_a_pool_needs_the_most_bytes_live_at_a_time_on_each_stream() -> None:
    trace = [
        event("free_completed", 99),  # was there before
        event("alloc", 1, 30 * MIB),
        event("alloc", 2, 10 * MIB, SIDE),
        event("alloc", 3, 700),
        event("free_requested", 1),
        event("free_completed", 1),
        event("alloc", 1, 20 * MIB + 1),
        event("alloc", 4, 21 * MIB),
        event("free_completed", 2),
        event("alloc", 5, 3 * MIB, SIDE),
    ]
    assert peak_need(trace) == PoolNeed({MAIN: 42 * MIB, SIDE: 10 * MIB}, 2 * MIB)
    assert peak_need([]) == PoolNeed()
    held = PoolNeed({MAIN: 44 * MIB, SIDE: 4 * MIB})
    assert peak_need(trace).shortfall(held) == PoolNeed({MAIN: 0, SIDE: 6 * MIB}, 2 * MIB)


def test_growth_is_bounded_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 bytes 100 are reserved; the last share is in force. A lower bound that was there stays."""
    shares = [0.5]
    for name, fake in {
        "memory_reserved": lambda device: 100,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1000),
        "get_per_process_memory_fraction": lambda device: shares[-1],
        "set_per_process_memory_fraction": lambda share, device: shares.append(share),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(ValueError, match="inside"), limited_growth(DEVICE, 50):
        raise ValueError("inside")
    with limited_growth(DEVICE, 800):
        pass
    assert shares == [0.5, pytest.approx(0.15), 0.5, 0.5, 0.5]


# ---- graphs that are no longer wanted ------------------------------------------------------------------


class Program:
    pass


def engine_with(*programs: Any) -> CudaGraphEngine:
    """An engine that has captured ``programs``, without a device."""
    engine = CudaGraphEngine(DEVICE)
    for program in programs:
        captured = _cuda_graphs._Captured(object(), (), (), ())  # type: ignore[arg-type]
        engine._captured[id(program)] = (program, captured)
    return engine


def test_a_graph_is_destroyed_when_none_captured_beside_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a stream's workspaces were taken")

    monkeypatch.setattr(_cuda_graphs, "CaptureRoom", refuse)
    first, second, uncaptured = Program(), Program(), Program()
    engine = engine_with(first, second)
    engine._captured[id(uncaptured)] = (uncaptured, None)  # type: ignore[assignment]
    engine.forget([first, uncaptured, Program()])  # type: ignore[list-item]
    assert len(engine._retired) == 1
    engine.forget([second])  # type: ignore[list-item]
    assert not engine._retired
    assert not engine._captured
    assert (engine.num_captures, engine.memory) == (0, None)


def test_the_number_of_retired_graphs_is_bounded() -> None:
    programs = [Program() for _ in range(_cuda_graphs._MAX_RETIRED + 2)]
    engine = engine_with(*programs)
    engine.forget(programs[1:])  # type: ignore[arg-type]
    assert not engine._retired
    assert not engine._captured, "expected the neighbour to be captured anew at its next run"


# ---- copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_bytes", [64, 1000, 1 << 20])
def test_pieces_cover_every_element_once_and_fit_the_buffer(buffer_bytes: int) -> None:
    shapes = [(700,), (1,), (3, 5), (0,), (40, 40), (2,)]
    sources = [torch.randn(shape) for shape in shapes] + [torch.arange(77), torch.randn(9).to(torch.bfloat16)]
    pairs = [(torch.full_like(source, 0), source) for source in sources]
    for batch in Transfers(torch.device("cpu"), buffer_bytes)._batches(pairs):
        assert len(batch) == 1 or sum(round_up(piece.nbytes, 64) for piece, _ in batch) <= buffer_bytes
        for piece, given in batch:
            assert 0 < piece.nbytes <= max(buffer_bytes, piece.element_size())
            assert not piece.any()  # not copied before
            piece.copy_(given)
    assert all(torch.equal(destination, source) for destination, source in pairs)
