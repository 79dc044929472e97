"""Population-based training: the worst members go on from the best, and that helps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks.workloads.seeding import seeded
from fleet_cases import mse, train_alone
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

FLOAT = torch.float64


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 4, generator=generator, dtype=FLOAT)
    return inputs, (2 * inputs[:, :2]).sin().sum(1, keepdim=True)


LOADER = [data(seed) for seed in range(4)]
VALIDATION = [data(9)]


def member(number: int, rate: float) -> tm.Member:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))(number).to(FLOAT)
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5), name=f"m{number}")


def fit(members: list[tm.Member], epochs: int, *callbacks: tm.Callback) -> tm.History:
    fleet = tm.Fleet(members, mse, LOADER[0])
    return fleet.fit(LOADER, epochs=epochs, validation=VALIDATION, callbacks=callbacks, progress=False)


def test_the_worst_go_on_from_the_best() -> None:
    """With its weights, optimizer state and settings, the latter perturbed; others are left alone."""
    rates = (0.05, 0.02, 1e-4, 1e-5)
    training = tm.PopulationBasedTraining("val_loss", {"lr": (0.5, 2.0)}, every=2)
    members = [member(0, rate) for rate in rates]
    for one, name in zip(members, "abcd", strict=True):
        one.name = name
    fit(members, 3, training)
    (exploit,) = training.exploits
    assert (exploit.epoch, exploit.source, exploit.target) == (2, "a", "d")
    assert exploit.settings["lr"] in (0.025, 0.1)
    assert [one.optimizer.param_groups[0]["lr"] for one in members[:3]] == list(rates[:3])

    by_hand = member(0, 0.05)
    train_alone(by_hand, LOADER * 2)
    by_hand.optimizer.param_groups[0]["lr"] = exploit.settings["lr"]
    train_alone(by_hand, LOADER)
    for ours, theirs in zip(members[3].model.parameters(), by_hand.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_members_that_diverged_train_again() -> None:
    training = tm.PopulationBasedTraining("val_loss", {"lr": (0.8, 1.25)})
    history = fit([member(0, 0.05), member(1, 1e200), member(2, 0.01), member(3, 0.02)], 2, training)
    assert training.exploits[0].target == "m1"
    assert history["m1"][-1].stopped is None
    assert history["m1"][-1].loss < 10


def test_a_function_may_change_the_member_itself() -> None:
    seen: list[str] = []

    def perturb(one: Any, drawn: random.Random) -> None:
        seen.append(one.name)
        one.optimizer.param_groups[0]["momentum"] = drawn.choice((0.8, 0.9))

    training = tm.PopulationBasedTraining("val_loss", perturb)
    members = [member(i, 0.01 * (i + 1)) for i in range(4)]
    fit(members, 2, training)
    assert seen == [exploit.target for exploit in training.exploits]
    assert members[int(seen[-1][1])].optimizer.param_groups[0]["momentum"] in (0.8, 0.9)


class Noisy:
    """New batches in every pass, with noise: a large learning rate never settles, a small one is too slow."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, rows: int = 4) -> Tensor:
        return torch.randn(rows, 6, generator=self.generator, dtype=FLOAT)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(30):
            inputs = self.draw()
            yield inputs, 3 * inputs.sum(1, keepdim=True) + self.draw()[:, :1]


def linear(number: int, rate: float) -> tm.Member:
    model = nn.Linear(6, 1).to(FLOAT)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=rate), name=f"m{number}")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.extensive)])
def test_it_beats_random_search_of_the_same_budget(seed: int) -> None:
    """Of the same members and epochs, the best has a lower loss: its learning rate falls on the way."""
    inputs, best = Noisy().draw(64), []
    clean = [(inputs, 3 * inputs.sum(1, keepdim=True))]
    training = tm.PopulationBasedTraining("val_loss", {"lr": (0.5, 1.5)}, every=2, seed=seed)
    for callbacks in ([training], []):
        drawn = random.Random(seed)
        members = [linear(i, 10 ** drawn.uniform(-2, -0.7)) for i in range(8)]
        fleet = tm.Fleet(members, mse, next(iter(Noisy())))
        history = fleet.fit(Noisy(), epochs=20, validation=clean, callbacks=callbacks, progress=False)
        best.append(history[history.best("val_loss")][-1].metrics["val_loss"])
    assert best[0] < best[1]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"share": 0.9}, "share"),
        ({"every": 0}, "every"),
        ({"mode": "best"}, "mode"),
        ({"perturb": {"lr": ()}}, "factor"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(tm.ConfigError, match=what):
        tm.PopulationBasedTraining("val_loss", **{"perturb": {"lr": (0.8, 1.25)}, **options})


def test_an_unknown_metric_is_refused() -> None:
    training = tm.PopulationBasedTraining("val_error", {"lr": (0.8, 1.25)})
    with pytest.raises(tm.ConfigError, match="val_error"):
        fit([member(i, 0.01) for i in range(4)], 1, training)
