"""Rounding errors of a step, and bits that repeat whatever the other members are: the checks of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from equivalence import PLAIN, PRECISIONS, check_bits, check_precision
from odd_models import labelled, odd
from short_workloads import SHORT
from torch import Tensor, nn

DEVICE = "cuda"
IN_BOTH = ("cnn", "transformer")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, ("fp32", "bf16")[number % 2]) for number, name in enumerate(PLAIN) if name not in IN_BOTH),
        *((name, precision) for name in IN_BOTH for precision in PRECISIONS),
    ],
)
def test_the_error_of_a_step_is_at_most_three_times_that_of_plain_torch(name: str, precision: str) -> None:
    check_precision(SHORT[name], precision, device=DEVICE)


class LongAttention(nn.Module):
    """Attention over sequences of several blocks, whose backward pass adds up gradients of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (1, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        return F.scaled_dot_product_attention(*parts)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).float().square().mean()


WORKLOADS = {**SHORT, "long attention": odd("attention", LongAttention, mean_square, labelled(1, 2048, 64))}
REPEATED = [
    *[(name, "fp32") for name in ("residual", "bert_mlm_with_dropout", "gpt2", "vit", "long attention")],
    *[(name, "bf16") for name in ("cnn", "transformer", "long attention")],
]


@pytest.mark.parametrize(
    ("name", "precision", "others"),
    [
        *[(name, "fp32", True) for name in ("cnn_with_dropout", "lstm", "transformer_with_dropout", "dlrm")],
        *[(name, precision, False) for name, precision in REPEATED],
    ],
)
def test_bits_repeat_and_do_not_depend_on_the_other_members(name: str, precision: str, others: bool) -> None:
    check_bits(WORKLOADS[name], device=DEVICE, precision=precision, deterministic=True, others=others)
