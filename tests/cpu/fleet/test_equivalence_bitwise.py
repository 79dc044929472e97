"""Bit for bit: the same run twice, and a member whatever the others are."""

from __future__ import annotations

import pytest
from benchmarks.workloads import SMALL
from equivalence import check_bits
from short_workloads import SHORT

pytestmark = pytest.mark.usefixtures("traced_once")

MODELS = ("cnn_with_dropout", "lstm", "transformer_with_dropout", "dlrm")


@pytest.mark.usefixtures("built_once")
@pytest.mark.parametrize("name", MODELS)
def test_bits_repeat_and_do_not_depend_on_the_other_members(name: str) -> None:
    check_bits(SHORT[name])


@pytest.mark.usefixtures("built_once")
def test_bits_repeat_and_do_not_depend_on_the_other_members_in_bf16() -> None:
    check_bits(SMALL["cnn"], precision="bf16")


def test_bits_repeat_and_do_not_depend_on_the_other_members_with_deterministic_algorithms() -> None:
    check_bits(SMALL["mlp"], deterministic=True)
