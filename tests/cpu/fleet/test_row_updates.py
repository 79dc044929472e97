"""Embedding tables are updated by rows: the same numbers as in plain torch, by whole gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benchmarks.workloads.seeding import seeded_generator
from equivalence import assert_same, check, members_of
from fleet_cases import OPTIMIZERS, mse, states_of
from odd_models import odd
from torch import Tensor, nn

import trainmux as tm
from trainmux.engine import _program, _row_gradients

NUM_ROWS, SIZE = 2500, 32


class Words(nn.Module):
    """Some rows of a table, a product with it where it is tied, a number."""

    def __init__(self, *, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, SIZE, padding_idx=padding)
        self.out = nn.Linear(SIZE, 1)
        self.tied = tied

    def forward(self, words: Tensor) -> Tensor:
        rows = self.table(words).mean(1)
        if self.tied:
            rows = rows + (rows @ self.table.weight.T) @ self.table.weight
        result: Tensor = self.out(rows)
        return result


def batch(seed: int, dtype: torch.dtype, num_words: int = 6) -> tuple[Tensor, Tensor]:
    generator = seeded_generator(seed)
    words = torch.randint(0, NUM_ROWS, (16, num_words), generator=generator)
    words[:5, :2] = seed  # the same row again and again
    words[5] = 7
    return words, torch.randn(16, 1, generator=generator, dtype=dtype)


WORDS, PADDED, TIED = (
    odd("words", lambda options=options: Words(**options), mse, batch)
    for options in ({}, {"padding": 7}, {"tied": True})
)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each table's gradient was taken as rows."""
    seen: list[bool] = []

    def spy(gradient: Any, parameter: Any) -> Any:
        rows = _row_gradients.as_row_gradient(gradient, parameter)
        if parameter.meta["val"].shape[1:] == (NUM_ROWS, SIZE):
            seen.append(rows is not None)
        return rows

    monkeypatch.setattr(_program, "as_row_gradient", spy)
    return seen


def clip(member: tm.Member, number: int) -> None:
    member.clip_norm, member.clip_value = ((0.05, None), (None, 1e-3), (None, None))[number]


@pytest.mark.parametrize("optimizer", ["adamw", "adam-amsgrad", "sgd-momentum", "rmsprop-centered"])
def test_the_numbers_are_the_same(optimizer: str, found: list[bool]) -> None:
    check(PADDED if optimizer == "adamw" else WORDS, optimizer=OPTIMIZERS[optimizer], settings=clip)
    assert found == [True]


def fleet_of(workload: Any = WORDS, **options: Any) -> tm.Fleet:
    return tm.Fleet(members_of(workload, range(3)), mse, batch(0, torch.float64), lowering="aten", **options)


def test_members_that_stop_or_are_not_finite_keep_every_bit_and_others_train_on() -> None:
    fleet = fleet_of()
    fleet.step(batch(0, torch.float64))
    fleet.stop("m1")
    with torch.no_grad():
        fleet._groups[0].state.tensors["table.weight"][2, 1] = math.nan
    before = states_of(fleet)
    fleet.step(batch(1, torch.float64))
    after = states_of(fleet)
    for name in ("m1", "m2"):
        assert_same(after[name], before[name])
    assert not torch.equal(after["m0"]["table.weight"], before["m0"]["table.weight"])


@pytest.mark.parametrize(
    ("workload", "options", "num_words"),
    [
        (TIED, {}, 6),
        (WORDS, {"deterministic": True}, 6),
        (WORDS, {"accumulate": 2}, 6),
        (WORDS, {}, 120),
    ],
    ids=["tied", "deterministic", "accumulated", "many rows"],
)
def test_other_gradients_stay_whole(
    workload: Any, options: dict[str, Any], num_words: int, found: list[bool]
) -> None:
    fleet_of(workload, **options).step(batch(0, torch.float64, num_words))
    assert not any(found[-1:])
