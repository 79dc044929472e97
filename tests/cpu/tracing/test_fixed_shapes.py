"""Operators whose kernels read values on the host are traced into fixed shapes, with torch's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import assert_equals_torch, doubles, weighted_sum

READS_VALUES = (torch.ops.aten.index_put.default, torch.ops.aten._grouped_mm.default)


class Experts(nn.Module):
    """Every row goes to one of a few experts; expert 1 gets none, the last rows may go to none at all."""

    def __init__(self, num_experts: int, num_left_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(doubles(num_experts, 4, 8).float())
        self.num_left_out = num_left_out

    def forward(self, x: Tensor) -> Tensor:
        expert = (x[:, 0].abs() * 1000).long() % len(self.weight)
        expert = torch.where(expert == 1, 0, expert)
        if self.num_left_out:
            expert = torch.where(torch.arange(len(x)) < self.num_left_out, len(self.weight), expert)
        order = expert.argsort(stable=True)
        ends = (expert[:, None] <= torch.arange(len(self.weight))).sum(0)
        out = F.grouped_mm(x[order], self.weight, offs=ends.int())
        is_known = (torch.arange(len(x)) < ends[-1])[:, None]
        return weighted_sum(torch.where(is_known, out, 0).double())


@pytest.mark.parametrize("num_rows", [pytest.param(3, marks=pytest.mark.extensive), 40])
@pytest.mark.parametrize("num_experts", [1, 2, 7])
@pytest.mark.parametrize("num_left_out", [0, 2])
def test_rows_meet_the_matrix_of_their_expert(num_rows: int, num_experts: int, num_left_out: int) -> None:
    model, x = Experts(num_experts, num_left_out), doubles(num_rows, 4).float()
    traced = assert_equals_torch(model, lambda model, x: model(x), x, tolerance=1e-5)
    assert not {node.target for node in traced.module.graph.nodes} & {*READS_VALUES}


def zeroed(y: Tensor, mask: Tensor) -> None:
    y[mask] = 0.0


def replaced_by_a_row(y: Tensor, mask: Tensor) -> None:
    y[mask[:, 0]] = torch.arange(5.0, dtype=y.dtype)


def replaced_in_columns(y: Tensor, mask: Tensor) -> None:
    y[:, mask[0]] = -1.0


def added(y: Tensor, mask: Tensor) -> None:
    y.index_put_((mask,), y.new_tensor(2.0), accumulate=True)


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5).double()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.write(y, x[:, :1].expand(-1, 5) > torch.linspace(-1, 1, 5))
        return weighted_sum(y.tanh())


@pytest.mark.parametrize("write", [zeroed, replaced_by_a_row, replaced_in_columns, added])
def test_a_mask_chooses_what_is_written(write: Callable[[Tensor, Tensor], None]) -> None:
    model, x = Written(write), doubles(3, 4)
    traced = assert_equals_torch(model, lambda model, x: model(x), x)
    assert not {node.target for node in traced.module.graph.nodes} & {*READS_VALUES}
