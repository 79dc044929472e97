"""A fused graph becomes a program; an engine runs it step by step."""

from trainmux.engine._cuda_graphs import CudaGraphEngine
from trainmux.engine._program import (
    TAIL_INPUTS,
    ForwardProgram,
    ReferenceEngine,
    StepProgram,
    build_forward,
    build_step,
)
from trainmux.engine._sub_arrays import first_rows, forward_in_sub_arrays, in_sub_arrays
from trainmux.engine._tail import UpdateSettings

__all__ = [
    "TAIL_INPUTS",
    "CudaGraphEngine",
    "ForwardProgram",
    "ReferenceEngine",
    "StepProgram",
    "UpdateSettings",
    "build_forward",
    "build_step",
    "first_rows",
    "forward_in_sub_arrays",
    "in_sub_arrays",
]
