"""Composite operators taken apart our own way while tracing, the same on every device.

torch picks a vendor library or a fused kernel for these by device and dtype, some of which hide
state (random numbers inside attention), have no rule for a model axis (embedding bags), or change
buffers without saying so (library batch norm). Written with plain operators the graph is the same
everywhere and can be fused.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _BatchNorm

from trainmux.tracing._torch_private import (
    expect_recurrence,
    layer_parameters,
    native_composite,
    override_composites,
    recurrent_layers,
    replaced,
)

aten = torch.ops.aten


def _batch_norm(*args: Any) -> Any:
    input, weight, bias, running_mean, running_var, training, momentum, eps, _ = args
    if input.numel() == 0:  # the kernels refuse nothing, or divide by it
        return native_composite(aten.batch_norm.default, *args)
    if training and running_mean is None and running_var is None:
        return aten._native_batch_norm_legit.no_stats(input, weight, bias, True, momentum, eps)[0]
    return aten.native_batch_norm(*args[:-1])[0]


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Layer norm with affine parameters wider than its input, as autocast has it on a CPU: in their dtype.

    Torch's kernel does so too, and rounds its result alone. Fused, the affine part is an operator of its
    own, and a kernel without it rounds the normalised numbers, and mean and scale for the backward pass.
    """
    given = [each.dtype for each in (weight, bias) if each is not None]
    wide = functools.reduce(torch.promote_types, given, input.dtype)
    out: Tensor = aten.native_layer_norm(input.to(wide), normalized_shape, weight, bias, eps)[0]
    return out.to(input.dtype)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout by an explicit mask (D11); without dropout torch's own kernels."""
    if attn_mask is not None and attn_mask.shape[-1] > 1 and attn_mask.stride(-1) != 1:
        attn_mask = attn_mask.contiguous()  # the fused kernels refuse a mask that is repeated along a row
    if dropout_p == 0.0:
        op = aten.scaled_dot_product_attention.default
        given = (query, key, value, attn_mask, 0.0, is_causal)
        return native_composite(op, *given, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
    # A row that sees nothing must give zeros, not NaN.
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
    return torch.matmul(torch.dropout(weights, dropout_p, True).to(value.dtype), value)


def _bag_of_rows(
    rows: Tensor, bag: Tensor, num_bags: int, counted: Tensor, mode: int
) -> tuple[Tensor, Tensor]:
    """Reduce ``rows`` [n, d] into bags; ``counted`` [n] says which rows take part."""
    sizes = torch.zeros(num_bags, dtype=torch.int64, device=rows.device)
    sizes = sizes.index_add(0, bag, counted.to(torch.int64))
    if mode == 2:
        masked = rows.masked_fill(~counted.unsqueeze(-1), float("-inf"))
        index = bag.unsqueeze(-1).expand_as(rows)
        with torch.no_grad():  # of equal rows the first has the gradient, as in torch's kernels
            most = masked.new_full((num_bags, rows.shape[1]), float("-inf"))
            most = most.scatter_reduce(0, index, masked, "amax").gather(0, index)
            last = torch.full_like(most, rows.shape[0], dtype=torch.int64)
            place = torch.arange(rows.shape[0], device=rows.device).unsqueeze(-1).where(masked == most, last)
            none = place.new_full((num_bags, rows.shape[1]), rows.shape[0])
            first = none.scatter_reduce(0, index, place, "amin")
        out = torch.cat([masked, rows.new_zeros(1, rows.shape[1])]).gather(0, first)
        return out.masked_fill((sizes == 0).unsqueeze(-1), 0.0), sizes
    total = rows.new_zeros((num_bags, rows.shape[1]))
    out = total.index_add(0, bag, rows * counted.unsqueeze(-1).to(rows.dtype))
    if mode == 1:
        out = out / sizes.clamp(min=1).unsqueeze(-1).to(rows.dtype)
    return out, sizes


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``nn.EmbeddingBag`` over a flat list of indices cut at ``offsets``."""
    if include_last_offset:
        offsets = offsets[:-1]
    rows = F.embedding(indices, weight, scale_grad_by_freq=scale_grad_by_freq)
    position = torch.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    bag = torch.searchsorted(offsets.contiguous(), position, right=True) - 1
    if padding_idx is None:
        counted = torch.ones_like(indices, dtype=torch.bool)
    else:
        counted = indices != (padding_idx % weight.shape[0])
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    out, sizes = _bag_of_rows(rows, bag, offsets.shape[0], counted, mode)
    unused = torch.empty(0, dtype=indices.dtype, device=indices.device)
    return out, bag, sizes, unused


def _rectangular_embedding_bag(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.embedding_bag`` that keeps the two dimensions of a rectangular index tensor.

    Every bag has the same length there, so a plain reduction serves instead of a scatter.
    """

    signature = inspect.signature(original)

    def embedding_bag(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        input, weight, mode = given["input"], given["weight"], given["mode"]
        per_sample_weights, padding_idx = given["per_sample_weights"], given["padding_idx"]
        is_plain = given["offsets"] is None and given["max_norm"] is None and mode in ("sum", "mean", "max")
        if input.dim() != 2 or not is_plain:
            return original(*args, **kwargs)
        rows = F.embedding(input, weight, scale_grad_by_freq=given["scale_grad_by_freq"])
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        if padding_idx is None:
            if mode == "max":
                return rows.max(1).values
            return rows.sum(1) if mode == "sum" else rows.mean(1)
        counted: Tensor = (input != (padding_idx % weight.shape[0])).unsqueeze(-1)
        sizes = counted.sum(1)
        if mode == "max":
            out = rows.masked_fill(~counted, float("-inf")).max(1).values
            return out.masked_fill(sizes == 0, 0.0)
        out = (rows * counted.to(rows.dtype)).sum(1)
        return out / sizes.clamp(min=1).to(rows.dtype) if mode == "mean" else out

    return embedding_bag


def _dense_embedding(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.embedding`` without sparse gradients: the supported optimizers give the same numbers dense."""

    def embedding(*args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.arguments["sparse"] = False
        return original(*bound.args, **bound.kwargs)

    return embedding


def _cumulative_batch_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``BatchNorm.forward`` that keeps the factor of a cumulative average (momentum None) a tensor."""

    def forward(self: Any, input: Tensor) -> Tensor:
        cumulative = self.training and self.track_running_stats and self.momentum is None
        if not cumulative or self.num_batches_tracked is None:
            return original(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        with torch.no_grad():
            dims = [dim for dim in range(input.dim()) if dim != 1]
            variance, mean = torch.var_mean(input.to(self.running_mean.dtype), dims, correction=1)
            share = 1.0 / self.num_batches_tracked.to(mean.dtype)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance, share)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    return forward


def _leave_parameters(layer: nn.Module) -> None:
    """Not pack a recurrent layer's weights for a vendor library, which looks at their addresses."""


def _lstm_cell(
    inputs: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    chunk_dim: int,
) -> tuple[Tensor, Tensor]:
    """A step of an LSTM whose gates are computed in single precision at least, as vendor libraries do.

    Torch's decomposition rounds after every operation, which in bf16 costs several times the error.
    """
    dtype = inputs.dtype
    wide = torch.promote_types(dtype, torch.float32)
    gates = F.linear(hidden, weight, bias).to(wide) + inputs.to(wide)
    enter, keep, fresh, leave = gates.chunk(4, chunk_dim)
    new_cell = keep.sigmoid() * cell.to(wide) + enter.sigmoid() * fresh.tanh()
    new_hidden = (leave.sigmoid() * new_cell.tanh()).to(dtype)
    if projection is not None:
        new_hidden = F.linear(new_hidden, projection)
    return new_hidden, new_cell.to(dtype)


def _stack_recurrent_layers(
    input: Tensor,
    hidden: Any,
    parameters: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    run_layer: Callable[..., tuple[Tensor, Any]],
) -> tuple[Tensor, list[Any]]:
    """Layer after layer, with dropout between them; torch's own decomposition leaves the dropout out."""
    values = input.transpose(0, 1) if batch_first else input
    expect_recurrence(values.shape[0], num_layers * (2 if bidirectional else 1))
    final_states = []
    for layer in range(num_layers):
        forwards, state, backwards, backward_state = layer_parameters(
            parameters, hidden, layer, bidirectional
        )
        outputs, final = run_layer(values, state, forwards, has_biases)
        final_states.append(_shaped_like(final, state))
        if bidirectional:
            reverse, final = run_layer(values, backward_state, backwards, has_biases, reverse=True)
            final_states.append(_shaped_like(final, backward_state))
            outputs = torch.cat([outputs, reverse], -1)
        is_last = layer == num_layers - 1
        values = torch.dropout(outputs, dropout, True) if train and dropout and not is_last else outputs
    return (values.transpose(0, 1) if batch_first else values), final_states


def _shaped_like(final: Any, state: Any) -> Any:
    """A layer's last state in the shape of its first one: torch 2.11 leaves an axis in an LSTM's."""
    return pytree.tree_map(lambda last, first: last.reshape(first.shape), final, state)


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Hinge of every class against the right one.

    Torch's decomposition (2.11 to 2.13, no issue known) has a gradient where the hinge is exactly zero, and
    gives a vector for one sample without reduction; its kernels have no gradient there, and give a scalar.
    """
    rows, labels = torch.atleast_2d(input), target.reshape(-1, 1)
    hinge = torch.relu(margin - rows.gather(1, labels) + rows) ** p
    if weight is not None:
        hinge = hinge * weight.reshape(-1)[labels]
    is_other = torch.arange(rows.shape[1], device=input.device) != labels
    return _reduced(torch.where(is_other, hinge, 0.0).mean(1), reduction, target.shape)


def _multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Hinge of every class that is no label against each label; labels end before the first -1.

    Torch's decomposition (2.11 to 2.13, pytorch/pytorch#141017) counts class 0 as a label for each place
    from the -1 on. It also differs from the kernels as that of ``multi_margin_loss`` does.
    """
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    classes = torch.arange(rows.shape[1], device=input.device)
    is_label = (labels < 0).cumsum(1) == 0
    is_target = ((labels.unsqueeze(2) == classes) & is_label.unsqueeze(2)).any(1)
    hinge = torch.relu(1 - rows.gather(1, labels.where(is_label, 0)).unsqueeze(2) + rows.unsqueeze(1))
    counted = torch.where(is_label.unsqueeze(2) & ~is_target.unsqueeze(1), hinge, 0.0)
    loss = _reduced(counted.sum((1, 2)) / rows.shape[1], reduction, input.shape[:-1])
    return loss, is_target.to(input.dtype).reshape(target.shape)


def _reduced(losses: Tensor, reduction: int, shape: torch.Size) -> Tensor:
    """Torch's reductions by number: none (``shape`` is that of the samples), mean, sum."""
    return (losses.reshape(shape), losses.mean(), losses.sum())[reduction]


# Torch's decompositions of these (2.11 to 2.13) take other pixels than its kernels where a size stays the
# same in spite of a scale (pytorch/pytorch#175154, #198201), and round some places otherwise (no
# issue known).
RESIZES: tuple[OpOverload, ...] = tuple(
    overload
    for name in (
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
        *(f"{kind}{dims}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
    )
    for packet in (getattr(aten, name), getattr(aten, f"{name}_backward"))
    for overload in (packet.default, getattr(packet, "vec", None))
    if overload is not None
)
_TABLE: dict[OpOverload, Callable[..., Any] | None] = {
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _layer_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.embedding_bag.padding_idx: _embedding_bag,
    aten.embedding_bag.default: _embedding_bag,
    aten.multi_margin_loss.default: _multi_margin_loss,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    **dict.fromkeys(RESIZES),
}


@contextmanager
def own_composites() -> Iterator[None]:
    """While active, the operators above are taken apart as written here, or not at all."""
    with (
        override_composites(_TABLE),
        recurrent_layers(_lstm_cell, _stack_recurrent_layers),
        replaced(_BatchNorm, forward=_cumulative_batch_norm(_BatchNorm.forward)),
        replaced(nn.RNNBase, flatten_parameters=_leave_parameters),
        replaced(
            F,
            embedding=_dense_embedding(F.embedding),
            embedding_bag=_rectangular_embedding_bag(F.embedding_bag),
        ),
    ):
        yield
