"""Operators whose kernels read values on the host, which no graph can, computed in fixed shapes instead.

A mask that says where to write chooses between old and new values. A mixture of experts multiplies groups of
rows by a matrix each, and only the device knows how many rows an expert gets: its rows fill blocks of a fixed
number of rows, zeros the last of them, and one batched product multiplies every block by its expert's matrix.
There are at most about twice as many rows in the blocks as outside. torch's kernel for bf16 on CUDA reads the
numbers on the device, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def fixed_shape_decompositions() -> dict[Any, Callable[..., Any]]:
    """Rules of such operators."""
    return {
        torch.ops.aten.index_put.default: _written_by_mask,
        torch.ops.aten._grouped_mm.default: _grouped_product,
    }


def _written_by_mask(
    values: Tensor, indices: Sequence[Tensor | None], new: Tensor, accumulate: bool = False
) -> Any:
    """``values[mask] = new`` for what is written to every place alike."""
    *before, mask = indices
    if mask is None or mask.dtype is not torch.bool or any(each is not None for each in before):
        return NotImplemented
    rest = values.dim() - len(before) - mask.dim()
    while new.dim() > rest and new.shape[0] == 1:
        new = new[0]
    if new.dim() > rest:
        return NotImplemented
    is_written = mask.view(*mask.shape, *[1] * rest)
    return torch.where(is_written, values + new if accumulate else new, values)


def _multiply_groups(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``rows[ends[e - 1] : ends[e]] @ weight[e]`` for each e; zeros for rows after the last end."""
    blocks = _Blocks(rows, ends)
    products = torch.bmm(blocks.fill(rows), weight[blocks.expert])
    numbers = torch.arange(len(rows), device=rows.device)
    expert = (numbers[:, None] >= ends).sum(1)
    known = expert.clamp(max=len(weight) - 1)
    place = blocks.begin[known] * blocks.height + numbers - blocks.row_begin[known]
    place = place.clamp(max=products.shape[0] * blocks.height - 1)
    return torch.where((expert < len(weight))[:, None], products.flatten(0, 1)[place], 0)


def _sum_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``left[ends[e - 1] : ends[e]].T @ right[ends[e - 1] : ends[e]]`` for each e."""
    blocks = _Blocks(left, ends)
    products = torch.bmm(blocks.fill(left).mT, blocks.fill(right))
    is_of = blocks.expert == torch.arange(len(ends), device=ends.device)[:, None]
    sums: Tensor = is_of.to(left.dtype) @ products.flatten(1)
    return sums.view(-1, *products.shape[1:])


class _Blocks:
    """Blocks of ``height`` rows: b holds rows of ``expert[b]``; those of expert e begin at ``begin[e]``."""

    def __init__(self, rows: Tensor, ends: Tensor) -> None:
        ends = ends.long()
        num_rows, num_experts = len(rows), len(ends)
        self.height = max(1, -(-num_rows // num_experts))
        self.row_begin = torch.cat([ends.new_zeros(1), ends[:-1]])
        filled = (ends - self.row_begin + (self.height - 1)) // self.height
        until = filled.cumsum(0)
        self.begin = until - filled
        numbers = torch.arange(num_rows // self.height + num_experts, device=ends.device)
        self.expert = (numbers[:, None] >= until).sum(1).clamp(max=num_experts - 1)
        first = self.row_begin[self.expert] + (numbers - self.begin[self.expert]) * self.height
        source = first[:, None] + torch.arange(self.height, device=ends.device)
        self._is_filled = source < ends[self.expert][:, None]
        self._source = source.clamp(max=num_rows - 1)

    def fill(self, rows: Tensor) -> Tensor:
        return torch.where(self._is_filled[:, :, None], rows[self._source], 0)


def _grouped_product(
    left: Tensor, right: Tensor, ends: Tensor | None = None, bias: Tensor | None = None, dtype: Any = None
) -> Any:
    device = left.device
    has_kernel = left.dtype is torch.bfloat16 and device.type == "cuda"
    has_kernel = has_kernel and torch.cuda.get_device_capability(device) >= (8, 0)
    if has_kernel or ends is None or bias is not None or left.dim() == 3:
        return NotImplemented
    found = _sum_groups(left.mT, right, ends) if right.dim() == 2 else _multiply_groups(left, right, ends)
    return found if dtype is None else found.to(dtype)
