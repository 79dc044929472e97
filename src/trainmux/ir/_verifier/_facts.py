"""A step without any plan, read from a profile: the version of each tensor that each node sees.

Nodes run in rank order. A tensor's version is a number that grows by one with every in-place change. One
that exists before and after the step keeps its count from step to step; one that is made anew in each step
begins a new row of numbers there. So the version that a node sees in step k is ``k * period`` plus a number
that depends on the node alone, with a period of one change count (static) or one more than that (made anew).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmux.ir._graph import Phase
from trainmux.ir._profile import ByteClass, Profile
from trainmux.ir._verifier._report import Report, ViolationKind


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


def read_profile(profile: Profile, report: Report) -> StepFacts:
    """The facts of one sub-array; with anything added to ``report`` they cannot be used."""

    def refuse(text: str) -> None:
        report.add(ViolationKind.PROFILE, text)

    num_tensors = len(profile.tensors)
    is_static = tuple(tensor.byte_class.is_static for tensor in profile.tensors)
    exists = list(is_static)
    num_changes = [0] * num_tensors
    nodes = []
    for tensor in profile.tensors:
        if tensor.size_bytes < 0:
            refuse(f"tensor '{tensor.name}' must have zero bytes or more, but has {tensor.size_bytes}")
    for rank, node in enumerate(profile.nodes):
        who = f"node '{node.name}' (rank {rank})"
        touched = (*node.reads, *node.changes)
        if not all(0 <= number < num_tensors for number in (*touched, *node.creates)):
            refuse(f"{who} names a tensor that is not among the {num_tensors}")
            continue
        if not all(exists[number] for number in touched):
            refuse(f"{who} uses a tensor before a node creates it")
        if any(exists[number] for number in node.creates):
            refuse(f"{who} creates a tensor that exists already")
        if len(set(node.changes)) < len(node.changes):
            refuse(f"{who} changes a tensor twice")
        if node.workspace_bytes < 0:
            refuse(f"{who} has a workspace of {node.workspace_bytes} bytes")
        needs = tuple((number, num_changes[number]) for number in dict.fromkeys(touched))
        changes = tuple((number, num_changes[number]) for number in node.changes)
        for number in node.changes:
            num_changes[number] += 1
        for number in node.creates:
            exists[number] = True
        nodes.append(NodeFacts(needs, changes, node.creates, node.workspace_bytes, node.is_repeatable))
    is_forward = [node.phase is Phase.FORWARD for node in profile.nodes]
    if not all(is_forward[: sum(is_forward)]):
        refuse("forward nodes must come before all others in rank order, but some come later")
    return StepFacts(
        nodes=tuple(nodes),
        num_forward=sum(is_forward),
        periods=tuple(count + (not static) for count, static in zip(num_changes, is_static, strict=True)),
        sizes=tuple(tensor.size_bytes for tensor in profile.tensors),
        is_static=is_static,
        is_result=tuple(tensor.byte_class is ByteClass.RESULT for tensor in profile.tensors),
    )
