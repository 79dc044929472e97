"""Embedding tables are updated by rows: the same numbers as by whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainmux as tm
from trainmux.engine import _program, _row_gradients

NUM_ROWS, SIZE, NUM_STEPS = 2500, 32, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam with amsgrad": lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True, weight_decay=0.01),
    "sgd with momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, centered=True, momentum=0.5),
}


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


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    words, wanted = batch
    value: Tensor = (model(words) - wanted).square().mean()
    return value


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(NUM_STEPS):
        words = torch.randint(0, NUM_ROWS, (16, 6), generator=generator)
        words[:5, :2] = number  # the same row again and again
        words[5] = 7
        found.append((words, torch.randn(16, 1, generator=generator, dtype=torch.float64)))
    return found


def make_fleet(optimizer: str = "adamw", fleet: dict[str, Any] | None = None, **options: Any) -> tm.Fleet:
    """Three members; ``fleet`` has options of the fleet, the rest are the model's or the member's."""
    clips = {key: options.pop(key) for key in ("clip_norm", "clip_value") if key in options}
    members = []
    for number in range(3):
        torch.manual_seed(number)
        model = Words(**options).double()
        made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2 * (number + 1))
        members.append(tm.Member(model, made, name=f"m{number}", **clips))
    return tm.Fleet(members, loss, batches()[0], lowering="aten", device="cpu", **(fleet or {}))


def state_of(fleet: tm.Fleet) -> dict[str, Tensor]:
    (group,) = fleet._groups
    kinds = (group.state.tensors, group.state.states)
    return {str(key): rows.clone() for kind in kinds for key, rows in kind.items()}


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


def trained(fleet: tm.Fleet) -> tuple[dict[str, Tensor], list[Tensor]]:
    losses = [fleet.step(batch).clone() for batch in batches()]
    return state_of(fleet), losses


CASES: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "padding, clipped norm": {"padding": 7, "clip_norm": 0.05},
    "clipped values": {"clip_value": 1e-3},
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_numbers_are_the_same(case: str, found: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    by_rows, losses = trained(make_fleet(**CASES[case]))
    assert found == [True]
    monkeypatch.setattr(_program, "as_row_gradient", lambda gradient, parameter: None)
    in_whole, expected_losses = trained(make_fleet(**CASES[case]))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-11, atol=0)
    torch.testing.assert_close(by_rows, in_whole, rtol=1e-9, atol=1e-13)


def test_members_that_stop_or_are_not_finite_keep_every_bit_and_others_train_on() -> None:
    fleet = make_fleet()
    first, second, *_ = batches()
    fleet.step(first)
    fleet.stop("m1")
    with torch.no_grad():
        fleet._groups[0].state.tensors["table.weight"][2, int(second[0][0, 0])] = math.nan
    before = state_of(fleet)
    fleet.step(second)
    for name, after in state_of(fleet).items():
        assert torch.equal(after[1:].nan_to_num(), before[name][1:].nan_to_num()), name
        assert name != "table.weight" or not torch.equal(after[0], before[name][0])


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"tied": True}, 1),
        ({"fleet": {"deterministic": True}}, 1),
        ({"fleet": {"accumulate": 2}}, 1),
        ({}, 20),
    ],
    ids=["tied", "deterministic", "accumulated", "many rows"],
)
def test_other_gradients_stay_whole(options: dict[str, Any], times: int, found: list[bool]) -> None:
    fleet = make_fleet(**options)
    words, wanted = batches()[0]
    fleet.step((words.repeat(1, times), wanted))
    assert not any(found[-1:])
