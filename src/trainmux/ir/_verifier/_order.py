"""The order of nodes: each in the part where it belongs, once, in rank order, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.ir._program import Compute, Program
from trainmux.ir._verifier._facts import StepFacts
from trainmux.ir._verifier._report import Findings, Names, ViolationKind

_MAX_NAMES = 3


@dataclass(frozen=True)
class Share:
    """One sub-array's work in a part: ``num_nodes`` nodes, from rank ``start`` on.

    Behind the last rank comes rank 0 of the next step.
    """

    start: int
    num_nodes: int


@dataclass(frozen=True)
class Shares:
    """The shares of all sub-arrays in each part. ``is_ring`` is false for sub-arrays that run in turns."""

    is_ring: bool
    prologue: tuple[Share, ...]
    body: tuple[Share, ...]
    epilogue: tuple[Share, ...]


def expected_shares(program: Program, facts: Sequence[StepFacts]) -> Shares:
    """Turns where prologue and epilogue compute nothing, otherwise a ring (see `Program`)."""
    nothing = tuple(Share(0, 0) for _ in facts)
    whole = tuple(Share(0, len(step.nodes)) for step in facts)
    around = (*program.prologue.instructions, *program.epilogue.instructions)
    if not facts or not any(isinstance(instruction, Compute) for instruction in around):
        return Shares(False, nothing, whole, nothing)
    first = facts[0]
    num_nodes = len(first.nodes)
    return Shares(
        is_ring=True,
        prologue=(Share(0, first.num_forward), *nothing[1:]),
        body=(Share(first.num_forward, num_nodes), *whole[1:]),
        epilogue=(Share(first.num_forward, num_nodes - first.num_forward), *nothing[1:]),
    )


class PartOrder:
    """Follows the nodes of one part. Steps are counted from the one that is under way as the part begins."""

    def __init__(
        self,
        part: str,
        shares: Sequence[Share],
        facts: Sequence[StepFacts],
        *,
        is_ring: bool,
        names: Names,
        findings: Findings,
    ) -> None:
        self._part = part
        self._shares = shares
        self._facts = facts
        self._is_ring = is_ring
        self._names = names
        self._findings = findings
        self._runs = [bytearray(share.num_nodes) for share in shares]
        self._next = [0] * len(shares)
        self._is_out_of_order = [False] * len(shares)
        self._stage = 0
        self._is_out_of_stage = False

    def compute(self, position: int, sub_array: int, node: int) -> int:
        """Check a Compute against the share; returns the step that the node belongs to."""
        share, num_nodes = self._shares[sub_array], len(self._facts[sub_array].nodes)
        index = (node - share.start) % num_nodes
        if index >= share.num_nodes:
            self._refuse(position, f"{self._names.node(sub_array, node)} does not belong in the {self._part}")
        elif self._runs[sub_array][index]:
            self._refuse(
                position,
                f"{self._names.node(sub_array, node)} must be computed once per pass, but runs a second time",
            )
        else:
            if index != self._next[sub_array] and not self._is_out_of_order[sub_array]:
                self._is_out_of_order[sub_array] = True
                expected = (share.start + self._next[sub_array]) % num_nodes
                self._refuse(
                    position,
                    f"nodes must run in rank order, so {self._names.node(sub_array, expected)} is next, but "
                    f"got {self._names.node(sub_array, node)}",
                )
            self._runs[sub_array][index] = 1
            self._next[sub_array] = max(self._next[sub_array], index + 1)
            self._check_stage(position, sub_array, node)
        return (share.start + index) // num_nodes

    def recompute(self, position: int, sub_array: int, node: int) -> int:
        """Check that the node has run in the step that is under way; returns that step."""
        ran = self.num_ran(sub_array)
        num_nodes = len(self._facts[sub_array].nodes)
        step = max(0, (ran - 1) // num_nodes)
        if node >= ran - step * num_nodes:
            self._refuse(
                position,
                f"{self._names.node(sub_array, node)} is recomputed, but has not run in this step yet",
            )
        return step

    def num_ran(self, sub_array: int) -> int:
        """Nodes that have run since the step that was under way at the part's beginning began."""
        return self._shares[sub_array].start + self._next[sub_array]

    def finish(self) -> None:
        """Report the nodes that did not run."""
        for sub_array, runs in enumerate(self._runs):
            num_nodes = len(self._facts[sub_array].nodes)
            start = self._shares[sub_array].start
            missing = [(start + index) % num_nodes for index, run in enumerate(runs) if not run]
            if missing:
                listed = ", ".join(self._names.node(sub_array, node) for node in missing[:_MAX_NAMES])
                more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
                self._refuse(-1, f"every node must be computed once per pass, but {listed}{more} never run")

    def _check_stage(self, position: int, sub_array: int, node: int) -> None:
        """In turns a stage is a sub-array; in a ring stage i is the backward pass of i and a forward pass."""
        is_forward = node < self._facts[sub_array].num_forward
        stage = (sub_array - 1) % len(self._facts) if self._is_ring and is_forward else sub_array
        if stage < self._stage and not self._is_out_of_stage:
            self._is_out_of_stage = True
            self._refuse(
                position,
                f"{self._names.node(sub_array, node)} belongs to stage {stage}, but stage {self._stage} "
                f"has begun ({'ring' if self._is_ring else 'turns'})",
            )
        self._stage = max(self._stage, stage)

    def _refuse(self, position: int, text: str) -> None:
        self._findings.add(ViolationKind.ORDER, self._part, position, text)
