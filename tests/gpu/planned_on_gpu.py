"""Sub-arrays of small workloads on the GPU, in the ways that they share it."""

from __future__ import annotations

from planned import Case, case_of

from trainmux.ir import Multiplexing

NUM_STEPS = 4
WAYS = {
    # One array; the paper's pair; a ring of three; a ring whose members train side by side, one with fewer.
    "turns": ((2,), Multiplexing.TURNS, 1),
    "pair": ((1, 1), Multiplexing.RING, 1),
    "ring": ((1, 1, 1), Multiplexing.RING, 1),
    "beside": ((2, 2, 1), Multiplexing.RING, 2),
}


def case_on_gpu(name: str, way: str) -> Case:
    widths, _, num_branches = WAYS[way]
    return case_of(name, widths, "aten", num_branches, device="cuda", lowering="aten", engine="reference")
