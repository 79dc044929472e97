"""Copies between host and device, in pieces; the pieces are tried out on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainmux.engine import Transfers
from trainmux.engine._transfer import Pair


def test_on_the_host_pairs_are_simply_copied() -> None:
    sources = [
        torch.randn(3, 4),
        torch.arange(5),
        torch.randn(2, 2, dtype=torch.float64).t(),
        torch.tensor(1.5),
    ]
    pairs = [(torch.zeros_like(source), source) for source in sources]
    mixed = (torch.zeros(3, dtype=torch.float64), torch.randn(3))
    Transfers(torch.device("cpu")).copy([*pairs, mixed])
    for destination, source in [*pairs, mixed]:
        assert torch.equal(destination, source.to(destination.dtype))


def total(batch: list[Pair]) -> int:
    return sum(-(-piece.nbytes // 64) * 64 for piece, _ in batch)


@pytest.mark.parametrize("buffer_bytes", [64, 1000, 4096, 1 << 20])
def test_pieces_cover_every_element_once_and_fit_the_buffer(buffer_bytes: int) -> None:
    shapes = [(700,), (1,), (3, 5), (0,), (40, 40), (2,)]
    sources = [torch.randn(shape) for shape in shapes] + [torch.arange(77), torch.randn(9).to(torch.bfloat16)]
    pairs: list[Pair] = [(torch.full_like(source, 0), source) for source in sources]
    transfers = Transfers(torch.device("cpu"), buffer_bytes)
    batches = list(transfers._batches(pairs))
    for batch in batches:
        assert len(batch) == 1 or total(batch) <= buffer_bytes
        for piece, given in batch:
            assert 0 < piece.nbytes <= max(buffer_bytes, piece.element_size())
            assert not piece.any()  # not copied before
            piece.copy_(given)
    if buffer_bytes == 1 << 20:
        assert len(batches) == 1
    for destination, source in pairs:
        assert torch.equal(destination, source)


def test_a_destination_in_another_layout_is_copied_by_torch() -> None:
    source = torch.randn(2, 3, 4, 4)
    destination: Tensor = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    Transfers(torch.device("cpu")).copy([(destination, source)])
    assert torch.equal(destination, source)
    assert destination.is_contiguous(memory_format=torch.channels_last)
