"""When segments are run, captured and replayed, with graphs that exist on paper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainmux.colocate import _segment_graphs
from trainmux.colocate._segment_graphs import SegmentGraphs
from trainmux.errors import BudgetError
from trainmux.runtime import MATRIX_LIBRARIES_BYTES

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


class PaperGraph:
    """Replays by running; what it was captured from is not run then."""

    def __init__(self, run: Callable[[], None], log: list[str]) -> None:
        self._run, self._log = run, log
        self.was_reset = False

    def replay(self) -> None:
        assert not self.was_reset
        self._log.append("replay")
        self._run()

    def reset(self) -> None:
        self.was_reset = True


class PaperRoom:
    """What `SegmentGraphs` needs of a `CaptureRoom`."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.stream = PaperStream()
        self.graphs: list[PaperGraph] = []
        self.num_captures = 0
        self.pool_bytes = self.graph_bytes = 0

    def capture_all(
        self, rehearse: Callable[[], None], runs: Sequence[Callable[[], None]]
    ) -> list[PaperGraph]:
        for _ in range(2):
            rehearse()
        self._log.append(f"capture {len(runs)}")
        self.num_captures += len(runs)
        found = [PaperGraph(run, self._log) for run in runs]
        self.graphs += found
        return found

    def drop_kept(self) -> None:
        self._log.append("drop")

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        self._log.append("in pool")
        yield


class PaperStream:
    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class PaperTorch:
    """What torch holds, and how much it may."""

    def __init__(self) -> None:
        self.fraction = 1.0
        self.fractions: list[float] = []
        self.reserved = 100 * MIB

    def set_fraction(self, fraction: float, device: Any) -> None:
        self.fraction = fraction
        self.fractions.append(fraction)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> PaperTorch:
    paper = PaperTorch()
    current = PaperStream()
    monkeypatch.setattr(_segment_graphs, "CaptureRoom", lambda device, *, deterministic: PaperRoom(log))
    monkeypatch.setattr(_segment_graphs, "kernel_settings", lambda *, deterministic: contextlib.nullcontext())
    for name, fake in {
        "current_stream": lambda device=None: current,
        "stream": lambda stream: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "memory_reserved": lambda device=None: paper.reserved,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1000 * MIB),
        "get_per_process_memory_fraction": lambda device: paper.fraction,
        "set_per_process_memory_fraction": paper.set_fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return paper


def make(scratch_bytes: int = 164 * MIB) -> SegmentGraphs:
    return SegmentGraphs(DEVICE, deterministic=False, scratch_bytes=scratch_bytes)


def test_a_usual_step_is_rehearsed_as_a_whole(memory: PaperTorch, log: list[str]) -> None:
    made = make().new_set([lambda: log.append("a"), None, lambda: log.append("b")])
    made.capture_all()
    assert log == ["a", "b", "a", "b", "capture 2"]
    log.clear()
    for number in range(3):
        made.run(number)
    assert log == ["replay", "a", "replay", "b"]


def test_only_so_many_steps_are_captured(memory: PaperTorch, log: list[str]) -> None:
    graphs = make()
    sets = [graphs.new_set([lambda: None]) for _ in range(_segment_graphs._MAX_SETS + 1)]
    for made in sets:
        for _ in range(3):
            made.run(0)
    assert graphs.num_captures == _segment_graphs._MAX_SETS
    assert log.count("in pool") == _segment_graphs._MAX_SETS + 3


def test_graphs_that_take_all_that_is_kept_for_them_stay_alone(memory: PaperTorch, log: list[str]) -> None:
    graphs = make()
    graphs.new_set([lambda: None]).capture_all()
    graphs._room.graph_bytes = _segment_graphs.GRAPHS_BYTES
    other = graphs.new_set([lambda: log.append("other")])
    log.clear()
    for _ in range(3):
        other.run(0)
    assert log == ["in pool", "other"] * 3


def test_torch_is_held_to_what_was_promised(memory: PaperTorch, log: list[str]) -> None:
    graphs = make(scratch_bytes=MATRIX_LIBRARIES_BYTES + 50 * MIB)
    graphs.new_set([lambda: None]).capture_all()
    assert memory.fractions == [0.15, 1.0]  # of 1000 MiB: 100 that are held, and 50
    memory.reserved = 400 * MIB  # others came, and the job has taken some of its own
    graphs._room.pool_bytes = 20 * MIB  # type: ignore[misc]
    graphs.new_set([lambda: None]).capture_all()
    assert memory.fractions[2:] == [0.43, 1.0]
    memory.reserved = 30 * MIB  # they have gone
    graphs.new_set([lambda: None]).capture_all()
    assert memory.fractions[4:] == [0.06, 1.0]
    graphs._room.pool_bytes = 60 * MIB  # type: ignore[misc]
    graphs.new_set([lambda: None]).capture_all()
    assert memory.fractions[6:] == [0.03, 1.0]  # it has all that was promised


def test_a_job_that_needs_more_is_told_how_much_it_had(memory: PaperTorch, log: list[str]) -> None:
    def hungry() -> None:
        raise torch.OutOfMemoryError("no more")

    graphs = make(scratch_bytes=96 * MIB)
    with pytest.raises(BudgetError, match=r"at most 96\.0 MiB"):
        graphs.new_set([hungry]).capture_all()
    with pytest.raises(BudgetError):
        graphs.new_set([hungry]).run(0)
    assert memory.fraction == 1.0


def test_graphs_go_when_the_job_goes(memory: PaperTorch, log: list[str]) -> None:
    graphs = make()
    made = graphs.new_set([lambda: None])
    made.capture_all()
    (graph,) = graphs._room.graphs  # type: ignore[attr-defined]
    graphs.close()
    assert graph.was_reset
    assert log[-1] == "drop"
