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
from planned_on_gpu import case_of, expected_of, planned_of, program_of
from planted_races import RACES

from trainmux.engine import _planned_engine
from trainmux.engine._lanes import StreamLanes
from trainmux.ir import Lane, Prefetch
from trainmux.runtime import borrowed_stream

NUM_SEEDS = 30
NUM_STEPS = 3
SHARE = 0.1
MAX_CYCLES = 100_000

CASES = [
    # With graphs a seed's sleeps are captured with everything else.
    ("mlp", "ring", True),
    ("cnn_with_dropout", "pair", False),
    ("transformer_with_dropout", "beside", True),
    ("cnn_with_dropout", "beside", False),
]


class SleepyLanes(StreamLanes):
    """Before and after what is enqueued on it, a lane may sleep, and so may each of its branches."""

    seed = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._random = random.Random(self.seed)

    def _doze(self, lane: Lane) -> None:
        if self._random.random() < SHARE:
            with torch.cuda.stream(self._streams[lane]):
                torch.cuda._sleep(self._random.randrange(1, MAX_CYCLES))

    @contextmanager
    def on(self, lane: Lane, position: int) -> Iterator[None]:
        self._doze(lane)
        with super().on(lane, position):
            yield

    @contextmanager
    def branch(self, number: int) -> Iterator[None]:
        with super().branch(number):
            if self._random.random() < SHARE:
                torch.cuda._sleep(self._random.randrange(1, MAX_CYCLES))
            yield

    def issued(self, lane: Lane, position: int) -> None:
        self._doze(lane)
        super().issued(lane, position)


@pytest.mark.parametrize(("name", "way", "captured"), CASES)
def test_no_timing_of_the_lanes_changes_a_bit(
    name: str, way: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(name, way)
    program = program_of(name, way, swaps=True, recomputes=True, with_static=True)
    assert num_decisions(program)[Prefetch] > 0, "expected copies, which are what can come too late"
    monkeypatch.setattr(_planned_engine, "StreamLanes", SleepyLanes)
    wrong = {}
    for seed in range(NUM_SEEDS):
        monkeypatch.setattr(SleepyLanes, "seed", seed)
        planned = planned_of(case, program, captured=captured, poisons=bool(seed % 2))
        different = differences(train_planned(case, planned, NUM_STEPS), expected_of(name, way, NUM_STEPS))
        if different:
            wrong[seed] = different
    assert wrong == {}


SANITIZED = Path(__file__).with_name("sanitized_planned.py")


def sanitized(*arguments: str) -> str:
    """What torch's sanitizer says of a program; in a process of its own, which it stays switched on in."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(SANITIZED), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(("name", "way"), [("mlp", "ring"), ("cnn_with_dropout", "pair")])
def test_the_sanitizer_finds_nothing_to_report(name: str, way: str) -> None:
    assert sanitized(name, way, "none") == "no race"


@pytest.mark.parametrize("race", RACES[:2])
def test_the_sanitizer_finds_planted_races(race: str) -> None:
    """Two of three: it knows nothing of the host's memory, where the third one happens; the verifier does."""
    assert sanitized("mlp", "ring", race) == "a race"


def test_no_lane_is_another_one() -> None:
    """Torch gives out 32 streams in turn; a copy lane on the compute lane's stream would hold kernels up."""
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(40):
        torch.cuda.Stream(device)  # somebody else's
        with borrowed_stream(device) as compute, torch.cuda.stream(compute):
            lanes = StreamLanes(device)
            with lanes.part(frozenset()):
                assert len({stream.cuda_stream for stream in lanes._streams.values()}) == 3
