"""Violations as records, the list that gathers them, and the words for what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainmux.ir._profile import Profile
from trainmux.ir._program import Compute, Instruction, Recompute, Wait

WORKSPACE = -1
"""The tensor number of an instruction's own workspace."""


class ViolationKind(Enum):
    """The rule that is broken."""

    PROFILE = "profile"
    """The profile contradicts itself: nothing can be proved with it."""
    MALFORMED = "malformed"
    """A number that names no sub-array, node, tensor or earlier instruction."""
    ORDER = "order"
    """A node missing, run twice, out of rank order, or in the wrong part or stage."""
    NOT_RESIDENT = "not resident"
    """A tensor that is read, changed or copied is not on the device, or has no copy on the host."""
    MISSING_WAIT = "missing wait"
    """Two lanes touch the same bytes, and nothing makes the second wait for the first."""
    WRONG_VERSION = "wrong version"
    """A tensor holds another version than the one that the step without a plan reads there."""
    NOT_REPEATABLE = "not repeatable"
    """A node is run again that changes something in place, or may run only once."""
    FREE = "free"
    """Bytes given back that are not there, are still promised, or are the only copy."""
    LEAK = "leak"
    """A tensor is taken again, or left behind at the end of a part, although nothing gave it back."""
    BOUNDARY = "boundary"
    """A part begins with another state than the one before it leaves."""
    PLACEMENT = "placement"
    """A tenancy is missing, too many, of the wrong size or span, or outside the slab."""
    OVERLAP = "overlap"
    """Two tensors share bytes while both are live."""
    BUDGET = "budget"
    """More device bytes than the budget."""
    HOST_MEMORY = "host memory"
    """More host bytes than promised, or than there are."""


@dataclass(frozen=True)
class Violation:
    """A rule that a program breaks; ``position`` is -1 where no instruction of ``part`` is at fault."""

    kind: ViolationKind
    part: str
    position: int
    text: str

    def __str__(self) -> str:
        where = f"{self.part}[{self.position}]" if self.position >= 0 else self.part
        return f"{where}: {self.kind.value}: {self.text}"


class Report:
    """Gathers violations, each where the proof has got to: at ``position`` of ``part``.

    Also names things in words; nothing here fails on a number that names nothing.
    """

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self.violations: list[Violation] = []
        self.part, self.position = "program", -1
        self._profiles = profiles

    def add(self, kind: ViolationKind, text: str) -> None:
        self.violations.append(Violation(kind, self.part, self.position, text))

    def node(self, sub_array: int, node: int) -> str:
        nodes = self._profiles[sub_array].nodes if 0 <= sub_array < len(self._profiles) else ()
        name = f"'{nodes[node].name}' " if 0 <= node < len(nodes) else ""
        return f"node {name}(rank {node} of sub-array {sub_array})"

    def tensor(self, sub_array: int, tensor: int) -> str:
        if tensor == WORKSPACE:
            return f"a workspace (sub-array {sub_array})"
        tensors = self._profiles[sub_array].tensors if 0 <= sub_array < len(self._profiles) else ()
        name = f"'{tensors[tensor].name}' " if 0 <= tensor < len(tensors) else ""
        return f"tensor {name}({tensor} of sub-array {sub_array})"

    def instruction(self, instruction: Instruction) -> str:
        verb = type(instruction).__name__
        match instruction:
            case Wait(lane, on):
                return f"Wait of lane {lane.name} for [{on}]"
            case Compute(sub_array, node) | Recompute(sub_array, node):
                return f"{verb} of {self.node(sub_array, node)}"
            case _:
                return f"{verb} of {self.tensor(instruction.sub_array, instruction.tensor)}"
