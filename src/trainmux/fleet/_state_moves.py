"""Copies of state between device and host: many tensors at once, at the link's full rate.

Rows of a stacked tensor lie a few bytes apart where their length is odd. Such a tensor is still one row of
bytes with its gaps, and moves as one. Rows of members that train on parallel branches lie far apart and
move one by one: torch would put them together first, in memory that no budget has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainmux.engine import Transfers
from trainmux.runtime import ALIGNMENT_BYTES


def host_copies(tensors: Sequence[Tensor], transfers: Transfers) -> list[Tensor]:
    """New tensors on the host with the same values and, where they are dense, the same strides."""
    copies: list[Tensor] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor in tensors:
        source = _as_row(tensor)
        if tensor.device.type == "cpu" or (source is None and not _is_apart(tensor)):
            copies.append(tensor.to("cpu", copy=True))
            continue
        if source is None:
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            pairs += zip(copies[-1], tensor, strict=True)
            continue
        row = torch.empty(source.shape, dtype=source.dtype)
        pairs.append((row, source))
        copies.append(row.as_strided(tensor.shape, tensor.stride()))
    transfers.copy(pairs)
    return copies


def copy_into_places(pairs: Sequence[tuple[Tensor, Tensor]], transfers: Transfers) -> None:
    """Copy each (place, value); a place has its bytes to itself, those between its rows included."""
    rows = []
    for place, value in [row for pair in pairs for row in _by_rows(*pair)]:
        as_rows = (_as_row(place), _as_row(value)) if place.stride() == value.stride() else (None, None)
        if as_rows[0] is not None and as_rows[1] is not None and place.dtype == value.dtype:
            rows.append((as_rows[0], as_rows[1]))
        else:
            rows.append((place, value))
    transfers.copy(rows)


def _by_rows(place: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A copy as those of its rows, where the place's lie apart; a value may be one for all of them."""
    if place.dim() > value.dim():
        return [(row, value) for row in place]
    if not _is_apart(place):
        return [(place, value)]
    return list(zip(place, value, strict=True))


def _is_apart(tensor: Tensor) -> bool:
    """Whether each row has its bytes together, and the rows have others between them."""
    return tensor.dim() > 0 and _as_row(tensor) is None and all(_is_dense(row) for row in tensor)


def _is_dense(tensor: Tensor) -> bool:
    row = _as_row(tensor)
    return not tensor.dim() or (row is not None and row.numel() == tensor.numel())


def _as_row(tensor: Tensor) -> Tensor | None:
    """All elements from the first to the last in memory, where those between are few and nobody else's."""
    if not tensor.numel() or not tensor.dim():
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    gaps = (span - tensor.numel()) * tensor.element_size()
    if not 0 <= gaps < ALIGNMENT_BYTES * tensor.shape[0]:
        return None
    return tensor.as_strided((span,), (1,))
