"""Default partition of a group: one wide array, or narrow ones in parallel.

Measured on an H200 (bf16, eight members, `benchmarks/results/`): transformers,
recommenders and small models gain from complete fusion; large convolutions do not, because one grouped
convolution is slower than its parts, and its layout forces copies on everything around it. There, single
members on four branches of one CUDA graph fill the device.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from trainmux.fleet._config import FleetConfig
from trainmux.tracing import TracedGraph

aten = torch.ops.aten

_LARGE_CONVOLUTIONS_FLOPS = 2e10
_NUM_BRANCHES = 4


def choose_partition(traced: TracedGraph, width: int, config: FleetConfig) -> tuple[int, int]:
    """The width of each sub-array and the number of parallel branches for ``width`` members."""
    separate = config.device.type == "cuda" and convolution_flops(traced) >= _LARGE_CONVOLUTIONS_FLOPS
    wanted = config.width or (1 if separate else width)
    array = max(size for size in range(1, min(wanted, width) + 1) if width % size == 0)
    branches = config.branches or (_NUM_BRANCHES if array < width else 1)
    return array, min(branches, width // array)


def convolution_flops(traced: TracedGraph) -> float:
    """Floating-point operations of one member's convolutions in a step, backward included."""
    return sum(_flops(node) for node in traced.module.graph.nodes if node.op == "call_function")


def _flops(node: fx.Node) -> float:
    if node.target is aten.convolution.default:
        return _products(node.meta["val"], node.args[1].meta["val"])  # type: ignore[union-attr]
    if node.target is aten.convolution_backward.default:
        out, weight = node.args[0].meta["val"], node.args[2].meta["val"]  # type: ignore[union-attr]
        wanted: Any = node.args[-1]
        return _products(out, weight) * sum(map(bool, wanted[:2]))
    return 0.0


def _products(out: Tensor, weight: Tensor) -> float:
    return 2.0 * out.numel() * prod(weight.shape[1:])
