"""The order of nodes: each in the part where it belongs, once, in rank order, stage by stage.

A sub-array's nodes are counted on from step to step: behind the last rank comes rank 0 of the next step. Its
share of a part is a range of these counts, from the step on that is under way as the part begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.ir._program import Compute, Program
from trainmux.ir._verifier._facts import StepFacts
from trainmux.ir._verifier._report import Report, ViolationKind


@dataclass(frozen=True)
class Shares:
    """The nodes of all sub-arrays in each part. ``is_ring`` is false for sub-arrays that run in turns."""

    is_ring: bool
    prologue: tuple[range, ...]
    body: tuple[range, ...]
    epilogue: tuple[range, ...]


def expected_shares(program: Program, facts: Sequence[StepFacts]) -> Shares:
    """Turns where prologue and epilogue compute nothing, otherwise a ring (see `Program`)."""
    nothing = tuple(range(0) for _ in facts)
    whole = tuple(range(len(step.nodes)) for step in facts)
    around = (*program.prologue.instructions, *program.epilogue.instructions)
    if not facts or not any(isinstance(instruction, Compute) for instruction in around):
        return Shares(False, nothing, whole, nothing)
    forward, end = facts[0].num_forward, len(facts[0].nodes)
    return Shares(
        is_ring=True,
        prologue=(range(forward), *nothing[1:]),
        body=(range(forward, forward + end), *whole[1:]),
        epilogue=(range(forward, end), *nothing[1:]),
    )


class PartOrder:
    """Follows the nodes of one part."""

    def __init__(
        self, shares: Sequence[range], facts: Sequence[StepFacts], is_ring: bool, report: Report
    ) -> None:
        self._shares = shares
        self._facts = facts
        self._is_ring = is_ring
        self._report = report
        self._next = [share.start for share in shares]
        self._stage = 0

    def compute(self, sub_array: int, node: int) -> int:
        """Check a Compute against the share; returns the step that the node belongs to."""
        share, num_nodes = self._shares[sub_array], len(self._facts[sub_array].nodes)
        count = share.start + (node - share.start) % num_nodes
        if count != self._next[sub_array] or count not in share:
            self._refuse(f"got {self._report.node(sub_array, node)}, but {self._awaited(sub_array)}")
        self._next[sub_array] = count + 1
        # In turns a stage is a sub-array; in a ring stage i is the backward pass of i and a forward pass.
        is_forward = node < self._facts[sub_array].num_forward
        stage = (sub_array - 1) % len(self._facts) if self._is_ring and is_forward else sub_array
        if stage < self._stage:
            how = "ring" if self._is_ring else "turns"
            who = self._report.node(sub_array, node)
            self._refuse(f"{who} belongs to stage {stage}, but stage {self._stage} has begun ({how})")
        self._stage = max(self._stage, stage)
        return count // num_nodes

    def recompute(self, sub_array: int, node: int) -> int:
        """Check that the node has run in the step that is under way; returns that step."""
        ran, num_nodes = self._next[sub_array], len(self._facts[sub_array].nodes)
        step = max(0, (ran - 1) // num_nodes)
        if node >= ran - step * num_nodes:
            who = self._report.node(sub_array, node)
            self._refuse(f"{who} is recomputed, but has not run in this step yet")
        return step

    def num_ran(self, sub_array: int) -> int:
        """Nodes that have run since the step that was under way at the part's beginning began."""
        return self._next[sub_array]

    def finish(self) -> None:
        """Report nodes at the end of a share that did not run."""
        for sub_array, share in enumerate(self._shares):
            if self._next[sub_array] < share.stop:
                self._refuse(f"the part ends, but {self._awaited(sub_array)}")

    def _awaited(self, sub_array: int) -> str:
        count, share = self._next[sub_array], self._shares[sub_array]
        if count >= share.stop:
            return f"all nodes of sub-array {sub_array} that belong in the {self._report.part} have run"
        rank = count % len(self._facts[sub_array].nodes)
        return f"{self._report.node(sub_array, rank)} must run next, each node once and in rank order"

    def _refuse(self, text: str) -> None:
        self._report.add(ViolationKind.ORDER, text)
