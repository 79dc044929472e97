"""Default partition of a group: one wide array, or narrow ones in parallel.

Where measuring is allowed, the group's library calls are timed (`fusion/strategies/_skeleton.py`) at width 1
and as the rule below has it, then at growing widths as long as that helps; the answers are kept on disk.

Else a rule decides. Measured on an H200 (bf16, eight members, `benchmarks/results/`): transformers,
recommenders and small models gain from complete fusion; large convolutions do not, because one grouped
convolution is slower than its parts, and its layout forces copies on everything around it. There, single
members on four branches of one CUDA graph fill the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from trainmux.fleet._config import FleetConfig
from trainmux.fusion import MEASURED, OperatorTimes, Partition, library_calls, partition_time
from trainmux.tracing import TracedGraph

aten = torch.ops.aten

_LARGE_CONVOLUTIONS_FLOPS = 2e10
_NUM_BRANCHES = 4
_NARROW_WIDTHS = (1, 2, 4)
_CLEAR_GAIN = 0.95


def choose_partition(
    traced: TracedGraph,
    width: int,
    config: FleetConfig,
    *,
    batched: Sequence[bool] = (),
    times: OperatorTimes | None = None,
) -> tuple[int, int]:
    """The width of each sub-array and the number of parallel branches for ``width`` members.

    ``batched`` says which placeholders differ between members; with ``times``, partitions are measured.
    """
    chosen = _partition_by_rule(traced, width, config)
    measures = times is not None and config.width is None and config.strategies.get("width") == MEASURED
    if measures and width > 1:
        calls = library_calls(traced.module, batched)

        def seconds(partition: Partition) -> float | None:
            assert times is not None
            return partition_time(calls, width, partition, config.strategies, times) if calls else None

        widths = [array for array in (*_NARROW_WIDTHS, width) if array <= width and width % array == 0]
        chosen = fastest_partition(chosen, [_side_by_side(array, width, config) for array in widths], seconds)
    return chosen.width, chosen.num_branches


def fastest_partition(
    usual: Partition, by_width: Sequence[Partition], seconds: Callable[[Partition], float | None]
) -> Partition:
    """The best of ``by_width`` (the narrowest first, of width 1) and ``usual``, looking at few of them.

    Wider ones are looked at while each gains on the one before. The usual one is left only for a clear gain:
    what lies between library calls is not measured.
    """
    usual_s, narrow_s = seconds(usual), seconds(by_width[0])
    if usual_s is None or narrow_s is None:
        return usual
    best, best_s = (usual, usual_s) if usual_s <= narrow_s else (by_width[0], narrow_s)
    if best == by_width[0]:
        for wider in by_width[1:]:
            wider_s = usual_s if wider == usual else seconds(wider)
            if wider_s is None or wider_s >= best_s:
                break
            best, best_s = wider, wider_s
    return best if best_s <= _CLEAR_GAIN * usual_s else usual


def _partition_by_rule(traced: TracedGraph, width: int, config: FleetConfig) -> Partition:
    separate = config.device.type == "cuda" and convolution_flops(traced) >= _LARGE_CONVOLUTIONS_FLOPS
    wanted = config.width or (1 if separate else width)
    array = max(size for size in range(1, min(wanted, width) + 1) if width % size == 0)
    return _side_by_side(array, width, config)


def _side_by_side(array: int, width: int, config: FleetConfig) -> Partition:
    branches = config.branches or (_NUM_BRANCHES if array < width else 1)
    return Partition(array, min(branches, width // array))


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
