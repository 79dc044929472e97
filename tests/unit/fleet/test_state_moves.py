"""State that moves as rows of bytes arrives as it was, gaps between members' rows included."""

from __future__ import annotations

import torch
from torch import Tensor

from trainmux.engine import Transfers
from trainmux.fleet._state_moves import _as_row, _by_rows, _is_apart, copy_into_places, host_copies
from trainmux.runtime import stacked_zeros

CPU = torch.device("cpu")


def stacked(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = stacked_zeros(3, shape, dtype, CPU)
    return rows.copy_(torch.randn(3, *shape).to(dtype))


def test_copies_have_the_values_and_are_new() -> None:
    tensors = [stacked(5), stacked(2, 4), stacked(3, dtype=torch.bfloat16), torch.tensor([True, False])]
    for tensor, copy in zip(tensors, host_copies(tensors, Transfers(CPU)), strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.data_ptr() != copy.data_ptr()


def test_places_get_the_values_whatever_their_strides() -> None:
    values = [stacked(5), stacked(2, 4), stacked(4, 4).transpose(1, 2), torch.tensor(2.5)]
    places = [torch.zeros_like(values[0]), stacked_zeros(3, (2, 4), torch.float32, CPU)]
    places += [torch.zeros(3, 4, 4), torch.zeros(())]
    copy_into_places(list(zip(places, values, strict=True)), Transfers(CPU))
    assert all(torch.equal(place, value) for place, value in zip(places, values, strict=True))


def test_what_is_one_row_of_bytes() -> None:
    padded = stacked(5)  # twelve bytes from one member's row to the next
    row = _as_row(padded)
    assert row is not None
    assert row.numel() == 2 * 8 + 5
    dense = _as_row(torch.zeros(4, 4).t())
    assert dense is not None
    assert dense.numel() == 16
    # Every other column is somebody else's.
    assert _as_row(torch.zeros(4, 64)[:, ::2]) is None
    assert _as_row(torch.zeros(1).expand(4)) is None
    assert _as_row(torch.zeros(0, 3)) is None
    assert _as_row(torch.zeros(())) is None


def test_rows_that_lie_apart_move_one_by_one() -> None:
    """As the members' of a sub-array that trains side by side: each in its own share of a slab."""
    slab = torch.zeros(3 * 1024)
    place = slab.as_strided((3, 2, 4), (1024, 4, 1), 64)
    value, shared = stacked(2, 4), torch.randn(2, 4)
    assert [tuple(row.shape) for row, _ in _by_rows(place, value)] == [(2, 4)] * 3
    copy_into_places([(place, value)], Transfers(CPU))
    assert torch.equal(place, value)
    assert int(slab.count_nonzero()) == value.numel()
    copy_into_places([(place, shared)], Transfers(CPU))
    assert all(torch.equal(row, shared) for row in place)
    assert _is_apart(place)
    assert not _is_apart(value)
    assert not _is_apart(torch.zeros(4, 64)[:, ::2])
    assert not _is_apart(torch.tensor(1.0))
