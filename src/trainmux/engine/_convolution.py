"""Convolutions that write to given memory (torch 2.11 to 2.13, cuDNN).

``aten.convolution`` has an ``out`` overload, but that computes elsewhere and copies. On a CUDA device the
operator hands on to ``aten.cudnn_convolution``, whose own ``out`` overload writes where it is told to, in the
layout of the memory that it is given. It is used here only where that is the layout, and cuDNN the library,
that ``aten.convolution`` would take itself: so both compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_NUM_AXES = 4
NUM_ARGUMENTS = 9
"""Of ``aten.convolution``, all of them by position."""


def convolve_into(args: Sequence[Any], out: Tensor) -> bool:
    """Run ``aten.convolution`` on ``args`` into ``out``; false, and nothing done, where it cannot be."""
    if len(args) != NUM_ARGUMENTS:
        return False
    data, weight, bias, stride, padding, dilation, is_transposed, _, groups = args
    if data.device.type != "cuda" or not can_write(data, weight, out, is_transposed=is_transposed):
        return False
    if torch._C._select_conv_backend(*args).name != "Cudnn":
        return False
    cudnn = torch.backends.cudnn
    is_deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    settings = (cudnn.benchmark, is_deterministic, torch._C._get_cudnn_allow_tf32())
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
