"""Fused attention, forward and backward: members are independent sequences, so fold them into the batch.

torch.vmap has no rule for the backward kernels and falls back to a loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, rule

aten = torch.ops.aten

_FORWARD = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
# Tensor arguments that do not hold one value per batch element.
_NOT_BATCHED = frozenset({"philox_seed", "philox_offset", "rng_state", "unused", "cum_seq_q", "cum_seq_k"})
_MASKS = frozenset({"attn_bias", "attn_mask"})
_ALIGNED_KEYS = 16
"""Kernels read a bias in vectors: its rows must begin at multiples of 16 bytes. Torch pads to 16 numbers."""


def _folded(context: Context, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = {spec.name: value for spec, value in zip(op._schema.arguments, args, strict=False)}
    named.update(kwargs)
    query = named["query"]
    batch = query.shape[0]  # a member's, stacked or not

    def fold(name: str, value: Any) -> Any:
        if not isinstance(value, (Stacked, Tensor)):
            return value
        if name in _NOT_BATCHED:
            return value.tensor[0] if isinstance(value, Stacked) else value
        if name in _MASKS:
            mask = context.stack(value)
            heads, queries, keys = mask.shape[-3:] if mask.dim() == 5 else (1, *mask.shape[-2:])
            mask = mask.reshape(context.width, -1, heads, queries, keys).expand(-1, batch, -1, -1, -1)
            return _aligned(mask.flatten(0, 1)) if name == "attn_bias" else mask.flatten(0, 1)
        return context.stack(value).flatten(0, 1)

    folded = {name: fold(name, value) for name, value in named.items()}
    by_place = [spec for spec in op._schema.arguments if not spec.kwarg_only]
    while by_place[-1].name not in folded:
        by_place.pop()
    # What was left out before the last one given is written out: the rest would move into its place.
    positional = [folded.get(spec.name, spec.default_value) for spec in by_place]
    keyword = {
        spec.name: folded[spec.name]
        for spec in op._schema.arguments
        if spec.kwarg_only and spec.name in folded
    }
    return op(*positional, **keyword)


def _aligned(bias: Tensor) -> Tensor:
    """Give a bias the strides that CUDA kernels accept."""
    keys = bias.shape[-1]
    if not bias.is_contiguous():
        bias = bias.clone(memory_format=torch.contiguous_format)
    if keys % _ALIGNED_KEYS == 0:
        return bias
    padded = aten.constant_pad_nd.default(bias, [0, -keys % _ALIGNED_KEYS])
    sliced: Tensor = aten.slice.Tensor(padded, -1, 0, keys)
    return sliced


def _unfold(context: Context, result: Any, member: Any, batch: int) -> Any:
    if not isinstance(result, Tensor):
        return result
    if member.dim() < 3:
        return result  # counters and sequence bounds: one for all
    return Stacked(result.unflatten(0, (context.width, batch)))


@rule(*_FORWARD, *_BACKWARD, how="fold model axis into batch")
def attention(context: Context, op: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    results = _folded(context, op, args, kwargs)
    batch = context.value[0].shape[0]
    return tuple(_unfold(context, r, m, batch) for r, m in zip(results, context.value, strict=True))
