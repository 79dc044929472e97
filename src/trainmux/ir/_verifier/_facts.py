"""A step without any plan, read from a profile: the version of each tensor that each node sees.

Nodes run in rank order. A tensor's version is a number that grows by one with every in-place change. One
that exists before and after the step keeps its count from step to step; one that is made anew in each step
begins a new row of numbers there. So the version that a node sees in step k is ``k * period`` plus a number
that depends on the node alone, with a period of one change count (static) or one more than that (made anew).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.ir._graph import Phase
from trainmux.ir._profile import ByteClass, Profile
from trainmux.ir._verifier._report import Findings, ViolationKind


@dataclass(frozen=True)
class NodeFacts:
    """``needs`` and ``changes`` are pairs: a tensor, and how often the step has changed it before this node.

    ``needs`` holds everything that must be on the device, what is changed included.
    """

    needs: tuple[tuple[int, int], ...]
    changes: tuple[tuple[int, int], ...]
    creates: tuple[int, ...]
    workspace_bytes: int
    is_repeatable: bool


@dataclass(frozen=True)
class StepFacts:
    """One sub-array's step. ``num_forward`` nodes come first, the rest is backward and update."""

    nodes: tuple[NodeFacts, ...]
    num_forward: int
    periods: tuple[int, ...]
    sizes: tuple[int, ...]
    is_static: tuple[bool, ...]
    is_result: tuple[bool, ...]


def read_profiles(profiles: Sequence[Profile], findings: Findings) -> list[StepFacts]:
    """The facts of each sub-array. With anything in ``findings`` afterwards they cannot be used."""
    known: dict[int, StepFacts] = {}
    facts = []
    for sub_array, profile in enumerate(profiles):
        if id(profile) not in known:
            known[id(profile)] = _read(profile, f"profile of sub-array {sub_array}", findings)
        facts.append(known[id(profile)])
    return facts


def _read(profile: Profile, where: str, findings: Findings) -> StepFacts:
    def refuse(text: str) -> None:
        findings.add(ViolationKind.PROFILE, where, -1, text)

    num_tensors = len(profile.tensors)
    is_static = [tensor.byte_class.is_static for tensor in profile.tensors]
    exists = list(is_static)
    num_changes = [0] * num_tensors
    nodes = []
    for tensor in profile.tensors:
        if tensor.size_bytes < 0:
            refuse(f"tensor '{tensor.name}' must have zero bytes or more, but has {tensor.size_bytes}")
    for rank, node in enumerate(profile.nodes):
        touched = (*node.reads, *node.changes)
        numbers = (*touched, *node.creates)
        if any(not 0 <= number < num_tensors for number in numbers):
            refuse(f"node '{node.name}' (rank {rank}) names a tensor that is not among the {num_tensors}")
            continue
        for number in touched:
            if not exists[number]:
                refuse(
                    f"node '{node.name}' (rank {rank}) uses tensor '{profile.tensors[number].name}' before "
                    "a node creates it"
                )
        if len(set(node.changes)) < len(node.changes):
            refuse(f"node '{node.name}' (rank {rank}) changes a tensor twice")
        if node.workspace_bytes < 0:
            refuse(f"node '{node.name}' (rank {rank}) has a workspace of {node.workspace_bytes} bytes")
        needs = tuple((number, num_changes[number]) for number in dict.fromkeys(touched))
        changes = tuple((number, num_changes[number]) for number in node.changes)
        for number in node.changes:
            num_changes[number] += 1
        for number in node.creates:
            if exists[number]:
                refuse(
                    f"node '{node.name}' (rank {rank}) creates tensor '{profile.tensors[number].name}', "
                    "which exists already"
                )
            exists[number] = True
        nodes.append(NodeFacts(needs, changes, node.creates, node.workspace_bytes, node.is_repeatable))
    forward = [node.phase is Phase.FORWARD for node in profile.nodes]
    num_forward = sum(forward)
    if not all(forward[:num_forward]):
        refuse("forward nodes must come before all others in rank order, but some come later")
    return StepFacts(
        nodes=tuple(nodes),
        num_forward=num_forward,
        periods=tuple(
            count if static else count + 1 for count, static in zip(num_changes, is_static, strict=True)
        ),
        sizes=tuple(tensor.size_bytes for tensor in profile.tensors),
        is_static=tuple(is_static),
        is_result=tuple(tensor.byte_class is ByteClass.RESULT for tensor in profile.tensors),
    )
