"""A group's step as segments with every byte placed: feature maps in the arena, the rest in the job's area.

A job sees one range of addresses, the same for as long as it is there: its own area from 0 on, and behind it
its end of the arena, counted from the base of its stack. Where these bytes really lie is the memory's
business, and may change between two iterations.

What lasts (parameters, optimizer state, buffers, the batch, constants) lies at the bottom of the area. Above
it each step places what it makes and lets go, and what only it has of lasting tensors: those are loaded anew
before each such step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainmux.colocate._demand import FINE_TRACKING_BYTES, Segment, cut_segments, segments_between
from trainmux.colocate._placement import ALIGNMENT_BYTES, Stack, round_up, stack_feature_maps
from trainmux.colocate._tensors import Iteration, TensorClass, iteration_of_profile
from trainmux.engine import StepProgram, scratch_bytes
from trainmux.ir import Compute, Free, InputKind, Instruction, Part, Program, Tenancy
from trainmux.profiling import DEVICES, KernelGraph, analytic_profile
from trainmux.simulate import Tenant, pack

_ROUGHLY = "h200-141gb"
"""Whose speed is taken for kernels before the first iteration has run."""

_SEGMENT_SECONDS = 300e-6
"""How long a segment should last on a CUDA device: launching one takes the host some tens of microseconds."""

_NOTHING = Part((), ())

StaticKey = tuple[int, str, Hashable]
"""What a lasting tensor is: a group, and a kind and name among its step's arguments."""

_CHANGED_BY_UPDATE = (InputKind.PARAMETER.value, "state")
"""Kinds of lasting tensors that no step changes but one that updates."""


@dataclass(frozen=True)
class StepKernels:
    """A group's step with its kernels, and what each is to memory sharing.

    ``numbers`` are the positions, among the graph's tensors, of the iteration's allocations. ``static_keys``
    names the lasting tensors by position.
    """

    step: StepProgram
    graph: KernelGraph
    iteration: Iteration
    numbers: tuple[int, ...]
    static_keys: Mapping[int, StaticKey]
    scratch_bytes: int

    def kind_of(self, number: int) -> str | None:
        """What a lasting tensor is among the step's arguments; ``None`` of others."""
        key = self.static_keys.get(number)
        return None if key is None else key[1]

    @property
    def has_convolutions(self) -> bool:
        """Whether any of its kernels may want a large workspace."""
        return any("convolution" in str(step.node.target) for step in self.graph.steps)

    @property
    def result_bytes(self) -> int:
        """What the step returns, kept aside until its next."""
        return sum(_bytes_of(self.graph, location.tensor) for location in self.graph.outputs)


def read_step_kernels(
    step: StepProgram, graph: KernelGraph, group: int, width: int, *, half: bool
) -> StepKernels:
    """Look at a step of ``width`` members of one group; ``half``: products are of 16-bit numbers."""
    profile = analytic_profile(graph, width, DEVICES[_ROUGHLY], half=half)
    iteration = iteration_of_profile(profile)
    created = {number for node in profile.nodes for number in node.creates}
    numbers = tuple(
        number
        for number, tensor in enumerate(profile.tensors)
        if not tensor.byte_class.is_static and number in created
    )
    keys: dict[int, StaticKey] = {
        location.tensor: (group, *name)
        for location, name in zip(graph.inputs, argument_names(step), strict=True)
    }
    # A constant of another step may have the same name and another value.
    keys |= {location.tensor: (id(graph), "constant", name) for name, location in graph.constants.items()}
    return StepKernels(step, graph, iteration, numbers, keys, scratch_bytes(graph))


def argument_names(step: StepProgram) -> list[tuple[str, Hashable]]:
    """What each argument of a step is, the same in all steps of a group."""
    return [
        *((item.kind.value, item.name) for item in step.inputs),
        *(("state", key) for key in step.state_keys()),
        *(("total", name) for name in step.total_names()),
        *(("number", name) for name in step.number_names()),
    ]


class StaticArea:
    """Places of lasting tensors at the bottom of a job's area, given out once."""

    def __init__(self) -> None:
        self._places: dict[StaticKey, tuple[int, int]] = {}
        self.end = 0

    def take(self, key: StaticKey, size_bytes: int) -> None:
        """A place for a tensor that has none yet."""
        if key not in self._places:
            self._places[key] = (self.end, size_bytes)
            self.end += round_up(size_bytes, ALIGNMENT_BYTES)

    def find(self, key: StaticKey, size_bytes: int) -> int | None:
        """The offset of a tensor's place, if it has one that is large enough."""
        offset, room = self._places.get(key, (0, -1))
        return offset if size_bytes <= room else None


@dataclass(frozen=True)
class PlacedStep:
    """A group's step over a job's addresses.

    ``segments`` are its kernels in pieces; together they are ``program.body``. ``transient`` are the lasting
    tensors that have no place at the bottom of the area and are to be loaded before each run.
    """

    kernels: StepKernels
    program: Program
    segments: tuple[Part, ...]
    transient: frozenset[int]


@dataclass(frozen=True)
class StepLayout:
    """Where a step's tensors lie: offsets in the job's addresses by tensor, and the end of its own area."""

    kernels: StepKernels
    stack: Stack
    local_offsets: Mapping[int, int]
    transient: frozenset[int]
    area_end: int

    @property
    def estimated_seconds(self) -> float:
        """How long the step takes, as far as can be known before it has run."""
        return max(sum(self.kernels.iteration.kernel_seconds), 1e-9)


def lay_out_step(kernels: StepKernels, statics: StaticArea, *, region_bytes: int) -> StepLayout:
    """Places for all tensors of a step, above those that last."""
    offsets: dict[int, int] = {}
    transient: list[int] = []
    for number, key in kernels.static_keys.items():
        found = statics.find(key, _bytes_of(kernels.graph, number))
        if found is None:
            transient.append(number)
        else:
            offsets[number] = found
    last_rank = len(kernels.iteration.kernel_seconds)
    rows = [(number, Tenant(_bytes_of(kernels.graph, number), ((0, last_rank),))) for number in transient]
    for number, allocation in zip(kernels.numbers, kernels.iteration.allocations, strict=True):
        if not allocation.tensor_class.is_sharable:
            span = (allocation.allocated_by, allocation.last_used_by + 1)
            rows.append((number, Tenant(allocation.size_bytes, (span,))))
    slab = pack([tenant for _, tenant in rows], ALIGNMENT_BYTES)
    for (number, _), offset in zip(rows, slab.offsets, strict=True):
        offsets[number] = statics.end + offset
    stack = stack_feature_maps(kernels.iteration, region_bytes=region_bytes)
    return StepLayout(kernels, stack, offsets, frozenset(transient), statics.end + slab.total_bytes)


def place_step(layout: StepLayout, cuts: Sequence[int], arena_offset: int) -> PlacedStep:
    """The step in pieces that end after the ranks in ``cuts``; the arena begins at ``arena_offset``."""
    kernels = layout.kernels
    spans: dict[int, tuple[int, int, int]] = {}
    maps = iter(layout.stack.offsets)
    for number, row in zip(kernels.numbers, kernels.iteration.allocations, strict=True):
        shared = row.tensor_class is TensorClass.FEATURE_MAP
        offset = arena_offset + next(maps) if shared else layout.local_offsets[number]
        spans[number] = (row.allocated_by, row.last_used_by, offset)
    statics = {number: layout.local_offsets[number] for number in kernels.static_keys}
    num_kernels = len(kernels.iteration.kernel_seconds)
    body = _part(kernels.graph, spans, statics, 0, num_kernels)
    pieces, first = [], 0
    for end in cuts:
        whole = (first, end) == (0, num_kernels)
        pieces.append(body if whole else _part(kernels.graph, spans, statics, first, end))
        first = end
    resident = tuple((0, number) for number in sorted(statics))
    program = Program(_NOTHING, body, _NOTHING, resident, layout.area_end, 0)
    return PlacedStep(kernels, program, tuple(pieces), layout.transient)


def _part(
    graph: KernelGraph,
    spans: Mapping[int, tuple[int, int, int]],
    statics: Mapping[int, int],
    first: int,
    end: int,
) -> Part:
    """The kernels from rank ``first`` to before ``end``, with a `Free` behind the last use of each tensor."""
    if first == end:
        return Part((), ())
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
    tenancies = [
        Tenancy(0, number, -1, len(instructions), offset, _bytes_of(graph, number))
        for number, offset in statics.items()
    ]
    tenancies += [
        Tenancy(
            0,
            number,
            begin,
            ends.get(number, len(instructions)),
            spans[number][2],
            _bytes_of(graph, number),
        )
        for number, begin in begins.items()
    ]
    return Part(tuple(instructions), tuple(tenancies))


def segments_of(layout: StepLayout, cuts: Sequence[int], seconds: float) -> tuple[Segment, ...]:
    """What the scheduler has to know of a step in pieces that takes so long in all."""
    estimates, slowness = layout.kernels.iteration.kernel_seconds, seconds / layout.estimated_seconds
    return segments_between(cuts, layout.stack, estimates, slowness=slowness)


def cuts_of(layout: StepLayout, tracking_bytes: int) -> tuple[int, ...]:
    """Where a step is cut, by the bytes of feature maps allocated and released since the last cut."""
    return cut_segments(layout.kernels.iteration, tracking_bytes)


def tracking_bytes_for(layout: StepLayout, device: torch.device, seconds: float) -> int:
    """The paper's 8 MB; on a CUDA device as much more as lets a segment last until the next is launched, of
    a step that takes so long."""
    if device.type != "cuda":
        return FINE_TRACKING_BYTES
    iteration = layout.kernels.iteration
    changed = 2 * sum(row.size_bytes for row in iteration.feature_maps)  # allocated, and released
    num_segments = max(1, int(seconds / _SEGMENT_SECONDS))
    return max(FINE_TRACKING_BYTES, changed // num_segments)


def first_ordered_rank(kernels: StepKernels) -> int:
    """The first kernel that changes a lasting tensor, or reads one which a step before this one may change.

    Steps between two updates may run at once, with the result of one after the other, if this kernel and all
    behind it run in the steps' order. Weights and optimizer state are changed by the step that updates, with
    which no other begins.
    """
    steps = kernels.graph.steps
    changed = {number for step in steps for number in step.changes if number in kernels.static_keys}
    read_in_order = changed
    if kernels.step.settings.applies:
        read_in_order = {number for number in changed if kernels.kind_of(number) not in _CHANGED_BY_UPDATE}
    return next(
        rank
        for rank, step in enumerate(steps)
        if not changed.isdisjoint(step.changes) or not read_in_order.isdisjoint(step.reads)
    )


def changed_buffers(kernels: StepKernels) -> tuple[str, ...]:
    """The buffers of the models that the step changes."""
    changed = {number for step in kernels.graph.steps for number in step.changes}
    buffers = [n for n in sorted(changed) if kernels.kind_of(n) == InputKind.BUFFER.value]
    return tuple(str(kernels.static_keys[number][2]) for number in buffers)


def fit_cuts(
    layout: StepLayout, cuts: Sequence[int], segments: Sequence[Segment], *, num_free: int = 0
) -> tuple[int, ...] | None:
    """Cuts for another step in the place of one that is cut at ``cuts`` into ``segments``.

    At the same kernels where that needs no more memory at any time; else all of it while the highest segment
    runs; ``None`` where even that is too low. Pieces may be empty. With ``num_free``, what has an order is
    fitted into the segments behind so many, and what has none into those.
    """
    num_kernels = len(layout.kernels.iteration.kernel_seconds)
    if not num_free:
        return _fit(layout.stack, range(num_kernels), cuts, segments)
    rank = first_ordered_rank(layout.kernels)
    free = _fit(layout.stack, range(rank), cuts[:num_free], segments[:num_free])
    ordered = _fit(layout.stack, range(rank, num_kernels), cuts[num_free:], segments[num_free:])
    return None if free is None or ordered is None else free + ordered


def _fit(
    stack: Stack, ranks: range, cuts: Sequence[int], segments: Sequence[Segment]
) -> tuple[int, ...] | None:
    """The same for some of the kernels and segments."""
    first, end = ranks.start, ranks.stop
    same = [min(max(cut, first), end) for cut in cuts[:-1]] + [end]
    if _fits(stack, first, same, segments):
        return tuple(same)
    highest = max(range(len(segments)), key=lambda number: segments[number].height_bytes)
    at_once = [first] * highest + [end] * (len(segments) - highest)
    return tuple(at_once) if _fits(stack, first, at_once, segments) else None


def _fits(stack: Stack, first: int, cuts: Sequence[int], segments: Sequence[Segment]) -> bool:
    for end, segment in zip(cuts, segments, strict=True):
        height = max(stack.kernel_heights[first:end], default=0)
        hold = stack.holds[end - 1] if end else 0
        if height > segment.height_bytes or hold > segment.hold_bytes:
            return False
        first = end
    return True


def _bytes_of(graph: KernelGraph, number: int) -> int:
    return graph.tensors[number].size_bytes
