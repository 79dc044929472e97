"""Recurrent layers unrolled into cell steps; further options are compared in ``operators``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tracing_tools import assert_equals_torch, forward, joint, targets

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def states_of(state: Any) -> list[Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


def loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    out, state = model(batch["x"], batch["state"])
    parts = [out, *states_of(state)]
    total = sum(
        (part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype).view(part.shape)).sum()
        for part in parts
    )
    return total, {"out": out}


def batch_for(dtype: torch.dtype, state: Any = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(2, 2, 3, generator=generator, dtype=dtype), "state": state}


def build(cell: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return CELLS[cell](3, 4, **{"batch_first": True, **options}).to(dtype)


@pytest.mark.parametrize(
    ("cell", "options"), [("lstm", {"bidirectional": True}), ("gru", {"batch_first": False}), ("rnn", {})]
)
def test_recurrent_modules_with_a_given_state_are_torchs(cell: str, options: dict[str, Any]) -> None:
    state = torch.ones(2 if options.get("bidirectional") else 1, 2, 4, dtype=torch.float64)
    given = (state, 2 * state) if cell == "lstm" else state
    assert_equals_torch(build(cell, **options), loss, batch_for(torch.float64, given))


@pytest.mark.parametrize("cell", CELLS)
def test_no_vendor_kernel_is_in_the_graph(cell: str) -> None:
    """Also where the input needs no gradient, in single precision and in evaluation."""
    model, batch = build(cell, torch.float32), batch_for(torch.float32)
    for traced in (joint(model, loss, batch), forward(model, loss, batch)):
        vendor = [
            str(target) for target in targets(traced) if "_rnn" in str(target) or "mkldnn" in str(target)
        ]
        assert vendor == []


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_torchs(cell: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = cell(3, 4).double()

    def unrolled(m: nn.Module, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m(step, state)
        return sum(part.square().sum() for part in states_of(state))

    assert_equals_torch(model, unrolled, batch_for(torch.float64)["x"])
