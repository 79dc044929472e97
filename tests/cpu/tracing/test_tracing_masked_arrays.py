"""Models may hold masked arrays of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainmux as tm


class Masked(nn.Linear):
    def __init__(self, constant: np.ma.MaskedArray) -> None:
        super().__init__(2, 1)
        self.constant = constant

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.constant is not None
        return super().forward(inputs)


@pytest.mark.parametrize("constant", [np.ma.masked, np.ma.masked_array([1.0, 2.0], mask=[True, False])])
def test_a_model_with_a_masked_array_trains(constant: np.ma.MaskedArray) -> None:
    model = Masked(constant)
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fleet = tm.Fleet(
        [member], lambda model, batch: model(batch).square().mean(), torch.ones(3, 2), device="cpu"
    )
    assert fleet.step(torch.ones(3, 2)) > fleet.step(torch.ones(3, 2))
