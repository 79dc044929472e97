"""Averages of weights, per member, beside torch's own ``AveragedModel``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    adam_member,
    assert_same,
    mse,
    state_of,
    states_of,
    train_alone,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainmux import EMA, SWA, Fleet, Member
from trainmux.errors import ConfigError, MemberError

pytestmark = pytest.mark.usefixtures("built_once")

PASS = BATCHES[:4]
NUM_EPOCHS = 4


def ema_alone(member: Member) -> AveragedModel:
    average = AveragedModel(member.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for batch in PASS * NUM_EPOCHS:
        train_alone(member, [batch])
        average.update_parameters(member.model)
    return average


def swa_alone(member: Member) -> AveragedModel:
    average = AveragedModel(member.model)
    for epoch in range(1, NUM_EPOCHS + 1):
        train_alone(member, PASS)
        if epoch >= 2:
            average.update_parameters(member.model)
    return average


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Member], AveragedModel]]] = {
    "ema": (lambda: EMA(decay=0.8), ema_alone),
    "swa": (lambda: SWA(start=2), swa_alone),
}


def assert_like(weights: dict[str, Tensor], average: AveragedModel) -> None:
    expected = dict(average.module.named_parameters())
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("way", "is_planned"), [("ema", False), ("swa", False), ("ema", True)])
def test_averages_are_those_of_each_member_alone(way: str, is_planned: bool) -> None:
    make, alone = WAYS[way]
    fleet, average = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE), make()
    if is_planned:
        fleet.use(fleet.plan("1 GiB"))
    fleet.fit(PASS, epochs=NUM_EPOCHS, callbacks=[average], progress=False)
    for number in range(2):
        assert_like(average.weights(f"m{number}"), alone(adam_member(number)))


@pytest.mark.parametrize(("make", "alone"), WAYS.values(), ids=WAYS.keys())
def test_a_resumed_fit_goes_on_with_its_averages(make: Any, alone: Any, tmp_path: Path) -> None:
    for epochs in (2, NUM_EPOCHS):
        fleet, average = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE), make()
        fleet.fit(PASS, epochs=epochs, callbacks=[average], checkpoint=tmp_path / "fit", progress=False)
    assert_like(average.weights("m1"), alone(adam_member(1)))


def test_members_are_evaluated_with_their_averages_and_get_their_weights_back() -> None:
    fleet, average = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE), EMA(decay=0.8)
    fleet.fit(PASS, epochs=NUM_EPOCHS, callbacks=[average], progress=False)
    before = fleet.evaluate(BATCHES[5:7])
    with average.swapped(fleet):
        averaged = fleet.evaluate([BATCHES[5]])
    assert fleet.evaluate(BATCHES[5:7]) == before
    for number in range(2):
        expected = mse(ema_alone(adam_member(number)), BATCHES[5]).item()
        assert averaged[f"m{number}"]["loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("moves", [False, True], ids=["in its slot", "in another group"])
def test_an_average_goes_on_after_a_refresh(moves: bool) -> None:
    fleet, average = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE), EMA(decay=0.8)
    for _ in range(NUM_EPOCHS):
        fleet.fit(PASS, epochs=1, callbacks=[average], progress=False)
        if moves:
            fleet.members[0].model.append(nn.Tanh())  # type: ignore[operator]
        fleet.refresh("m0")
    assert fleet.num_updates("m0") == len(PASS) * NUM_EPOCHS
    if not moves:
        for name, value in ema_alone(adam_member(0)).module.named_parameters():
            torch.testing.assert_close(average.weights("m0")[name], value.detach(), rtol=1e-12, atol=0)


def test_members_that_come_while_averages_are_in_use_keep_their_weights() -> None:
    fleet, average = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE), EMA(decay=0.8)
    fleet.fit(PASS, epochs=1, callbacks=[average], progress=False)
    trained = states_of(fleet)
    with average.swapped(fleet):
        fleet.refresh("m2")
        fleet.replace("m0", adam_member(3))
        fleet.add(adam_member(4))  # moves all of them
    found = states_of(fleet)
    for number in (3, 4):
        assert_same(found[f"m{number}"], state_of(adam_member(number)))
    for name in ("m1", "m2"):
        assert_same(found[name], trained[name])


def test_a_member_that_is_not_finite_keeps_its_average() -> None:
    fleet, average = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE), EMA(decay=0.8)
    fleet.fit(PASS, epochs=1, callbacks=[average], progress=False)
    before = average.weights("m0")
    with torch.no_grad():
        next(iter(fleet.parameters("m0").values())).fill_(math.inf)
    with pytest.warns(match="m0"):
        fleet.fit(PASS, epochs=1, callbacks=[average], progress=False)
    for name, value in average.weights("m0").items():
        assert torch.equal(value, before[name])
    assert not torch.equal(next(iter(average.weights("m1").values())), next(iter(before.values())))


def test_what_is_no_average_is_refused() -> None:
    for decay in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="decay"):
            EMA(decay)
    with pytest.raises(ConfigError, match="start"):
        SWA(0)
    with pytest.raises(MemberError, match="fit with this callback first"):
        SWA().weights("m0")
