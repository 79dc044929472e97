"""A program on the clock: when each instruction runs on which lane, and what is in use meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from trainmux.ir._profile import ByteClass
from trainmux.ir._program import Compute, Free, Instruction, Lane, Offload, Prefetch, Recompute, Wait


def lane_of(instruction: Instruction) -> Lane:
    """The lane that an instruction runs on; the verifier decides this for itself."""
    match instruction:
        case Compute() | Recompute() | Free():
            return Lane.COMPUTE
        case Offload():
            return Lane.OUT
        case Prefetch():
            return Lane.IN
        case Wait():
            return instruction.lane


@dataclass(frozen=True)
class Span:
    """One instruction of a part, by its position, from start to end in seconds since the part began."""

    lane: Lane
    instruction: int
    start: float
    end: float


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes in use while the instruction at ``instruction`` is the last one issued, by class.

    ``workspace_bytes`` are those of the instruction itself: its workspace, and what a recompute discards.
    """

    instruction: int
    bytes_by_class: tuple[tuple[ByteClass, int], ...]
    workspace_bytes: int


@dataclass(frozen=True)
class Timeline:
    """One pass through a part; ``source`` is ``"predicted"`` or ``"measured"``.

    ``compute_seconds`` is the time of all nodes, recomputes included; ``stall_seconds`` what the compute lane
    spent waiting, at its end too; ``copy_seconds`` the time in which at least one copy ran and
    ``hidden_copy_seconds`` the part of it in which a node ran as well.
    """

    source: str
    seconds: float
    compute_seconds: float
    recompute_seconds: float
    stall_seconds: float
    copy_seconds: float
    hidden_copy_seconds: float
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]
