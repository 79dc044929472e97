"""Nodes whose results go to given memory: written there where the operator can, copied there otherwise.

Matrix products have an ``out`` argument, as have convolutions by cuDNN; compiled regions take their outputs'
memory from their caller. What is left (attention, backward passes of convolutions, odd operators) computes
into memory of its own, which is given back as soon as the result has been copied. A result that only the next
node reads is not copied: it is handed over as it is, and given back when that node has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.ir import Phase
from trainmux.lowering import Place, RegionCall, extended, extended_product
from trainmux.profiling import KernelGraph, Location
from trainmux.runtime import is_depthwise
from trainmux.sizes import round_up

aten = torch.ops.aten

_ROUNDING = 512
"""Torch gives out memory in multiples of this."""

_WITH_OUT: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}


def handed_over(graph: KernelGraph) -> dict[int, frozenset[int]]:
    """By rank: tensors that a node creates, cannot write to their place, and only the next node reads."""
    users: dict[int, list[int]] = {}
    for rank, step in enumerate(graph.steps):
        for number in (*step.reads, *step.changes):
            users.setdefault(number, []).append(rank)
    kept = {location.tensor for location in graph.outputs}
    found = {}
    for rank, (step, following) in enumerate(pairwise(graph.steps)):
        candidates = {
            number
            for number in step.creates
            if users.get(number) == [rank + 1]
            and number in following.reads
            and number not in kept
            and step.results.count(number) == 1
        }
        if candidates and not _takes_memory(graph, step.node):
            found[rank] = frozenset(candidates)
    return found


def scratch_bytes(graph: KernelGraph) -> int:
    """The most scratch needed at a time by results that are not written to their place at once."""
    own = [
        0 if _takes_memory(graph, step.node) else _rounded_bytes(graph, step.creates) for step in graph.steps
    ]
    return max([*own, *(held + own[rank + 1] for rank, held in _held_bytes(graph).items())], default=0)


def measured_scratch_bytes(graph: KernelGraph, workspaces: Sequence[int]) -> int:
    """The most scratch that nodes need at a time, ``workspaces`` being those of each.

    While something is handed over, nodes of the forward pass may be run again.
    """
    again = max(
        (w for w, step in zip(workspaces, graph.steps, strict=True) if step.phase is Phase.FORWARD), default=0
    )
    held = _held_bytes(graph).items()
    return max([*workspaces, *(size + max(again, workspaces[rank + 1]) for rank, size in held)], default=0)


def _held_bytes(graph: KernelGraph) -> dict[int, int]:
    """By rank: what a node hands over to the next one."""
    return {rank: _rounded_bytes(graph, numbers) for rank, numbers in handed_over(graph).items()}


def _rounded_bytes(graph: KernelGraph, numbers: Iterable[int]) -> int:
    return sum(round_up(graph.tensors[number].size_bytes, _ROUNDING) for number in numbers)


def _takes_memory(graph: KernelGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph.module.get_submodule(str(node.target)), RegionCall)
    if node.target is aten.convolution.default:
        return _convolution_takes_memory(graph, node)
    return node.target in _WITH_OUT or node.target is extended_product


def _convolution_takes_memory(graph: KernelGraph, node: fx.Node) -> bool:
    """Whether this is certain before it runs: cuDNN may leave convolutions of several groups to others."""
    if len(node.args) != NUM_ARGUMENTS:
        return False
    data, weight, _, _, _, _, is_transposed, _, num_groups = node.args
    places = [graph.values[each] for each in (data, weight, node) if isinstance(each, fx.Node)]
    if num_groups != 1 or any(place.device.type != "cuda" for place in places):
        return False
    tensors = [_described(place) for place in places]
    return can_write(*tensors, is_transposed=bool(is_transposed))


def _described(location: Location) -> Tensor:
    return torch.empty_strided(location.shape, location.strides, dtype=location.dtype, device="meta")


def run_into(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[Place | None],
) -> list[Tensor]:
    """Call ``target``; returns the tensors among its results, those with a place lying there.

    ``places`` has one entry for each such tensor. A result without a place stays where the operator put it;
    so does one whose place allows it, unless it is a view.
    """
    if len(places) == 1 and places[0] is not None and _product_into(target, args, kwargs, places[0]):
        return [places[0].value]
    if isinstance(target, RegionCall):
        return target.into(args, places)
    value = target(*args, **kwargs)
    results = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [
        result if place is None else place.take(result) for result, place in zip(results, places, strict=True)
    ]


def _product_into(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> bool:
    """Write a matrix product or a convolution to its place; false for everything else."""
    if target is aten.convolution.default:
        return convolve_into(args, place.value)
    if target is extended_product:
        op, left_sizes, right_sizes, _, left, right = args
        shape = (*place.value.shape[:-2], left_sizes[0], right_sizes[1])
        room = _dense(place, shape)
        if room is None:
            return False
        _WITH_OUT[op](extended(left, left_sizes), extended(right, right_sizes), out=room)
        return True
    with_out = _WITH_OUT.get(target)
    if with_out is None or not place.value.is_contiguous():
        return False
    with_out(*args, **kwargs, out=place.value)
    return True


def _dense(place: Place, shape: Sequence[int]) -> Tensor | None:
    """The dense memory of ``shape`` that the value is the corner of, if it is one."""
    value = place.value
    strides = torch.empty(tuple(shape), device="meta").stride()
    typed = place.memory.view(value.dtype)
    if tuple(value.stride()) != tuple(strides) or typed.storage_offset() != value.storage_offset():
        return None
    return typed.as_strided(tuple(shape), strides) if typed.numel() == prod(shape) else None


# ---- convolutions -------------------------------------------------------------------------------------

_NUM_AXES = 4
NUM_ARGUMENTS = 9
"""Number of positional arguments of ``aten.convolution``."""


def convolve_into(args: Sequence[Any], out: Tensor) -> bool:
    """Run ``aten.convolution`` on ``args`` into ``out``; false, and nothing done, where it cannot be.

    Its own ``out`` overload computes elsewhere and copies. On CUDA it calls ``aten.cudnn_convolution``, whose
    ``out`` overload writes in the layout of the memory it is given (torch 2.11 to 2.13). That is used only
    where layout and library are those that ``aten.convolution`` would take: both compute the same bits.
    """
    if len(args) != NUM_ARGUMENTS:
        return False
    data, weight, bias, stride, padding, dilation, is_transposed, _, groups = args
    if data.device.type != "cuda" or not can_write(data, weight, out, is_transposed=is_transposed):
        return False
    if torch._C._select_conv_backend(*args).name != "Cudnn":
        return False
    cudnn = torch.backends.cudnn
    is_deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    searches = cudnn.benchmark and not is_depthwise(weight, groups)
    settings = (searches, is_deterministic, torch._C._get_cudnn_allow_tf32())
    aten.cudnn_convolution.out(data, weight, padding, stride, dilation, groups, *settings, out=out)
    if bias is not None:
        out.add_(bias.view(1, -1, *[1] * (out.dim() - 2)))
    return True


def can_write(data: Tensor, weight: Tensor, out: Tensor, *, is_transposed: bool) -> bool:
    """Whether ``out`` is laid out as cuDNN's result of ``data`` and ``weight`` would be; meta tensors do."""
    if is_transposed or data.dim() != _NUM_AXES or not out.numel() or data.dtype != weight.dtype:
        return False
    innermost = data.dtype != torch.float64 and (_has_channels_last(data) or _has_channels_last(weight))
    if _has_channels_last(out) != innermost:
        return False
    return out.is_contiguous(memory_format=torch.channels_last if innermost else torch.contiguous_format)


def _has_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes a tensor's strides for those of channels last: C within W within H within N.

    Axes of one element count too: their strides tell which layout somebody had in mind.
    """
    needed = 0
    if tensor.stride(1) == 0:
        return False
    for axis in (1, 3, 2, 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride < needed or (axis == 0 and needed == tensor.stride(1)):
            return False
        needed = stride * size if size > 1 else stride
    return True
