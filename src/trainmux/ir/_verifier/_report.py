"""The verifier's findings, as records, and the list that gathers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainmux.ir._profile import Profile
from trainmux.ir._program import Compute, Free, Instruction, Offload, Prefetch, Recompute, Wait

MAX_REPORTED = 20
"""Violations that are kept: one fault breaks much of what follows it, and the first ones explain it."""


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


class Findings:
    """Gathers violations: the first `MAX_REPORTED` of them, and how many there are in all."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.count = 0

    def add(self, kind: ViolationKind, part: str, position: int, text: str) -> None:
        self.count += 1
        if len(self.violations) < MAX_REPORTED:
            self.violations.append(Violation(kind, part, position, text))


class Names:
    """Instructions, nodes and tensors in words. Nothing here fails on a number that names nothing."""

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self._profiles = profiles

    def node(self, sub_array: int, node: int) -> str:
        """A node by name, rank and sub-array."""
        known = 0 <= sub_array < len(self._profiles) and 0 <= node < len(self._profiles[sub_array].nodes)
        name = f"'{self._profiles[sub_array].nodes[node].name}' " if known else ""
        return f"node {name}(rank {node} of sub-array {sub_array})"

    def tensor(self, sub_array: int, tensor: int) -> str:
        """A tensor by name, number and sub-array; -1 is a workspace."""
        if tensor == -1:
            return f"a workspace (sub-array {sub_array})"
        known = 0 <= sub_array < len(self._profiles) and 0 <= tensor < len(self._profiles[sub_array].tensors)
        name = f"'{self._profiles[sub_array].tensors[tensor].name}' " if known else ""
        return f"tensor {name}({tensor} of sub-array {sub_array})"

    def instruction(self, instruction: Instruction) -> str:
        """An instruction with what it works on."""
        match instruction:
            case Compute(sub_array, node):
                return f"Compute of {self.node(sub_array, node)}"
            case Recompute(sub_array, node, _):
                return f"Recompute of {self.node(sub_array, node)}"
            case Offload(sub_array, tensor) | Prefetch(sub_array, tensor) | Free(sub_array, tensor):
                return f"{type(instruction).__name__} of {self.tensor(sub_array, tensor)}"
            case Wait(lane, on):
                return f"Wait of lane {lane.name} for [{on}]"
