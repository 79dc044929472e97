"""fp32 and bf16: a step in a fleet is as close to fp64 as the same step in plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from equivalence import PLAIN, PRECISIONS, check_precision
from torch import Tensor, nn

from trainmux.workloads import SMALL, Workload

every_precision = pytest.mark.parametrize("precision", PRECISIONS)


@every_precision
@pytest.mark.parametrize("name", PLAIN)
def test_the_error_of_a_step_is_at_most_three_times_that_of_plain_torch(name: str, precision: str) -> None:
    check_precision(SMALL[name], precision)


class Recurrent(nn.Module):
    """A recurrent layer straight over the batch: its input needs no gradient.

    torch then has kernels of its own for single precision on a CPU.
    """

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = cell(4, 6, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


def _build(cell: type[nn.RNNBase], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recurrent(cell)


def _series(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1.0).square().mean()


@every_precision
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_straight_over_the_batch(cell: type[nn.RNNBase], precision: str) -> None:
    check_precision(Workload(cell.__name__, partial(_build, cell), _mean_square, _series), precision)
