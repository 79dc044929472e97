"""A 1x1 convolution as a product of matrices: pixels by channels, in either layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainmux.fusion._stacked import Context, Stacked
from trainmux.fusion.strategies.convolution_call import Geometry, Gradients, convolution_way, has_one_pixel


def _forward(
    context: Context, x: Tensor | Stacked, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    images = context.stack(x)
    pixels = images.flatten(3)
    out = torch.matmul(weight.flatten(2).unsqueeze(1), pixels)
    if bias is not None:
        out = out + bias[:, None, :, None]
    return out.reshape(*out.shape[:3], *images.shape[3:])


def _backward(
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> Gradients:
    images = context.stack(x)
    outgoing, pixels = grad.flatten(3), images.flatten(3)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        flat = torch.matmul(weight.flatten(2).transpose(1, 2).unsqueeze(1), outgoing)
        grad_x = flat.unflatten(3, images.shape[3:])
    if mask[1]:
        left = outgoing.transpose(1, 2).flatten(2)
        right = pixels.permute(0, 1, 3, 2).flatten(1, 2)
        grad_weight = torch.bmm(left, right).reshape(weight.shape)
    if mask[2]:
        grad_bias = outgoing.sum((1, 3))
    return grad_x, grad_weight, grad_bias


def _pixels(images: Tensor) -> Tensor:
    """``[k, n, c, ...]`` as ``[k, pixels, c]``; free where channels lie innermost and members outermost."""
    return images.movedim(2, -1).flatten(1, -2)


def _images(pixels: Tensor, like: Tensor) -> Tensor:
    """The way back to the number of images and the sizes of ``like``, as a view."""
    split: Tensor = pixels.unflatten(1, (like.shape[1], *like.shape[3:]))
    return split.movedim(-1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """One matrix each is no batch: the library has more kernels for a plain product."""
    return torch.mm(a[0], b[0]).unsqueeze(0) if a.shape[0] == 1 else torch.bmm(a, b)


def _innermost_forward(
    context: Context, x: Tensor | Stacked, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    images = context.stack(x)
    out = _product(_pixels(images), weight.flatten(2).transpose(1, 2))
    if bias is not None:
        out = out + bias.unsqueeze(1)
    return _images(out, images)


def _innermost_backward(
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> Gradients:
    images = context.stack(x)
    outgoing = _pixels(grad)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        grad_x = _images(_product(outgoing, weight.flatten(2)), images)
    if mask[1]:
        grad_weight = _product(outgoing.transpose(1, 2), _pixels(images)).reshape(weight.shape)
    if mask[2]:
        grad_bias = outgoing.sum(1)
    return grad_x, grad_weight, grad_bias


BMM = convolution_way("bmm", "1x1 convolution as bmm", _forward, _backward, has_one_pixel)
BMM_CHANNELS_LAST = convolution_way(
    "bmm_channels_last",
    "1x1 convolution as bmm, channels innermost",
    _innermost_forward,
    _innermost_backward,
    has_one_pixel,
)
SINGLE_MM = convolution_way(
    "single_mm",
    "the member's own 1x1 convolution as mm",
    _innermost_forward,
    _innermost_backward,
    has_one_pixel,
    single=True,
)
