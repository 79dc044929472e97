"""Literals of a graph as inputs: every operator gives what it gave with the literal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import arguments, doubles, joint, weighted_sum

from trainmux.ir import InputKind
from trainmux.tracing import structure_of, with_inputs

Function = Callable[[Tensor, float], Tensor]


def running_statistics(x: Tensor, momentum: float) -> Tensor:
    mean, variance = x.new_zeros(4), x.new_ones(4)
    out = F.batch_norm(x, mean, variance, training=True, momentum=momentum)
    return out * mean + variance


FUNCTIONS: dict[str, Function] = {
    "add": lambda x, s: x + s,
    "add with alpha": lambda x, s: torch.add(x, x.tanh(), alpha=s),
    "sub": lambda x, s: x - s,
    "sub with alpha": lambda x, s: torch.sub(x, x.tanh(), alpha=s),
    "rsub": lambda x, s: s - x,
    "rsub with alpha": lambda x, s: torch.rsub(x, x.tanh(), alpha=s),
    "mul": lambda x, s: x * s,
    "div": lambda x, s: x / s,
    "reciprocal": lambda x, s: s / (x.square() + 1),
    "power": lambda x, s: x.abs().pow(s),
    "base": lambda x, s: torch.pow(s, x),
    "comparisons": lambda x, s: x * (x < s) + 2 * x * (x >= s) + 3 * x * (x == s) + x * (x <= s) * (x > -s),
    "not equal": lambda x, s: x * (x != s),
    "clamp": lambda x, s: x.clamp(-s, s),
    "clamp below": lambda x, s: x.clamp(min=s),
    "clamp above": lambda x, s: x.clamp(max=s),
    "masked fill": lambda x, s: x.masked_fill(x > 0, s) * x,
    "where": lambda x, s: torch.where(x > 0, x, s) * torch.where(x > 1, s, x),
    "full": lambda x, s: x * torch.full((3, 4), s, dtype=x.dtype),
    "full like": lambda x, s: x * torch.full_like(x, s) + x * x.new_full((4,), s),
    "constant": lambda x, s: x * torch.tensor(s) + torch.tensor([s]),
    "leaky relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "softplus": F.softplus,
    "lerp": lambda x, s: torch.lerp(x, x.tanh(), s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x.tanh(), value=s),
    "addcdiv": lambda x, s: torch.addcdiv(x, x, x.square() + 1, value=s),
    "layer norm": lambda x, s: F.layer_norm(x, (4,), eps=s),
    "group norm": lambda x, s: F.group_norm(x, 2, x[0], x[1], eps=s),
    "batch norm": lambda x, s: F.batch_norm(x, None, None, x[0], x[1], training=True, eps=s),
    "batch norm, momentum": running_statistics,
    "batch norm, fixed": lambda x, s: F.batch_norm(x, x[0].detach(), x[1].detach().exp(), x[2], eps=s),
    "hardtanh": lambda x, s: F.hardtanh(x, -s, s),
    "threshold": lambda x, s: F.threshold(x, s, 2 * s),
    "remainder": lambda x, s: torch.remainder(x, s) + torch.fmod(x, s),
    "division, rounded": lambda x, s: x * torch.div(x, s, rounding_mode="floor"),
    "padding": lambda x, s: F.pad(x, (1, 2), value=s).square(),
    "scatter": lambda x, s: x * torch.zeros_like(x).scatter(1, torch.tensor([[2], [0], [1]]), s),
    "index fill": lambda x, s: x * x.index_fill(1, torch.tensor([0, 2]), s),
    "range": lambda x, s: x * torch.linspace(0.25, s, 4, dtype=x.dtype),
    "range from": lambda x, s: x * torch.linspace(s, 4, 4) + torch.linspace(s, 4, 1),
    "product": lambda x, s: torch.addmm(x, x, x.t() @ x, alpha=s, beta=0.5),
    "products": lambda x, s: torch.baddbmm(x[None], x[None], (x.t() @ x)[None], alpha=s),
    "huber": lambda x, s: F.huber_loss(x, x.tanh().detach(), delta=s),
    "huber sum": lambda x, s: F.huber_loss(x, x.tanh().detach(), reduction="sum", delta=s),
    "smooth l1": lambda x, s: F.smooth_l1_loss(x, x.tanh().detach(), beta=s),
    "smooth l1, each": lambda x, s: F.smooth_l1_loss(x, x.tanh().detach(), reduction="none", beta=s),
    "threshold of bits": lambda x, s: F.dropout(x, s / 2),
    "gradient penalty": lambda x, s: x.detach() * x * s,
}
FIRST, SECOND = 0.75, 0.625


def loss_of(function: Function, number: float) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, x: weighted_sum(function(model(x), number))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.extensive)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_input_gives_what_the_literal_gave(name: str, dtype: torch.dtype) -> None:
    """The graph of one number, with its numbers as inputs, computes the other's results."""
    function = FUNCTIONS[name]
    model, x = nn.Linear(5, 4).to(dtype), doubles(3, 5).to(dtype)
    one, other = (joint(model, loss_of(function, number), x) for number in (FIRST, SECOND))
    structure, wanted = structure_of(one), structure_of(other)
    assert structure.key == wanted.key
    differing = [i for i, (a, b) in enumerate(zip(structure.numbers, wanted.numbers, strict=True)) if a != b]
    assert differing
    numbers = [0.0 if i in differing else number for i, number in enumerate(structure.numbers)]
    free = with_inputs(one, numbers, {position: column for column, position in enumerate(differing)})
    values = {f"number {column}": wanted.numbers[position] for column, position in enumerate(differing)}

    def given() -> list[Tensor]:
        known = arguments(other, model, x)
        new = [item for item in free.inputs if item.kind is InputKind.NUMBER]
        return [*known, *(torch.tensor(values[item.name], dtype=torch.float64) for item in new)]

    ours, theirs = free.module(*given()), other.module(*arguments(other, model, x))
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.6e-2}[dtype]
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_literals_are_set_where_no_input_takes_them() -> None:
    """A graph is kept once for all members: its literals may be another member's."""
    model, x = nn.Linear(5, 4).double(), doubles(3, 5)
    function: Function = lambda x, s: (x * s).clamp(-s, s) + torch.tensor(s)  # noqa: E731
    one, other = (joint(model, loss_of(function, number), x) for number in (FIRST, SECOND))
    changed = with_inputs(one, structure_of(other).numbers, {})
    assert structure_of(changed).numbers == structure_of(other).numbers
    for found, expected in zip(
        changed.module(*arguments(changed, model, x)), other.module(*arguments(other, model, x)), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x.sum(0), lambda x: x.sum(1).sum()),
        (lambda x: x[:2], lambda x: x[:1]),
        (lambda x: x.relu(), lambda x: x.tanh()),
        (lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda x: x * torch.tensor([1.0, 2.0, 3.0, 5.0])),
    ],
)
def test_sizes_operators_and_tables_are_structure(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> None:
    model, x = nn.Linear(5, 4).double(), doubles(3, 5)
    keys = {
        structure_of(joint(model, loss_of(lambda out, _, fn=fn: fn(out), 0.0), x)).key  # type: ignore[misc]
        for fn in (first, second)
    }
    assert len(keys) == 2
