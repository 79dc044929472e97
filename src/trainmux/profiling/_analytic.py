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
from collections.abc import Callable, Hashable
from dataclasses import replace

from trainmux.ir import Profile
from trainmux.lowering import RegionCall
from trainmux.profiling._devices import BANDWIDTH_SHARE, FLOPS_SHARE, NODE_SECONDS, Device
from trainmux.profiling._kernels import KernelGraph, KernelStep, target_text
from trainmux.sizes import round_up

_ALONE, _FUSED = 1, 2
_SIZES = ("batch", "rows", "columns", "depth")
"""Sizes of a node's work."""


def analytic_profile(graph: KernelGraph, width: int, device: Device, *, half: bool) -> Profile:
    """The profile of a sub-array's step on ``device``; ``half`` says that products are of 16-bit numbers."""
    return _profile(graph, graph.fingerprint(), width, device, half=half)


def _profile(graph: KernelGraph, origin: str, width: int, device: Device, *, half: bool) -> Profile:
    """The profile by a graph's steps and tensors; ``origin`` says whose kernels they are."""
    flops = (device.half_flops if half else device.single_flops) * FLOPS_SHARE
    bandwidth = device.bandwidth * BANDWIDTH_SHARE
    seconds = []
    for step in graph.steps:
        # What a node changes is read and written.
        moved = sum(graph.tensors[number].size_bytes for number in (*step.touched, *step.changes))
        taken, work = moved / bandwidth, step.work
        if work is not None:
            taken = max(work.flops / flops * idleness(work.tiles, device.num_multiprocessors), taken)
        seconds.append(NODE_SECONDS + taken)
    rates = (device.link, device.link, device.duplex_link, device.duplex_link)
    tensors, nodes = graph.profiled(seconds, rates)
    text = repr((origin, width, device, half, FLOPS_SHARE, BANDWIDTH_SHARE, NODE_SECONDS))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Profile(fingerprint, "analytic", width, device.facts, tensors, nodes)


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
        self._graphs: dict[int, KernelGraph] = {}
        self._profiles: dict[int, Profile] = {}

    @property
    def lowered(self) -> frozenset[int]:
        """The widths whose kernels were read."""
        return frozenset(self._graphs)

    def profile(self, width: int) -> Profile:
        """Interpolated between two other widths where that can be, else from the kernels."""
        if width not in self._profiles:
            found = self._between(width)
            if found is None:
                return self.confirmed(width)
            graph, origin = found
            self._profiles[width] = _profile(graph, origin, width, self._device, half=self._half)
        return self._profiles[width]

    def confirmed(self, width: int) -> Profile:
        """From the kernels; equal to what was interpolated but for its fingerprint, unless that was wrong."""
        if width not in self._graphs:
            graph = self._graphs[width] = self._read(width)
            self._profiles[width] = analytic_profile(graph, width, self._device, half=self._half)
        return self._profiles[width]

    def _between(self, width: int) -> tuple[KernelGraph, str] | None:
        """Steps and tensors of a width by those around it, and of whose kernels they were made."""
        higher = min((known for known in self._graphs if known > width), default=None)
        if higher is None:
            return None
        if width > _FUSED and not any(_ALONE < known < width for known in self._graphs):
            self.confirmed(_FUSED)
        lower = max((known for known in self._graphs if known < width), default=None)
        if lower is None:
            return None
        graph = _interpolated(self._graphs[lower], lower, self._graphs[higher], higher, width)
        ends = (self._profiles[lower].fingerprint, self._profiles[higher].fingerprint)
        return None if graph is None else (graph, f"between {lower} and {higher}: {ends}")


def same_but_for_origin(derived: Profile, lowered: Profile) -> bool:
    """Whether two profiles are equal but for their fingerprints."""
    return replace(derived, fingerprint=lowered.fingerprint) == lowered


def _interpolated(
    low: KernelGraph, low_width: int, high: KernelGraph, high_width: int, width: int
) -> KernelGraph | None:
    """The graph of a width between two, its values those of ``low``.

    ``None`` where the nodes are not the same, or sizes do not grow by the same whole number with each member.
    """
    if _structure(low) != _structure(high):
        return None
    numbers = []
    for a, b in zip(_numbers(low), _numbers(high), strict=True):
        growth, rest = divmod(b - a, high_width - low_width)
        if rest or growth < 0:
            return None
        numbers.append(a + growth * (width - low_width))
    following = iter(numbers)
    tensors = tuple(replace(tensor, size_bytes=next(following)) for tensor in low.tensors)
    steps = tuple(
        replace(step, work=replace(step.work, **dict(zip(_SIZES, following, strict=False))))
        if step.work
        else step
        for step in low.steps
    )
    return replace(low, steps=steps, tensors=tensors)


def _structure(graph: KernelGraph) -> Hashable:
    """A step's nodes and storages, without sizes."""
    steps = tuple(
        (
            step.node.name,
            _kind(graph, step),
            step.phase,
            (step.reads, step.creates, step.changes),
            step.work and step.work.passes,
        )
        for step in graph.steps
    )
    return steps, tuple((tensor.name, tensor.byte_class) for tensor in graph.tensors)


def _kind(graph: KernelGraph, step: KernelStep) -> Hashable:
    """A node's target, without sizes; a region counts by the types and dimensions of its outputs."""
    node = step.node
    if node.op != "call_module":
        return (node.op, target_text(node.target))
    called = graph.module.get_submodule(str(node.target))
    if not isinstance(called, RegionCall):
        return (node.op, type(called).__name__)
    outputs = tuple((spec.dtype, len(spec.shape), spec.padded is None) for spec in called.outputs)
    return (node.op, "region", outputs, called.placed, called.changed)


def _numbers(graph: KernelGraph) -> list[int]:
    """The bytes of each storage, then the four sizes of each node's work."""
    found = [tensor.size_bytes for tensor in graph.tensors]
    for step in graph.steps:
        if step.work is not None:
            found += [getattr(step.work, size) for size in _SIZES]
    return found
