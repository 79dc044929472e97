"""Facts about a step's kernels and tensors that follow from its order alone (µ-TWO Tables A and B).

A node's position in its profile is its ``rank``. *Access* means reading, creating or changing. Forward is
what carries ``Phase.FORWARD``; the update counts as part of the backward pass, as in the paper, where it
hangs on the gradients. Attributes that depend on what has been decided so far, those for recomputation, are
in `policies._gaps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Phase, Profile
from trainmux.planning._remember import remembered


@dataclass(frozen=True)
class KernelFacts:
    """A kernel: its time, the bytes it creates, and its workspace while it runs."""

    rank: int
    seconds: float
    created_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class TensorFacts:
    """A storage and the ranks that touch it, rising.

    ``created_at`` is ``None`` for what is there before the step. ``last_fw_access``, ``first_bw_access`` and
    ``last_bw_access`` are ``None`` where there is no such access. ``lifetime`` is from the first to the last
    rank at which the bytes must be there, both included: all ranks for static tensors, and to the last rank
    for results. ``inactive_time`` is the compute time between the last forward and the first backward
    access, 0 where one of them is missing.
    """

    tensor: int
    byte_class: ByteClass
    memory_size: int
    created_at: int | None
    accesses: tuple[int, ...]
    changed_at: tuple[int, ...]
    last_fw_access: int | None
    first_bw_access: int | None
    last_bw_access: int | None
    lifetime: tuple[int, int]
    inactive_time: float


@dataclass(frozen=True)
class Facts:
    """A profile with the facts that follow from its order.

    ``num_forward`` ranks are the forward pass, the rest backward pass and update. ``start_seconds`` has one
    entry more than there are nodes: when each begins with nothing else running, and when the last one ends.
    ``feature_maps`` are the tensors that can be swapped or recomputed.
    """

    profile: Profile
    nodes: tuple[KernelFacts, ...]
    tensors: tuple[TensorFacts, ...]
    feature_maps: tuple[int, ...]
    num_forward: int
    start_seconds: tuple[float, ...]


@remembered
def facts_of(profile: Profile) -> Facts:
    """Walk through a profile once.

    Refused with `PlanError`: a forward node behind a backward one, a position that names no tensor, a
    tensor that is used before it exists, created twice, or neither static nor created.
    """
    count = num_forward(profile)
    start_seconds = tuple(accumulate((node.seconds for node in profile.nodes), initial=0.0))
    accesses: list[list[int]] = [[] for _ in profile.tensors]
    changed: list[list[int]] = [[] for _ in profile.tensors]
    created: list[int | None] = [None] * len(profile.tensors)
    exists = [tensor.byte_class.is_static for tensor in profile.tensors]
    for rank, node in enumerate(profile.nodes):
        for tensor in (*node.reads, *node.changes):
            _check_position(profile, rank, tensor)
            if not exists[tensor]:
                raise PlanError(
                    f"node {node.name!r} needs {profile.tensors[tensor].name!r} to exist, but nothing before "
                    "it creates that; order the nodes as the step runs them"
                )
        for tensor in node.creates:
            _check_position(profile, rank, tensor)
            if exists[tensor]:
                raise PlanError(
                    f"node {node.name!r} must create a new tensor, but {profile.tensors[tensor].name!r} "
                    "exists already; list a tensor that is overwritten under changes"
                )
            exists[tensor] = True
            created[tensor] = rank
        for tensor in node.changes:
            changed[tensor].append(rank)
        for tensor in {*node.reads, *node.creates, *node.changes}:
            accesses[tensor].append(rank)
    if not all(exists):
        missing = profile.tensors[exists.index(False)]
        raise PlanError(
            f"tensor {missing.name!r} must be static or created by a node, but is neither; drop it from the "
            "profile or correct its class"
        )
    tensors = tuple(
        _tensor_facts(profile, position, *touched, count, start_seconds)
        for position, touched in enumerate(zip(created, accesses, changed, strict=True))
    )
    return Facts(
        profile,
        _kernel_facts(profile),
        tensors,
        tuple(facts.tensor for facts in tensors if _is_feature_map(facts)),
        count,
        start_seconds,
    )


def num_forward(profile: Profile) -> int:
    """How many nodes the forward pass has; they are the first ones, or it is `PlanError`."""
    count = sum(node.phase is Phase.FORWARD for node in profile.nodes)
    for node in profile.nodes[count:]:
        if node.phase is Phase.FORWARD:
            raise PlanError(
                f"forward nodes must come before all others, but {node.name!r} is behind a "
                "backward or update node; order the profile's nodes by phase"
            )
    return count


def _check_position(profile: Profile, rank: int, tensor: int) -> None:
    if not 0 <= tensor < len(profile.tensors):
        raise PlanError(
            f"node {profile.nodes[rank].name!r} must name tensors 0 to {len(profile.tensors) - 1}, but got "
            f"{tensor}; profile the graph again"
        )


def _tensor_facts(
    profile: Profile,
    tensor: int,
    created_at: int | None,
    accesses: Sequence[int],
    changed_at: Sequence[int],
    num_forward_nodes: int,
    start_seconds: Sequence[float],
) -> TensorFacts:
    record = profile.tensors[tensor]
    forward = [rank for rank in accesses if rank < num_forward_nodes]
    backward = [rank for rank in accesses if rank >= num_forward_nodes]
    last_rank = len(profile.nodes) - 1
    if record.byte_class.is_static:
        lifetime = (0, last_rank)
    elif record.byte_class is ByteClass.RESULT:
        lifetime = (accesses[0], last_rank)
    else:
        lifetime = (accesses[0], accesses[-1])
    inactive_time = 0.0
    if forward and backward:
        inactive_time = start_seconds[backward[0]] - start_seconds[forward[-1] + 1]
    return TensorFacts(
        tensor,
        record.byte_class,
        record.size_bytes,
        created_at,
        tuple(accesses),
        tuple(changed_at),
        forward[-1] if forward else None,
        backward[0] if backward else None,
        backward[-1] if backward else None,
        lifetime,
        inactive_time,
    )


def _is_feature_map(facts: TensorFacts) -> bool:
    """Whether it is one by class and by use: created in the forward pass, needed in the backward pass."""
    return (
        facts.byte_class is ByteClass.FEATURE_MAP
        and facts.last_fw_access is not None
        and facts.first_bw_access is not None
    )


def _kernel_facts(profile: Profile) -> tuple[KernelFacts, ...]:
    return tuple(
        KernelFacts(
            rank,
            node.seconds,
            sum(profile.tensors[tensor].size_bytes for tensor in node.creates),
            node.workspace_bytes,
        )
        for rank, node in enumerate(profile.nodes)
    )
