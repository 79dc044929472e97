"""A group's step as segments with every byte placed: in the arena what it frees, in the job's area the rest.

A job sees one fixed range of addresses: its own area from 0 on, then its end of the arena, counted from the
base. The physical place of these bytes may change between two iterations.

Static tensors (parameters, optimizer state, buffers, the batch, constants) lie at the bottom of the area.
Above them each step places its results, and static tensors of its own, which are loaded before each such
step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from trainmux.colocate._demand import TRACKING_BYTES, Segment, cut_segments, segments_between
from trainmux.colocate._placement import (
    ALIGNMENT_BYTES,
    ArenaPlacement,
    Iteration,
    TensorClass,
    iteration_of_profile,
    place_in_arena,
)
from trainmux.engine import StepProgram, scratch_bytes
from trainmux.ir import Compute, Free, Instruction, Part, Program, Tenancy
from trainmux.profiling import Device, KernelGraph, analytic_profile
from trainmux.sizes import round_up

_SEGMENT_SECONDS = 300e-6
"""Duration of a segment on a CUDA device: launching one takes the host some tens of microseconds."""

_NOTHING = Part((), ())

StaticKey = tuple[int, str, Hashable]
"""Identifies a static tensor: a group, and a kind and name among its step's arguments."""


@dataclass(frozen=True)
class StepKernels:
    """A group's step with its kernels and allocations.

    ``numbers`` are the positions of the iteration's allocations among the graph's tensors. ``static_keys``
    identifies the static tensors by position.
    """

    step: StepProgram
    graph: KernelGraph
    iteration: Iteration
    numbers: tuple[int, ...]
    static_keys: Mapping[int, StaticKey]
    scratch_bytes: int

    @property
    def num_kernels(self) -> int:
        return len(self.iteration.kernel_seconds)

    @property
    def estimated_seconds(self) -> float:
        """The estimated duration, before the step has run."""
        return max(sum(self.iteration.kernel_seconds), 1e-9)

    @property
    def has_convolutions(self) -> bool:
        """Whether any of its kernels may want a large workspace."""
        return any("convolution" in str(step.node.target) for step in self.graph.steps)

    @property
    def result_bytes(self) -> int:
        """The bytes of the step's results, which are copied and kept until its next."""
        return sum(self.size_of(location.tensor) for location in self.graph.outputs)

    @property
    def constant_bytes(self) -> int:
        """The bytes of the graph's constants: another step of the group has about as many of its own."""
        places = self.graph.constants.values()
        return sum(round_up(self.size_of(location.tensor), ALIGNMENT_BYTES) for location in places)

    def size_of(self, number: int) -> int:
        return self.graph.tensors[number].size_bytes

    @property
    def changed(self) -> set[int]:
        """The static tensors that the step changes."""
        return {n for step in self.graph.steps for n in step.changes if n in self.static_keys}


def read_step_kernels(
    step: StepProgram, graph: KernelGraph, group: int, width: int, device: Device, *, half: bool
) -> StepKernels:
    """Read a step of ``width`` members of one group; ``half``: products are of 16-bit numbers.

    Durations of kernels are estimated for ``device``.
    """
    profile = analytic_profile(graph, width, device, half=half)
    created = {number for node in profile.nodes for number in node.creates}
    numbers = tuple(
        number
        for number, tensor in enumerate(profile.tensors)
        if not tensor.byte_class.is_static and number in created
    )
    names: list[tuple[str, Hashable]] = [
        *((item.kind.value, item.name) for item in step.inputs),
        *(("state", key) for key in step.state_keys()),
        *(("total", name) for name in step.total_names()),
        *(("number", name) for name in step.number_names()),
    ]
    keys: dict[int, StaticKey] = {
        location.tensor: (group, *name) for location, name in zip(graph.inputs, names, strict=True)
    }
    # A constant of another step may have the same name and another value.
    keys |= {location.tensor: (id(graph), "constant", name) for name, location in graph.constants.items()}
    return StepKernels(step, graph, iteration_of_profile(profile), numbers, keys, scratch_bytes(graph))


class StaticArea:
    """The places of static tensors at the bottom of a job's area, assigned once."""

    def __init__(self) -> None:
        self._places: dict[StaticKey, tuple[int, int]] = {}
        self.end = 0

    def take(self, key: StaticKey, size_bytes: int) -> None:
        """Assign a place to a tensor that has none yet."""
        if key not in self._places:
            self._places[key] = (self.end, size_bytes)
            self.end += round_up(size_bytes, ALIGNMENT_BYTES)

    def find(self, key: StaticKey, size_bytes: int) -> int | None:
        """The offset of a tensor's place, if it has one that is large enough."""
        offset, room = self._places.get(key, (0, -1))
        return offset if size_bytes <= room else None


@dataclass(frozen=True)
class StepLayout:
    """The places of a step's tensors: offsets in the job's area by tensor, and those in the arena.

    ``transient`` are static tensors without a place at the bottom of the area, to be loaded before each run.
    """

    kernels: StepKernels
    arena: ArenaPlacement
    local_offsets: Mapping[int, int]
    transient: frozenset[int]
    area_end: int

    def cut(self, tracking_bytes: int | None, device: torch.device, seconds: float) -> tuple[int, ...]:
        """The kernels before which to cut a step that takes ``seconds``.

        Without ``tracking_bytes`` the paper's 8 MB of the arena between cuts; on a CUDA device as much more
        as lets a segment last until the next is launched.
        """
        iteration = self.kernels.iteration
        if tracking_bytes is None:
            tracking_bytes = TRACKING_BYTES
            if device.type == "cuda":
                changed = 2 * sum(row.size_bytes for row in iteration.shared)  # allocated and released
                tracking_bytes = max(tracking_bytes, changed // max(1, int(seconds / _SEGMENT_SECONDS)))
        return cut_segments(iteration, tracking_bytes)

    def segments(self, cuts: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        """The segments between ``cuts`` of a step that takes ``seconds`` in all."""
        estimates, slowness = self.kernels.iteration.kernel_seconds, seconds / self.kernels.estimated_seconds
        return segments_between(cuts, self.arena, estimates, slowness=slowness)

    def fit_cuts(self, cuts: Sequence[int], segments: Sequence[Segment]) -> tuple[int, ...] | None:
        """Cuts with which this step can run in place of one that is cut at ``cuts`` into ``segments``.

        At the same kernels where that never needs more memory; else all of it during the highest segment;
        ``None`` where even that is too low. Pieces may be empty.
        """
        end = self.kernels.num_kernels
        highest = max(range(len(segments)), key=lambda number: segments[number].height_bytes)
        same = [min(cut, end) for cut in cuts[:-1]] + [end]
        at_once = [0] * highest + [end] * (len(segments) - highest)
        return next((tuple(found) for found in (same, at_once) if self._fits(found, segments)), None)

    def _fits(self, cuts: Sequence[int], segments: Sequence[Segment]) -> bool:
        first = 0
        for end, segment in zip(cuts, segments, strict=True):
            height = max(self.arena.kernel_heights[first:end], default=0)
            hold = self.arena.holds[end - 1] if end else 0
            if height > segment.height_bytes or hold > segment.hold_bytes:
                return False
            first = end
        return True

    def place(self, cuts: Sequence[int], arena_offset: int) -> tuple[Program, tuple[Part, ...]]:
        """The step as a program, and its parts that end before the ranks in ``cuts``.

        The arena begins at ``arena_offset`` among the job's addresses.
        """
        kernels = self.kernels
        spans: dict[int, tuple[int, int, int]] = {}
        shared = iter(self.arena.offsets)
        for number, row in zip(kernels.numbers, kernels.iteration.allocations, strict=True):
            is_local = row.tensor_class is TensorClass.RESIDENT
            offset = self.local_offsets[number] if is_local else arena_offset + next(shared)
            spans[number] = (row.allocated_by, row.last_used_by, offset)
        statics = {number: self.local_offsets[number] for number in kernels.static_keys}
        body = _part(kernels, spans, statics, 0, kernels.num_kernels)
        parts = tuple(_part(kernels, spans, statics, *span) for span in pairwise((0, *cuts)))
        resident = tuple((0, number) for number in sorted(statics))
        return Program(_NOTHING, body, _NOTHING, resident, self.area_end, 0), parts


def lay_out_step(kernels: StepKernels, statics: StaticArea, *, region_bytes: int) -> StepLayout:
    """Place all tensors of a step: above the static ones those that no other step has, and its results."""
    known = {
        number: statics.find(key, kernels.size_of(number)) for number, key in kernels.static_keys.items()
    }
    offsets = {number: offset for number, offset in known.items() if offset is not None}
    transient = [number for number in known if number not in offsets]
    results = [
        number
        for number, row in zip(kernels.numbers, kernels.iteration.allocations, strict=True)
        if row.tensor_class is TensorClass.RESIDENT
    ]
    end = statics.end
    for number in (*transient, *results):
        offsets[number] = end
        end += round_up(kernels.size_of(number), ALIGNMENT_BYTES)
    arena = place_in_arena(kernels.iteration, region_bytes=region_bytes)
    return StepLayout(kernels, arena, offsets, frozenset(transient), end)


def _part(
    kernels: StepKernels,
    spans: Mapping[int, tuple[int, int, int]],
    statics: Mapping[int, int],
    first: int,
    end: int,
) -> Part:
    """The kernels from rank ``first`` to before ``end``, with a `Free` after the last use of each tensor."""
    if first == end:
        return _NOTHING
    created: dict[int, list[int]] = {}
    freed: dict[int, list[int]] = {}
    for number, (born, last, _) in spans.items():
        created.setdefault(born, []).append(number)
        freed.setdefault(last, []).append(number)
    instructions: list[Instruction] = []
    begins = {number: -1 for number, (born, last, _) in spans.items() if born < first <= last}
    ends: dict[int, int] = {}
    for rank in range(first, end):
        begins.update(dict.fromkeys(created.get(rank, ()), len(instructions)))
        instructions.append(Compute(0, rank))
        for number in freed.get(rank, ()):
            ends[number] = len(instructions)
            instructions.append(Free(0, number))
    num = len(instructions)
    tenancies = [
        Tenancy(0, number, -1, num, offset, kernels.size_of(number)) for number, offset in statics.items()
    ]
    tenancies += [
        Tenancy(0, number, begin, ends.get(number, num), spans[number][2], kernels.size_of(number))
        for number, begin in begins.items()
    ]
    return Part(tuple(instructions), tuple(tenancies))
