"""The lane of an instruction, for everybody but the verifier, which decides for itself."""

from __future__ import annotations

from trainmux.ir._program import Compute, Free, Instruction, Lane, Offload, Prefetch, Recompute, Wait


def lane_of(instruction: Instruction) -> Lane:
    """The lane that an instruction runs on; ``Free`` belongs to the compute lane."""
    match instruction:
        case Compute() | Recompute() | Free():
            return Lane.COMPUTE
        case Offload():
            return Lane.OUT
        case Prefetch():
            return Lane.IN
        case Wait():
            return instruction.lane
