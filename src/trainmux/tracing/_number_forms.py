"""Operators with a form that takes a tensor in the place of a Python number.

Each form computes what the operator does, with tensors of no dimension for some of its numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def _scaled(x: Any, factor: Any) -> Any:
    """``x * factor``, without a product where the factor is the usual 1."""
    return x if not isinstance(factor, Tensor) and factor == 1 else x * factor


def _clamped(x: Tensor, lower: Any = None, upper: Any = None) -> Tensor:
    def bound(value: Any) -> Any:
        return torch.full_like(x, value) if isinstance(value, (int, float)) else value

    result: Tensor = aten.clamp.Tensor(x, bound(lower), bound(upper))
    return result


def _filled(shape: Sequence[int], value: Tensor) -> Tensor:
    return value.expand(list(shape)).clone()


def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return torch.where(condition, x, y)


def _elu(x: Tensor, alpha: Any, scale: Any, input_scale: Any) -> Tensor:
    return torch.where(x > 0, _scaled(x, scale), torch.expm1(_scaled(x, input_scale)) * _scaled(alpha, scale))


def _elu_backward(
    grad: Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, value: Tensor
) -> Tensor:
    if is_result:
        slope = _scaled(value + _scaled(alpha, scale), input_scale)
    else:
        slope = torch.exp(_scaled(value, input_scale)) * _scaled(_scaled(alpha, scale), input_scale)
    return torch.where(value <= 0, grad * slope, _scaled(grad, scale))


def _softplus(x: Tensor, beta: Any, threshold: Any) -> Tensor:
    return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)


def _softplus_backward(grad: Tensor, x: Tensor, beta: Any, threshold: Any) -> Tensor:
    return torch.where(x * beta > threshold, grad, grad * torch.sigmoid(x * beta))


def _huber(x: Tensor, target: Tensor, reduction: int, delta: Any) -> Tensor:
    size = (x - target).abs()
    return _reduced(torch.where(size < delta, 0.5 * size * size, delta * (size - 0.5 * delta)), reduction)


def _huber_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: Any) -> Tensor:
    difference = x - target
    slope = torch.where(difference.abs() < delta, difference, torch.sign(difference) * delta)
    return grad * (slope / x.numel() if reduction == 1 else slope)


def _smooth_l1(x: Tensor, target: Tensor, reduction: int, beta: Any) -> Tensor:
    size = (x - target).abs()
    return _reduced(torch.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta), reduction)


def _smooth_l1_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: Any) -> Tensor:
    difference = x - target
    slope = torch.where(difference.abs() < beta, difference / beta, torch.sign(difference))
    return grad * (slope / x.numel() if reduction == 1 else slope)


def _reduced(value: Tensor, reduction: int) -> Tensor:
    return (value, value.mean(), value.sum())[reduction] if reduction else value


def _standardised(x: Tensor, dims: list[int], eps: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x`` with a mean of 0 and a variance of 1 over ``dims``; mean, reciprocal deviation and variance."""
    mean = x.mean(dims, keepdim=True)
    variance = ((x - mean) ** 2).mean(dims, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    return (x - mean) * scale, mean, scale, variance


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, scale, _ = _standardised(x, list(range(x.dim() - len(shape), x.dim())), eps)
    return _affine(result, weight, bias, shape), mean, scale


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    size: int,
    channels: int,
    area: int,
    groups: int,
    eps: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, scale, _ = _standardised(x.reshape(size, groups, -1), [2], eps)
    shape = [1, channels] + [1] * (x.dim() - 2)
    return _affine(result.reshape(x.shape), weight, bias, shape), mean.squeeze(2), scale.squeeze(2)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_variance: Tensor,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Tensor, ...]:
    if not training:
        running = running_mean, running_variance
        return *_fixed_batch_norm(x, weight, bias, *running, momentum, eps), *running
    result, mean, scale, variance = _batch_norm_of(x, weight, bias, eps)
    count = x.numel() // x.shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    new_mean = momentum * mean + (1 - momentum) * running_mean
    return result, mean, scale, new_mean, momentum * unbiased + (1 - momentum) * running_variance


def _batch_norm_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result, *statistics = _standardised(x, [dim for dim in range(x.dim()) if dim != 1], eps)
    mean, scale, variance = (value.flatten() for value in statistics)
    return _affine(result, weight, bias, _channels(x)), mean, scale, variance


def _fixed_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: Any,
    eps: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.rsqrt(variance + eps)
    result = (x - mean.reshape(_channels(x))) * scale.reshape(_channels(x))
    return _affine(result, weight, bias, _channels(x)), x.new_empty(0), x.new_empty(0)


def _channels(x: Tensor) -> list[int]:
    """Shape of one value per channel of ``x``."""
    return [1, x.shape[1]] + [1] * (x.dim() - 2)


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    training: bool,
    eps: Any,
    mask: Sequence[bool],
) -> Any:
    """Torch's own operator, which reads ``eps`` with running statistics only: they have it inside here."""
    running = running_variance if training or running_variance is None else running_variance + eps
    statistics = running_mean, running, mean, scale
    return aten.native_batch_norm_backward(grad, x, weight, *statistics, training, 0.0, mask)


def _linspace(start: Any, end: Any, steps: int, dtype: Any, layout: Any, device: Any, *_: Any) -> Tensor:
    index = torch.arange(steps, device=device)
    step = (end - start) / max(steps - 1, 1)
    is_early = index < max(steps // 2, 1)
    return torch.where(is_early, start + step * index, end - step * (steps - 1 - index))


def _hardtanh_backward(grad: Tensor, x: Tensor, lower: Any, upper: Any) -> Tensor:
    return grad.masked_fill((x <= lower) | (x >= upper), 0.0)


def _padded(x: Tensor, sizes: Sequence[int], value: Tensor) -> Tensor:
    is_inside = F.pad(torch.ones_like(x, dtype=torch.bool), list(sizes))
    return torch.where(is_inside, F.pad(x, list(sizes)), value)


def _plus_product(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def compute(x: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any) -> Any:
        return _scaled(x, beta) + multiply(a, b).to(x.dtype) * alpha

    return compute


@dataclass(frozen=True)
class NumberForm:
    """``compute`` takes all arguments of an operator in order, tensors of no dimension for its ``numbers``.

    ``is_wide``: the operator itself computes with numbers in single precision where its tensors have half.
    ``factors`` are multiplied in their own precision all the same.
    """

    numbers: frozenset[str]
    compute: Callable[..., Any]
    is_wide: bool = True
    factors: frozenset[str] = frozenset()


def _forms() -> Iterator[tuple[OpOverload, NumberForm]]:
    def form(
        compute: Callable[..., Any], *numbers: str, wide: bool = True, factors: Iterable[str] = ()
    ) -> NumberForm:
        return NumberForm(frozenset(numbers), compute, wide, frozenset(factors))

    both = ("other", "alpha")
    for op in (aten.add.Tensor, aten.add.Scalar):
        yield op, form(lambda x, other, alpha: x + _scaled(other, alpha), *both)
    for op in (aten.sub.Tensor, aten.sub.Scalar):
        yield op, form(lambda x, other, alpha: x - _scaled(other, alpha), *both)
    for op in (aten.rsub.Tensor, aten.rsub.Scalar):
        yield op, form(lambda x, other, alpha: other - _scaled(x, alpha), *both)
    for op in (aten.mul.Tensor, aten.mul.Scalar):
        yield op, form(operator.mul, "other")
    for op in (aten.div.Tensor, aten.div.Scalar):
        yield op, form(operator.truediv, "other")
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield getattr(aten, name).Scalar, form(getattr(operator, name), "other", wide=False)
    yield aten.pow.Tensor_Scalar, form(torch.pow, "exponent")
    yield aten.pow.Scalar, form(torch.pow, "self")
    yield aten.clamp.default, form(_clamped, "min", "max", wide=False)
    yield aten.clamp_min.default, form(lambda x, bound: _clamped(x, bound), "min", wide=False)
    yield aten.clamp_max.default, form(lambda x, bound: _clamped(x, None, bound), "max", wide=False)
    yield aten.masked_fill.Scalar, form(aten.masked_fill.Tensor, "value", wide=False)
    yield aten.where.ScalarSelf, form(_where, "self", wide=False)
    yield aten.where.ScalarOther, form(_where, "other", wide=False)
    yield aten.where.Scalar, form(_where, "self", "other", wide=False)
    yield aten.full.default, form(lambda size, value, *_: _filled(size, value), "fill_value", wide=False)
    yield aten.full_like.default, form(lambda x, v, *_: _filled(x.shape, v), "fill_value", wide=False)
    yield aten.new_full.default, form(lambda _, size, v, *__: _filled(size, v), "fill_value", wide=False)
    yield aten.fill.Scalar, form(lambda x, value: _filled(x.shape, value), "value", wide=False)
    yield aten.scalar_tensor.default, form(lambda value, *_: value.clone(), "s", wide=False)
    yield aten.leaky_relu.default, form(lambda x, slope: torch.where(x > 0, x, x * slope), "negative_slope")
    yield (
        aten.leaky_relu_backward.default,
        form(lambda grad, x, slope, _: torch.where(x > 0, grad, grad * slope), "negative_slope"),
    )
    yield aten.celu.default, form(lambda x, alpha: _elu(x, alpha, 1, 1 / alpha), "alpha")
    yield aten.elu.default, form(_elu, "alpha", "scale", "input_scale")
    yield aten.elu_backward.default, form(_elu_backward, "alpha", "scale", "input_scale")
    yield aten.softplus.default, form(_softplus, "beta", "threshold")
    yield aten.softplus_backward.default, form(_softplus_backward, "beta", "threshold")
    yield aten.huber_loss.default, form(_huber, "delta")
    yield aten.huber_loss_backward.default, form(_huber_backward, "delta")
    yield aten.smooth_l1_loss.default, form(_smooth_l1, "beta")
    yield aten.smooth_l1_loss_backward.default, form(_smooth_l1_backward, "beta")
    yield aten.lerp.Scalar, form(torch.lerp, "weight")
    yield aten.addcmul.default, form(lambda x, a, b, value: x + _scaled(a, value) * b, "value")
    yield aten.addcdiv.default, form(lambda x, a, b, value: x + _scaled(a / b, value), "value")
    yield aten.native_layer_norm.default, form(_layer_norm, "eps")
    yield aten.native_group_norm.default, form(_group_norm, "eps")
    yield aten._native_batch_norm_legit_functional.default, form(_batch_norm, "momentum", "eps")
    yield aten._native_batch_norm_legit_no_training.default, form(_fixed_batch_norm, "momentum", "eps")
    yield (
        aten._native_batch_norm_legit.no_stats,
        form(lambda x, weight, bias, _, __, eps: _batch_norm_of(x, weight, bias, eps)[:3], "momentum", "eps"),
    )
    yield aten.native_batch_norm_backward.default, form(_batch_norm_backward, "eps")
    yield aten.hardtanh.default, form(_clamped, "min_val", "max_val", wide=False)
    yield (
        aten.hardtanh_backward.default,
        form(_hardtanh_backward, "min_val", "max_val", wide=False),
    )
    yield (
        aten.threshold.default,
        form(lambda x, bound, value: torch.where(x <= bound, value, x), "threshold", "value", wide=False),
    )
    yield (
        aten.threshold_backward.default,
        form(lambda grad, x, bound: grad.masked_fill(x <= bound, 0.0), "threshold", wide=False),
    )
    yield aten.remainder.Scalar, form(torch.remainder, "other")
    yield aten.fmod.Scalar, form(torch.fmod, "other")
    for op in (aten.floor_divide.default, aten.floor_divide.Scalar):
        yield op, form(torch.floor_divide, "other")
    yield (
        aten.div.Tensor_mode,
        form(lambda x, other, mode: torch.div(x, other, rounding_mode=mode), "other"),
    )
    yield aten.constant_pad_nd.default, form(_padded, "value", wide=False)
    yield (
        aten.scatter.value,
        form(lambda x, dim, i, v: x.scatter(dim, i, v.expand(i.shape)), "value", wide=False),
    )
    yield aten.index_fill.int_Scalar, form(aten.index_fill.int_Tensor, "value", wide=False)
    yield aten.linspace.default, form(_linspace, "start", "end")
    yield aten.addmm.default, form(_plus_product(torch.mm), "alpha", factors=("mat1", "mat2"))
    yield aten.baddbmm.default, form(_plus_product(torch.bmm), "alpha", factors=("batch1", "batch2"))


NUMBER_FORMS = dict(_forms())
