"""Which lane an instruction runs on. The verifier has a reading of its own."""

from __future__ import annotations

from trainmux.ir._program import Compute, Free, Instruction, Lane, Offload, Prefetch, Recompute, Wait


def lane_of(instruction: Instruction) -> Lane:
    """Where an instruction runs; ``Free`` belongs to the compute lane."""
    match instruction:
        case Compute() | Recompute() | Free():
            return Lane.COMPUTE
        case Offload():
            return Lane.OUT
        case Prefetch():
            return Lane.IN
        case Wait():
            return instruction.lane
