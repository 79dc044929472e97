"""Masks that are constants: dropped where the kernel has them built in, kept where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from trainmux.tracing import TraceSettings, flatten_batch, make_fx, trace_joint
from trainmux.tracing._passes import drop_constant_masks

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


DROPPED: dict[Mask, bool] = {
    all_visible: False,
    all_visible_boolean: False,
    causal: True,
    causal_infinite: True,
    causal_boolean: True,
}
KEPT: tuple[Mask, ...] = (sliding_window, first_key_hidden, relative_bias, causal_and_weighed, from_the_input)


def attention_graph(mask: Mask) -> fx.GraphModule:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=mask(x))

    with torch.no_grad():
        module: fx.GraphModule = make_fx(attend)(torch.zeros(2, 2, LENGTH, 4))
    return module


def the_call(module: fx.GraphModule) -> fx.Node:
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    (found,) = module.graph.find_nodes(op="call_function", target=target)
    return found


def bound(call: fx.Node) -> dict[str, object]:
    """A call's arguments by name, defaults included."""
    described = call.target._schema.arguments  # type: ignore[union-attr]
    found: dict[str, object] = {argument.name: argument.default_value for argument in described}
    found |= {argument.name: value for argument, value in zip(described, call.args, strict=False)}
    return found | dict(call.kwargs)


@pytest.mark.parametrize("mask", DROPPED, ids=lambda mask: mask.__name__)
def test_masks_that_the_kernel_has_built_in_are_dropped(mask: Mask) -> None:
    module = attention_graph(mask)
    x = torch.randn(2, 2, LENGTH, 4)
    expected = module(x)
    assert drop_constant_masks(module) == 1
    call = the_call(module)
    positional = {a.name for a in call.target._schema.arguments if not a.kwarg_only}  # type: ignore[union-attr]
    assert not positional & set(call.kwargs), "expected rules to find positional arguments by place"
    given = bound(call)
    assert given["attn_mask"] is None
    assert given["is_causal"] is DROPPED[mask]
    assert given["dropout_p"] == 0.0
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", KEPT, ids=lambda mask: mask.__name__)
def test_masks_that_say_something_else_are_kept(mask: Mask) -> None:
    module = attention_graph(mask)
    assert drop_constant_masks(module) == 0
    assert isinstance(bound(the_call(module))["attn_mask"], fx.Node)


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask(x))


@pytest.mark.parametrize(
    ("mask", "is_masked"), [(causal, False), (all_visible, False), (sliding_window, True)]
)
def test_forward_and_backward_agree_in_a_joint_graph(mask: Mask, is_masked: bool) -> None:
    model = Attention(mask)
    batch = torch.randn(2, 2, LENGTH, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    settings = TraceSettings(torch.device("cpu"), None, None)
    graph = trace_joint(model, loss, flatten_batch(batch), settings).module.graph
    calls = [node for node in graph.nodes if "_scaled_dot_product" in str(node.target)]
    assert len(calls) == 2
    for call in calls:
        given = bound(call)
        assert (given["attn_mask"] is not None) == is_masked
        assert given["is_causal"] is (mask is causal)
