"""In-place building blocks that several update rules share.

Parameters of half precision come with float32 scalars, since a coefficient like 0.999 is 1.0 in bfloat16.
Torch's own optimizers do the same: a Python number meets half precision tensors in float32 arithmetic, and
only the result of each operation is rounded. The functions here keep to that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainmux.optim._base import ScalarAt


def descent_direction(param: Tensor, grad: Tensor, at: ScalarAt, idle: frozenset[str]) -> Tensor:
    """``sign * grad + weight_decay * param``; this is ``grad`` itself when both settings are idle."""
    direction = grad
    if "maximize" not in idle:
        direction = torch.mul(grad, at("sign")).to(grad.dtype)
    if "weight_decay" not in idle:
        direction = plus_product(direction, param, at("weight_decay"), grad=grad)
    return direction


def plus_product(base: Tensor, tensor: Tensor, factor: Tensor, *, grad: Tensor) -> Tensor:
    """``base + tensor * factor``, in the memory of ``base`` unless that is the caller's gradient."""
    if base is grad:
        return torch.addcmul(base, tensor, factor).to(base.dtype)
    return base.addcmul_(tensor, factor)


def times(base: Tensor, factor: Tensor, *, grad: Tensor) -> Tensor:
    """``base * factor``, in the memory of ``base`` unless that is the caller's gradient."""
    if base is grad:
        return torch.mul(base, factor).to(base.dtype)
    return base.mul_(factor)


def blend_(state: Tensor, target: Tensor, weight: Tensor) -> None:
    """Moves ``state`` towards ``target``: weight 0 keeps it, weight 1 replaces it."""
    if state.dtype == weight.dtype:
        state.lerp_(target, weight)
    else:
        # lerp wants one dtype throughout.
        wide = weight.dtype
        state.copy_(torch.lerp(state.to(wide), target.to(wide), weight))


def accumulate_square_(state: Tensor, tensor: Tensor, keep: Tensor, gain: Tensor) -> None:
    """``state = keep * state + gain * tensor ** 2``.

    Not written as a lerp with weight ``gain``: 1 - 0.999 and 0.001 differ in float32 by 1e-5 of their
    value, and a running average turns that into a drift away from torch.
    """
    state.mul_(keep).addcmul_(tensor, torch.mul(tensor, gain))


def quotient(zero: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """``zero + numerator / denominator`` in the memory of ``denominator`` where the dtypes allow it.

    Fresh memory costs a CPU more than the division does.
    """
    if denominator.dtype == zero.dtype:
        return torch.addcdiv(zero, numerator, denominator, out=denominator)
    return torch.addcdiv(zero, numerator, denominator)
