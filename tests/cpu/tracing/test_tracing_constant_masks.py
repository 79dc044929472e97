"""Masks that are constants: dropped where the kernel has them built in, kept where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import assert_equals_torch

LENGTH = 6
Mask = Callable[[Tensor], Tensor]


def _positions() -> tuple[Tensor, Tensor]:
    places = torch.arange(LENGTH)
    return places[:, None], places[None, :]


def all_visible(x: Tensor) -> Tensor:
    """As BERT's models build it from no attention mask at all."""
    given = torch.ones(x.shape[0], LENGTH)[:, None, None, :]
    return ((1.0 - given) * torch.finfo(x.dtype).min).expand(-1, 1, LENGTH, -1).to(x.dtype)


def all_visible_boolean(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], 1, LENGTH, LENGTH, dtype=torch.bool)


def causal(x: Tensor) -> Tensor:
    """As GPT-2's models build it."""
    query, key = _positions()
    return torch.where(key <= query, 0.0, torch.finfo(x.dtype).min).to(x.dtype)[None, None]


def causal_infinite(x: Tensor) -> Tensor:
    query, key = _positions()
    return torch.where(key <= query, 0.0, -torch.inf).to(x.dtype)[None, None]


def causal_boolean(x: Tensor) -> Tensor:
    query, key = _positions()
    return (key <= query)[None, None]


def sliding_window(x: Tensor) -> Tensor:
    query, key = _positions()
    return ((key <= query) & (key > query - 3))[None, None]


def first_key_hidden(x: Tensor) -> Tensor:
    _, key = _positions()
    return (key > 0)[None, None].expand(1, 1, LENGTH, LENGTH)


def relative_bias(x: Tensor) -> Tensor:
    """Hides nothing, but weighs."""
    query, key = _positions()
    return (-0.1 * (query - key).abs()).to(x.dtype)[None, None]


def causal_and_weighed(x: Tensor) -> Tensor:
    return causal_infinite(x) + relative_bias(x)


def from_the_input(x: Tensor) -> Tensor:
    return (x[:, :1, :, :1] > -10.0).expand(-1, -1, -1, LENGTH)


# Whether the kernel hides the future by itself; ``None`` for a mask that stays.
MASKS: dict[Mask, bool | None] = {
    all_visible: False,
    all_visible_boolean: False,
    causal: True,
    causal_infinite: True,
    causal_boolean: True,
    sliding_window: None,
    first_key_hidden: None,
    relative_bias: None,
    causal_and_weighed: None,
    from_the_input: None,
}


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=self.mask(x))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_a_mask_is_dropped_from_forward_and_backward_if_the_kernel_has_it_built_in(mask: Mask) -> None:
    traced = assert_equals_torch(Attention(mask), square_loss, torch.randn(2, 2, LENGTH, 4), 1e-5)
    calls = [node for node in traced.module.graph.nodes if "_scaled_dot_product" in str(node.target)]
    assert len(calls) == 2
    for call in calls:
        described = call.target._schema.arguments
        positional = {argument.name for argument in described if not argument.kwarg_only}
        assert not positional & set(call.kwargs), "expected rules to find positional arguments by place"
        given = {argument.name: argument.default_value for argument in described}
        given |= {argument.name: value for argument, value in zip(described, call.args, strict=False)}
        given |= call.kwargs
        assert (given["attn_mask"] is None) == (MASKS[mask] is not None)
        assert given["is_causal"] is bool(MASKS[mask])
        assert given["dropout_p"] == 0.0
