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
from trainmux.profiling._kernels import KernelGraph, KernelStep


def analytic_profile(graph: KernelGraph, width: int, device: Device, *, half: bool) -> Profile:
    """The profile of a sub-array's step on ``device``; ``half`` says that products are of 16-bit numbers."""
    flops = (device.half_flops if half else device.single_flops) * FLOPS_SHARE
    bandwidth = device.bandwidth * BANDWIDTH_SHARE
    nodes = tuple(
        ProfiledNode(
            step.node.name,
            step.phase,
            step.reads,
            step.creates,
            step.changes,
            NODE_SECONDS
            + max(
                step.flops / flops * idleness(step.tiles, device.num_multiprocessors),
                traffic(graph, step) / bandwidth,
            ),
            is_repeatable=not step.changes,
        )
        for step in graph.steps
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
        for tensor in graph.tensors
    )
    text = repr((graph.fingerprint(), width, device, half, FLOPS_SHARE, BANDWIDTH_SHARE, NODE_SECONDS))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Profile(fingerprint, "analytic", width, device.facts, tensors, nodes)


def idleness(tiles: int, num_multiprocessors: int) -> float:
    """How many times longer a product takes than if its tiles filled every wave."""
    if tiles == 0:
        return 1.0
    return -(-tiles // num_multiprocessors) * num_multiprocessors / tiles


def traffic(graph: KernelGraph, step: KernelStep) -> int:
    """Bytes that a node moves: what it changes is read and written."""
    sizes = [graph.tensors[number].size_bytes for number in (*step.reads, *step.creates)]
    return sum(sizes) + 2 * sum(graph.tensors[number].size_bytes for number in step.changes)
