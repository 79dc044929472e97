"""Sub-arrays of small workloads on the GPU, and the programs that are made for them, once per process."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from decided_plans import decided
from planned import Case, State, train_plain

from trainmux.fleet._other_steps import PlannedPrograms
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.ir import Multiplexing, Program

NAMES = ("mlp", "cnn_with_dropout", "transformer_with_dropout", "lstm_with_dropout")
NUM_STEPS = 8
WAYS = {
    # One array; the paper's pair; a ring of three; a ring whose members train side by side, one with fewer.
    "turns": ((2,), Multiplexing.TURNS, 1),
    "pair": ((1, 1), Multiplexing.RING, 1),
    "ring": ((1, 1, 1), Multiplexing.RING, 1),
    "beside": ((2, 2, 1), Multiplexing.RING, 2),
}


@functools.cache
def case_of(name: str, way: str) -> Case:
    widths, _, num_branches = WAYS[way]
    return Case(name, widths, num_branches=num_branches, device="cuda", lowering="aten", engine="reference")


@functools.cache
def expected_of(name: str, way: str, num_steps: int = NUM_STEPS) -> list[State]:
    """What the sub-arrays compute without a plan."""
    return train_plain(case_of(name, way), num_steps)


@functools.cache
def program_of(name: str, way: str, *, swaps: bool, recomputes: bool, with_static: bool = False) -> Program:
    return decided(
        case_of(name, way), WAYS[way][1], swaps=swaps, recomputes=recomputes, with_static=with_static
    )


def planned_of(case: Case, program: Program, *, captured: bool, **options: Any) -> PlannedRunner:
    """The case's groups under a program: enqueued instruction by instruction, or as CUDA graphs."""
    own = PlannedPrograms(case.steps, case.graphs, program, case.branches)
    config = replace(case.fleet._config, engine="cuda_graphs" if captured else "reference")
    return PlannedRunner(None, case.groups(), "own", own, config, None, **options)  # type: ignore[arg-type]
