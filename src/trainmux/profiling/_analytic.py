"""Profiles without measuring: bytes and operations over a device's rates, at widths of which few are lowered.

A node takes as long as the slower of its arithmetic and its memory traffic, and a moment to begin and end.
Every storage that it reads or writes crosses the memory bus once. Products run in waves of one tile on each
multiprocessor: one with few tiles leaves the rest of the device idle, which is what fusion is for. Copies
take bytes over the link's rate.

Fusing and lowering a large model takes many seconds for each width. Two widths mostly give the same kernels
on larger tensors: then the widths between them do too, and every size is a straight line through the two.
This is checked node by node and size by size. What cannot be checked is that no width between the two is an
exception: a plan over interpolated profiles must not leave before ``WidthProfiles.confirmed`` has lowered the
widths that it uses. Members alone give other kernels than members fused, so where a width lies between one
member and many, two members are lowered as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import fx

from trainmux.ir import ByteClass, Phase, Profile, ProfiledNode, ProfiledTensor
from trainmux.lowering import RegionCall
from trainmux.profiling._devices import BANDWIDTH_SHARE, FLOPS_SHARE, NODE_SECONDS, Device
from trainmux.profiling._kernels import KernelGraph, Work, target_text
from trainmux.sizes import round_up

_ALONE, _FUSED = 1, 2


@dataclass(frozen=True)
class Outline:
    """A step's nodes and storages: what they are apart from sizes, and all sizes in one row.

    ``numbers`` are the bytes of each storage, then the four sizes of each node's `Work`.
    """

    steps: tuple[_NodeOutline, ...]
    tensors: tuple[tuple[str, ByteClass], ...]
    numbers: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage."""
        return self.numbers[: len(self.tensors)]

    def works(self) -> Iterator[Work | None]:
        """The work of each node."""
        rest = iter(self.numbers[len(self.tensors) :])
        for step in self.steps:
            if step.passes is None:
                yield None
            else:
                batch, rows, columns, depth = islice(rest, 4)
                yield Work(batch, rows, columns, depth, step.passes)


@dataclass(frozen=True)
class _NodeOutline:
    """A node: ``kind`` is what it calls, apart from sizes; ``passes`` that of its work, if it has any."""

    name: str
    kind: tuple[Any, ...]
    phase: Phase
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    changes: tuple[int, ...]
    passes: float | None


def outline_of(graph: KernelGraph) -> Outline:
    """The outline of kernels that were lowered."""
    numbers = [tensor.size_bytes for tensor in graph.tensors]
    steps = []
    for step in graph.steps:
        work = step.work
        if work is not None:
            numbers += [work.batch, work.rows, work.columns, work.depth]
        kind, passes = _kind(graph.module, step.node), None if work is None else work.passes
        steps.append(
            _NodeOutline(step.node.name, kind, step.phase, step.reads, step.creates, step.changes, passes)
        )
    tensors = tuple((tensor.name, tensor.byte_class) for tensor in graph.tensors)
    return Outline(tuple(steps), tensors, tuple(numbers))


def outline_between(
    low: Outline, low_width: int, high: Outline, high_width: int, width: int
) -> Outline | None:
    """The outline of a width between two; ``None`` where their nodes are not the same, or sizes do not grow
    by the same whole number with each member."""
    if (low.steps, low.tensors) != (high.steps, high.tensors):
        return None
    grown = [divmod(b - a, high_width - low_width) for a, b in zip(low.numbers, high.numbers, strict=True)]
    if any(rest or growth < 0 for growth, rest in grown):
        return None
    sizes = (a + growth * (width - low_width) for a, (growth, _) in zip(low.numbers, grown, strict=True))
    return replace(low, numbers=tuple(sizes))


def _kind(module: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """A node's target, without sizes; a region counts by the types and dimensions of its outputs."""
    if node.op != "call_module":
        return (node.op, target_text(node.target))
    called = module.get_submodule(str(node.target))
    if not isinstance(called, RegionCall):
        return (node.op, type(called).__name__)
    outputs = tuple((str(spec.dtype), len(spec.shape), spec.padded is None) for spec in called.outputs)
    return (node.op, "region", outputs, called.placed, called.changed)


def analytic_profile(graph: KernelGraph, width: int, device: Device, *, half: bool) -> Profile:
    """The profile of a sub-array's step on ``device``; ``half`` says that products are of 16-bit numbers."""
    return profile_of_outline(outline_of(graph), graph.fingerprint(), width, device, half=half)


def profile_of_outline(outline: Outline, origin: str, width: int, device: Device, *, half: bool) -> Profile:
    """The profile of an outline; ``origin`` says whose kernels it was made of."""
    flops = (device.half_flops if half else device.single_flops) * FLOPS_SHARE
    bandwidth = device.bandwidth * BANDWIDTH_SHARE
    sizes, nodes = outline.sizes, []
    for step, work in zip(outline.steps, outline.works(), strict=True):
        # What a node changes is read and written.
        moved = (*step.reads, *step.creates, *step.changes, *step.changes)
        seconds = sum(sizes[number] for number in moved) / bandwidth
        if work is not None:
            seconds = max(work.flops / flops * idleness(work.tiles, device.num_multiprocessors), seconds)
        touched = (step.reads, step.creates, step.changes)
        is_repeatable = not step.changes
        nodes.append(
            ProfiledNode(step.name, step.phase, *touched, NODE_SECONDS + seconds, is_repeatable=is_repeatable)
        )
    rates = (device.link, device.link, device.duplex_link, device.duplex_link)
    tensors = tuple(
        ProfiledTensor(name, byte_class, size, *(size / rate for rate in rates))
        for (name, byte_class), size in zip(outline.tensors, sizes, strict=True)
    )
    text = repr((origin, width, device, half, FLOPS_SHARE, BANDWIDTH_SHARE, NODE_SECONDS))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Profile(fingerprint, "analytic", width, device.facts, tensors, tuple(nodes))


def idleness(tiles: int, num_multiprocessors: int) -> float:
    """Time of a product relative to one whose tiles fill every wave."""
    if tiles == 0:
        return 1.0
    return round_up(tiles, num_multiprocessors) / tiles


class WidthProfiles:
    """Profiles by width, for ``device``; ``read`` lowers a width and reads its kernels."""

    def __init__(self, read: Callable[[int], KernelGraph], device: Device, *, half: bool) -> None:
        self._read = read
        self._device = device
        self._half = half
        self._outlines: dict[int, Outline] = {}
        self._profiles: dict[int, Profile] = {}

    @property
    def lowered(self) -> frozenset[int]:
        """The widths whose kernels were read."""
        return frozenset(self._outlines)

    def profile(self, width: int) -> Profile:
        """Interpolated between two other widths where that can be, else from the kernels."""
        if width not in self._profiles:
            found = self._between(width)
            if found is None:
                return self.confirmed(width)
            outline, origin = found
            self._profiles[width] = profile_of_outline(outline, origin, width, self._device, half=self._half)
        return self._profiles[width]

    def confirmed(self, width: int) -> Profile:
        """From the kernels; equal to what was interpolated but for its fingerprint, unless that was wrong."""
        if width not in self._outlines:
            graph = self._read(width)
            self._outlines[width] = outline_of(graph)
            self._profiles[width] = analytic_profile(graph, width, self._device, half=self._half)
        return self._profiles[width]

    def _between(self, width: int) -> tuple[Outline, str] | None:
        """The outline of a width by those around it, and of whose kernels it was made."""
        higher = min((known for known in self._outlines if known > width), default=None)
        if higher is None:
            return None
        if width > _FUSED and not any(_ALONE < known < width for known in self._outlines):
            self.confirmed(_FUSED)
        lower = max((known for known in self._outlines if known < width), default=None)
        if lower is None:
            return None
        outline = outline_between(self._outlines[lower], lower, self._outlines[higher], higher, width)
        if outline is None:
            return None
        ends = (self._profiles[lower].fingerprint, self._profiles[higher].fingerprint)
        return outline, f"between {lower} and {higher}: {ends}"


def same_but_for_origin(derived: Profile, lowered: Profile) -> bool:
    """Whether two profiles are equal but for their fingerprints."""
    return replace(derived, fingerprint=lowered.fingerprint) == lowered
