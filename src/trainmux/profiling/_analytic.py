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
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import fx

from trainmux.ir import Phase, Profile, ProfiledNode, ProfiledTensor
from trainmux.lowering import RegionCall
from trainmux.profiling._devices import BANDWIDTH_SHARE, FLOPS_SHARE, NODE_SECONDS, Device
from trainmux.profiling._kernels import KernelGraph, KernelStep, KernelTensor, Work, target_text

_ALONE, _FUSED = 1, 2


@dataclass(frozen=True)
class OutlineStep:
    """A node: ``kind`` is what it calls, apart from sizes; the rest as in `KernelStep`."""

    name: str
    kind: tuple[Any, ...]
    phase: Phase
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    changes: tuple[int, ...]
    work: Work | None


@dataclass(frozen=True)
class Outline:
    """The nodes of a step in order, and the storages they touch."""

    steps: tuple[OutlineStep, ...]
    tensors: tuple[KernelTensor, ...]

    def traffic(self, step: OutlineStep) -> int:
        """Bytes that a node moves: what it changes is read and written."""
        sizes = [self.tensors[number].size_bytes for number in (*step.reads, *step.creates)]
        return sum(sizes) + 2 * sum(self.tensors[number].size_bytes for number in step.changes)


def outline_of(graph: KernelGraph) -> Outline:
    """The outline of kernels that were lowered."""
    return Outline(tuple(_outline_step(graph.module, step) for step in graph.steps), graph.tensors)


def outline_between(
    low: Outline, low_width: int, high: Outline, high_width: int, width: int
) -> Outline | None:
    """The outline of a width between two; ``None`` where their nodes are not the same, or sizes do not grow
    by the same whole number with each member."""
    if not low_width < width < high_width:
        raise ValueError(f"expected a width between {low_width} and {high_width}, got {width}")
    if len(low.steps) != len(high.steps) or len(low.tensors) != len(high.tensors):
        return None
    line = _Line(low_width, high_width, width)
    steps = [line.step(a, b) for a, b in zip(low.steps, high.steps, strict=True)]
    tensors = [line.tensor(a, b) for a, b in zip(low.tensors, high.tensors, strict=True)]
    whole_steps = tuple(step for step in steps if step is not None)
    whole_tensors = tuple(tensor for tensor in tensors if tensor is not None)
    if len(whole_steps) < len(steps) or len(whole_tensors) < len(tensors):
        return None
    return Outline(whole_steps, whole_tensors)


class _Line:
    """Numbers at a width, from those at a lower and a higher one; ``None`` where no line goes through."""

    def __init__(self, low_width: int, high_width: int, width: int) -> None:
        self._way = high_width - low_width
        self._done = width - low_width

    def number(self, low: int, high: int) -> int | None:
        growth, rest = divmod(high - low, self._way)
        return None if rest or growth < 0 else low + growth * self._done

    def tensor(self, low: KernelTensor, high: KernelTensor) -> KernelTensor | None:
        size = self.number(low.size_bytes, high.size_bytes)
        if size is None or (low.name, low.byte_class) != (high.name, high.byte_class):
            return None
        return KernelTensor(low.name, low.byte_class, size)

    def step(self, low: OutlineStep, high: OutlineStep) -> OutlineStep | None:
        if low.work is None and high.work is None:
            return low if low == high else None
        if low.work is None or high.work is None:
            return None
        work = self._work(low.work, high.work)
        if work is None or replace(low, work=work) != replace(high, work=work):
            return None
        return replace(low, work=work)

    def _work(self, low: Work, high: Work) -> Work | None:
        if low.passes != high.passes:
            return None
        names = [field.name for field in fields(Work) if field.name != "passes"]
        sizes = {name: self.number(getattr(low, name), getattr(high, name)) for name in names}
        whole = {name: size for name, size in sizes.items() if size is not None}
        return replace(low, **whole) if len(whole) == len(sizes) else None


def _outline_step(module: fx.GraphModule, step: KernelStep) -> OutlineStep:
    kind = _kind(module, step.node)
    return OutlineStep(step.node.name, kind, step.phase, step.reads, step.creates, step.changes, step.work)


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
    nodes = []
    for step in outline.steps:
        seconds = outline.traffic(step) / bandwidth
        if step.work is not None:
            idle = idleness(step.work.tiles, device.num_multiprocessors)
            seconds = max(step.work.flops / flops * idle, seconds)
        nodes.append(
            ProfiledNode(
                step.name,
                step.phase,
                step.reads,
                step.creates,
                step.changes,
                NODE_SECONDS + seconds,
                is_repeatable=not step.changes,
            )
        )
    tensors = tuple(
        ProfiledTensor(
            tensor.name,
            tensor.byte_class,
            tensor.size_bytes,
            tensor.size_bytes / device.link,
            tensor.size_bytes / device.link,
            tensor.size_bytes / device.duplex_link,
            tensor.size_bytes / device.duplex_link,
        )
        for tensor in outline.tensors
    )
    text = repr((origin, width, device, half, FLOPS_SHARE, BANDWIDTH_SHARE, NODE_SECONDS))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Profile(fingerprint, "analytic", width, device.facts, tensors, tuple(nodes))


def idleness(tiles: int, num_multiprocessors: int) -> float:
    """Time of a product relative to one whose tiles fill every wave."""
    if tiles == 0:
        return 1.0
    return -(-tiles // num_multiprocessors) * num_multiprocessors / tiles


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
