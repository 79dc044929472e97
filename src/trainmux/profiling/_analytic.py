"""A profile that nobody measured: bytes and operations over a device's rates.

A node takes as long as the slower of its arithmetic and its memory traffic, and a moment to begin and end.
Every storage that it reads or writes crosses the memory bus once. Products run in waves of one tile on each
multiprocessor: one with few tiles leaves the rest of the device idle, which is what fusion is for. Copies
take bytes over the link's rate.
"""

from __future__ import annotations

import hashlib

from trainmux.ir import Profile, ProfiledNode, ProfiledTensor
from trainmux.profiling._devices import BANDWIDTH_SHARE, FLOPS_SHARE, NODE_SECONDS, Device
from trainmux.profiling._kernels import KernelGraph
from trainmux.profiling._outline import Outline, outline_of


def analytic_profile(graph: KernelGraph, width: int, device: Device, *, half: bool) -> Profile:
    """The profile of a sub-array's step on ``device``; ``half`` says that products are of 16-bit numbers."""
    return profile_of_outline(outline_of(graph), graph.fingerprint(), width, device, half=half)


def profile_of_outline(outline: Outline, origin: str, width: int, device: Device, *, half: bool) -> Profile:
    """The same from what it needs of the kernels; ``origin`` says which kernels these are."""
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
    """How many times longer a product takes than if its tiles filled every wave."""
    if tiles == 0:
        return 1.0
    return -(-tiles // num_multiprocessors) * num_multiprocessors / tiles
