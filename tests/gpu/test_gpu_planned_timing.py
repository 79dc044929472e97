"""Lanes that fall asleep at random change no bit, and races are seen where waits are taken away."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from decided_plans import num_decisions
from planned import differences, train_planned
from planned_on_gpu import WAYS, case_on_gpu
from planted_races import RACES

from trainmux.engine import _planned_engine
from trainmux.engine._lanes import StreamLanes
from trainmux.ir import Lane, Prefetch
from trainmux.runtime import borrowed_stream

NUM_SEEDS = 12
NUM_STEPS = 3
SHARE = 0.1
MAX_CYCLES = 100_000

CASES = [
    # With graphs a seed's sleeps are captured with everything else.
    ("mlp", "ring", True),
    ("cnn_with_dropout", "pair", False),
    ("mlp", "beside", False),
    ("cnn_with_dropout", "beside", True),
]


class SleepyLanes(StreamLanes):
    """Before and after what is enqueued on it, a lane may sleep, and so may each of its branches."""

    seed = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._random = random.Random(self.seed)

    def _doze(self, stream: torch.cuda.Stream | None = None) -> None:
        if self._random.random() < SHARE:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(self._random.randrange(1, MAX_CYCLES))

    @contextmanager
    def on(self, lane: Lane, position: int) -> Iterator[None]:
        self._doze(self._streams[lane])
        with super().on(lane, position):
            yield

    @contextmanager
    def branch(self, number: int) -> Iterator[None]:
        with super().branch(number):
            self._doze()
            yield

    def issued(self, lane: Lane, position: int) -> None:
        self._doze(self._streams[lane])
        super().issued(lane, position)


@pytest.mark.parametrize(("name", "way", "captured"), CASES)
def test_no_timing_of_the_lanes_changes_a_bit(
    name: str, way: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_on_gpu(name, way)
    program = case.program(WAYS[way][1], swaps=True, recomputes=True, with_static=True)
    assert num_decisions(program)[Prefetch] > 0, "expected copies, which are what can come too late"
    monkeypatch.setattr(_planned_engine, "StreamLanes", SleepyLanes)
    wrong = {}
    for seed in range(NUM_SEEDS):
        monkeypatch.setattr(SleepyLanes, "seed", seed)
        planned = case.planned(program, captured=captured, poisons=bool(seed % 2))
        different = differences(train_planned(case, planned, NUM_STEPS), case.expected(NUM_STEPS))
        if different:
            wrong[seed] = different
    assert wrong == {}


def test_the_sanitizer_finds_planted_races_and_nothing_else() -> None:
    """Each program has a process of its own, in which the sanitizer stays switched on."""
    expected = {
        ("mlp", "ring", "none"): "no race",
        ("cnn_with_dropout", "pair", "none"): "no race",
        **{("mlp", "ring", race): "a race" for race in RACES},
    }
    script = Path(__file__).with_name("sanitized_planned.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for arguments in expected
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)[-6000:]
    # As it exits, Python may have torch's hooks complain.
    verdicts = [[line for line in text.splitlines() if line in expected.values()] for text in said]
    assert verdicts == [[verdict] for verdict in expected.values()], "\n".join(said)[-6000:]


def test_no_lane_is_another_one() -> None:
    """Torch gives out 32 streams in turn; a copy lane on the compute lane's stream would hold kernels up."""
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(40):
        torch.cuda.Stream(device)  # somebody else's
        with borrowed_stream(device) as compute, torch.cuda.stream(compute):
            lanes = StreamLanes(device)
            with lanes.part(frozenset()):
                assert len({stream.cuda_stream for stream in lanes._streams.values()}) == 3
