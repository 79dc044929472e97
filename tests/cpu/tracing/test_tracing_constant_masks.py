"""Masks that are constants: dropped where the kernel has them built in, kept where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import assert_equals_torch, square_loss

LENGTH = 6


def mask_of(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A mask made in the forward pass from the positions of queries and keys, in the dtype of the input."""

    def make(x: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        mask = rule(places[:, None], places[None, :])[None, None]
        return mask.to(x.dtype) if mask.is_floating_point() else mask

    return make


def as_bert_makes_it(x: Tensor) -> Tensor:
    """From no attention mask at all."""
    given = torch.ones(x.shape[0], LENGTH)[:, None, None, :]
    return ((1.0 - given) * torch.finfo(x.dtype).min).expand(-1, 1, LENGTH, -1).to(x.dtype)


LOWEST = torch.finfo(torch.float32).min
# With whether the kernel hides the future by itself; ``None`` for a mask that stays.
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], bool | None]] = {
    "all visible": (as_bert_makes_it, False),
    "all visible, boolean": (mask_of(lambda query, key: query + key >= 0), False),
    "causal": (mask_of(lambda query, key: torch.where(key <= query, 0.0, LOWEST)), True),
    "causal, infinite": (mask_of(lambda query, key: torch.where(key <= query, 0.0, -torch.inf)), True),
    "causal, boolean": (mask_of(lambda query, key: key <= query), True),
    "sliding window": (mask_of(lambda query, key: (key <= query) & (key > query - 3)), None),
    "first key hidden": (mask_of(lambda query, key: (key > 0).expand(LENGTH, LENGTH)), None),
    "weighed": (mask_of(lambda query, key: -0.1 * (query - key).abs()), None),
    "causal and weighed": (
        mask_of(lambda query, key: torch.where(key <= query, 0.1 * (key - query), -torch.inf)),
        None,
    ),
    "from the input": (lambda x: (x[:, :1, :, :1] > -10.0).expand(-1, -1, -1, LENGTH), None),
}


class Attention(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=self.mask(x))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_dropped_from_forward_and_backward_if_the_kernel_has_it_built_in(name: str) -> None:
    mask, is_causal = MASKS[name]
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
        assert (given["attn_mask"] is None) == (is_causal is not None)
        assert given["is_causal"] is bool(is_causal)
        assert given["dropout_p"] == 0.0


def test_python_may_read_what_is_the_same_in_every_step() -> None:
    """Libraries ask whether a mask of ones that they made themselves hides anything."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[:2], device=x.device)
            mask[:, 0] = 2
            if (mask > 1).any(dim=0).flatten().any().item() and not (mask == 0).any():
                x = x * int(mask.sum())
            return self.layer(x)

    assert_equals_torch(Asks(), square_loss, torch.ones(2, 5, 3, dtype=torch.float64))


def test_transformers_leaves_out_the_masks_that_it_leaves_out_in_plain_torch() -> None:
    """It may look at masks that are the same in every step, but not at the batch."""
    masks = pytest.importorskip("transformers.masking_utils")

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            whole = torch.ones(x.shape[:2], device=x.device)
            if not masks.is_tracing(None) and not masks.is_tracing(whole) and whole.all():
                x = x * 2
            if masks.is_tracing(x) or (x > 0).all():
                x = x * 3
            return self.layer(x)

    assert_equals_torch(Asks(), square_loss, torch.ones(2, 5, 3, dtype=torch.float64))
