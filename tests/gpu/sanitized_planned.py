"""Run a planned program under torch's CUDA sanitizer and say whether it saw a race.

    python sanitized_planned.py MODEL WAY RACE

RACE is the name of a planted race, or "none". The helpers of the CPU's tests must be on the path.
"""

from __future__ import annotations

import sys

import torch
from planned import train_planned
from planned_on_gpu import WAYS, case_on_gpu
from planted_races import planted
from torch.cuda import _sanitizer

from trainmux.ir import find_violations


def main() -> None:
    name, way, race = sys.argv[1:]
    case = case_on_gpu(name, way)
    program = case.program(WAYS[way][1], swaps=True, recomputes=True, with_static=True)
    if race != "none":
        slab_bytes = program.slab_bytes
        program = next(
            each
            for each in planted(program, race)
            if find_violations(each, case.profiles, budget_bytes=slab_bytes)
        )
    planned = case.planned(program, poisons=True)
    torch.cuda.synchronize()
    _sanitizer.enable_cuda_sanitizer()
    try:
        train_planned(case, planned, 2)
    except Exception as error:  # a step that fails half-way says so, and has the cause
        if not isinstance(error.__cause__ or error, _sanitizer.CUDASanitizerErrors):
            raise
        print("a race")
        return
    print("no race")


if __name__ == "__main__":
    main()
