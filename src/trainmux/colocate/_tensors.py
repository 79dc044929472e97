"""Which tensors jobs can share memory for, and which stay a job's own (Zico §6.2).

Three facts decide: whether the operator that makes a tensor (its *source*) is in the forward pass, whether
any other operator reads it, whether one that does is in the backward pass. Tensors that outlive an iteration
are not classified in the paper; here they have a class of their own and never enter the shared arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainmux.errors import ConfigError
from trainmux.ir import ByteClass, Phase, Profile


class TensorClass(Enum):
    """What a tensor is to memory sharing."""

    FEATURE_MAP = "feature map"
    """Made in the forward pass, read by others, in the backward pass too: lies in the shared arena."""
    GRADIENT_MAP = "gradient map"
    """Made and read by others in the backward pass, gradients of parameters included: job-local."""
    TEMPORARY = "temporary"
    """Everything else that an iteration makes and lets go: job-local, in a few regions of its own."""
    RESIDENT = "resident"
    """There before the iteration or still there after it (weights, optimizer state, losses): job-local."""

    @property
    def is_sharable(self) -> bool:
        """Whether the memory may be another job's at other times."""
        return self is TensorClass.FEATURE_MAP


def classify(*, source_is_forward: bool, read_by_others: bool, read_in_backward: bool) -> TensorClass:
    """The class of a tensor that an iteration makes and lets go, from the paper's three facts."""
    if read_by_others and read_in_backward:
        return TensorClass.FEATURE_MAP if source_is_forward else TensorClass.GRADIENT_MAP
    return TensorClass.TEMPORARY


@dataclass(frozen=True)
class Allocation:
    """A tensor of one iteration: the ranks of the kernel that makes it and of the last one that uses it."""

    name: str
    size_bytes: int
    allocated_by: int
    last_used_by: int
    tensor_class: TensorClass


@dataclass(frozen=True)
class Iteration:
    """One iteration of a job: how long each kernel takes, and what is allocated.

    ``resident_bytes`` are there all the time, ``workspace_bytes`` of a kernel while it runs. Two iterations
    with one ``fingerprint`` allocate the same. Refused with `ConfigError`: no kernels, and allocations that
    end before they begin or name kernels that are not there.
    """

    fingerprint: str
    kernel_seconds: tuple[float, ...]
    allocations: tuple[Allocation, ...]
    resident_bytes: int = 0
    workspace_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_kernels = len(self.kernel_seconds)
        if num_kernels == 0:
            raise ConfigError(
                "an iteration must have at least one kernel, but got none; profile a whole step"
            )
        if len(self.workspace_bytes) not in (0, num_kernels):
            raise ConfigError(
                f"workspaces must be given for each of the {num_kernels} kernels or for none, but got "
                f"{len(self.workspace_bytes)}; pass 0 for a kernel without one"
            )
        for row in self.allocations:
            if row.size_bytes < 0 or not 0 <= row.allocated_by <= row.last_used_by < num_kernels:
                raise ConfigError(
                    f"an allocation must have zero bytes or more and ranks in order below {num_kernels}, but "
                    f"got {row}; count kernels from 0 in the order in which they run"
                )

    @property
    def feature_maps(self) -> tuple[Allocation, ...]:
        """What goes into the shared arena."""
        return tuple(row for row in self.allocations if row.tensor_class.is_sharable)

    def local_bytes(self) -> int:
        """The most bytes that the job needs outside the arena at one time."""
        num_kernels = len(self.kernel_seconds)
        changes = [0] * (num_kernels + 1)
        for row in self.allocations:
            if not row.tensor_class.is_sharable:
                changes[row.allocated_by] += row.size_bytes
                changes[row.last_used_by + 1] -= row.size_bytes
        live = highest = 0
        for rank in range(num_kernels):
            live += changes[rank]
            highest = max(highest, live + (self.workspace_bytes[rank] if self.workspace_bytes else 0))
        return self.resident_bytes + highest


def iteration_of_profile(profile: Profile) -> Iteration:
    """The iteration that a profiled step is. The update counts as part of the backward pass."""
    created: dict[int, int] = {}
    uses: dict[int, list[int]] = {}
    for rank, node in enumerate(profile.nodes):
        created.update(dict.fromkeys(node.creates, rank))
        for number in (*node.reads, *node.changes):
            uses.setdefault(number, []).append(rank)
    last_rank = len(profile.nodes) - 1
    allocations, resident_bytes = [], 0
    for number, tensor in enumerate(profile.tensors):
        if tensor.byte_class.is_static or number not in created:
            resident_bytes += tensor.size_bytes
            continue
        source = created[number]
        readers = [rank for rank in uses.get(number, ()) if rank != source]
        if tensor.byte_class is ByteClass.RESULT:
            allocations.append(
                Allocation(tensor.name, tensor.size_bytes, source, last_rank, TensorClass.RESIDENT)
            )
            continue
        tensor_class = classify(
            source_is_forward=profile.nodes[source].phase is Phase.FORWARD,
            read_by_others=bool(readers),
            read_in_backward=any(profile.nodes[rank].phase is not Phase.FORWARD for rank in readers),
        )
        last_use = max(readers, default=source)
        allocations.append(Allocation(tensor.name, tensor.size_bytes, source, last_use, tensor_class))
    return Iteration(
        profile.fingerprint,
        tuple(node.seconds for node in profile.nodes),
        tuple(allocations),
        resident_bytes,
        tuple(node.workspace_bytes for node in profile.nodes),
    )


@dataclass(frozen=True)
class ObservedAllocation:
    """An allocation as an allocator sees it: nothing is known of passes or classes."""

    name: str
    size_bytes: int
    allocated_by: int
    last_used_by: int


def backward_start(rows: Sequence[ObservedAllocation], num_kernels: int) -> int:
    """The rank at which the backward pass begins: the first kernel after the memory peak (§6.2).

    Of several kernels with the most bytes live, the first one counts.
    """
    changes = [0] * (num_kernels + 1)
    for row in rows:
        changes[row.allocated_by] += row.size_bytes
        changes[row.last_used_by + 1] -= row.size_bytes
    live, highest, at = 0, -1, 0
    for rank in range(num_kernels):
        live += changes[rank]
        if live > highest:
            highest, at = live, rank
    return min(at + 1, num_kernels - 1)


def iteration_of_rows(
    fingerprint: str,
    rows: Sequence[ObservedAllocation],
    kernel_seconds: Sequence[float],
    *,
    resident_bytes: int = 0,
) -> Iteration:
    """The iteration of a job of which only allocations were seen: its backward pass begins at the peak."""
    start = backward_start(rows, len(kernel_seconds))
    allocations = tuple(
        Allocation(
            row.name,
            row.size_bytes,
            row.allocated_by,
            row.last_used_by,
            classify(
                source_is_forward=row.allocated_by < start,
                read_by_others=row.last_used_by > row.allocated_by,
                read_in_backward=row.last_used_by >= start,
            ),
        )
        for row in rows
    )
    return Iteration(fingerprint, tuple(kernel_seconds), allocations, resident_bytes)
