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


@pytest.mark.parametrize("name", ["cnn_with_dropout", "lstm", "transformer_with_dropout", "dlrm"])
def test_bits_repeat_and_do_not_depend_on_the_other_members(name: str) -> None:
    check_bits(SHORT[name], device=DEVICE, deterministic=True)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("residual", "fp32"),
        ("bert_mlm_with_dropout", "fp32"),
        ("gpt2", "fp32"),
        ("vit", "fp32"),
        ("cnn", "bf16"),
        ("transformer", "bf16"),
    ],
)
def test_bits_repeat(name: str, precision: str) -> None:
    check_bits(SHORT[name], device=DEVICE, precision=precision, deterministic=True, others=False)


class LongAttention(nn.Module):
    """Attention over sequences of several blocks, whose backward pass adds up gradients of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (1, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        return F.scaled_dot_product_attention(*parts)


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).float().square().mean()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_over_long_sequences_repeats_bit_for_bit(precision: str) -> None:
    workload = odd("attention", LongAttention, _mean_square, labelled(1, 2048, 64))
    check_bits(workload, device=DEVICE, precision=precision, deterministic=True, others=False)
