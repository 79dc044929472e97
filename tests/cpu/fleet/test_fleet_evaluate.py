"""Fused evaluation: each member's metrics as in plain torch, and nothing changed by it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    adam_member,
    assert_same_states,
    count_work,
    dropout_member,
    mlp,
    mse,
    sgd,
    sgd_member,
    stacked,
    states_of,
    vectors,
)
from torch import Tensor, nn

from trainmux import Fleet, Member
from trainmux.errors import LossError

pytestmark = pytest.mark.usefixtures("built_once")

LOADER = [BATCHES[5], BATCHES[6], vectors(90, size=2)]  # the last one is short


def two_metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    error = model(batch[0]) - batch[1]
    return {"mae": error.abs().mean(), "wrong": (error > 0).any(1).float().mean()}


def evaluate_alone(member: Member, loader: list[Any], metric: Any) -> dict[str, float]:
    """Means over samples of what ``metric`` returns, in evaluation mode."""
    totals: dict[str, float] = {}
    model = copy.deepcopy(member.model).eval()
    for batch in loader:
        with torch.no_grad():
            values = metric(model, batch)
        if isinstance(values, Tensor):
            values = (values, {})
        if isinstance(values, tuple):
            values = {"loss": values[0], **values[1]}
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value.item() * len(batch[0])
    num_samples = sum(len(batch[0]) for batch in loader)
    return {name: total / num_samples for name, total in totals.items()}


def check(fleet: Fleet, loader: list[Any], metric: Any = None, loss: Any = mse) -> None:
    got = fleet.evaluate(loader, metric) if metric is not None else fleet.evaluate(loader)
    fleet.sync()
    assert list(got) == list(fleet.names)
    for member in fleet.members:
        assert member.name is not None
        expected = evaluate_alone(member, loader, metric or member.loss or loss)
        assert got[member.name] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_evaluation_disturbs_nothing() -> None:
    """Weights, buffers, counters of random draws, flags of the models: all as before."""
    fleet, control = (Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE) for _ in range(2))
    fleet.members[0].model[2].eval()  # a flag that only its owner understands
    flags = [[module.training for module in member.model.modules()] for member in fleet.members]
    for batch in BATCHES[:3]:
        assert fleet.evaluate(LOADER) == fleet.evaluate(LOADER)  # dropout is off
        fleet.step(batch)
        metrics = fleet.metrics
        fleet.evaluate(LOADER)
        assert fleet.metrics.keys() == metrics.keys()
        assert torch.equal(fleet.metrics["grad_norm"], metrics["grad_norm"])
        control.step(batch)
    assert [[m.training for m in member.model.modules()] for member in fleet.members] == flags
    assert fleet.num_steps == 3
    assert_same_states(states_of(fleet), states_of(control))
    check(fleet, LOADER)  # with the running statistics


def test_a_second_evaluation_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    fleet.evaluate(LOADER)
    work = count_work(monkeypatch)
    fleet.step(EXAMPLE)
    fleet.evaluate(LOADER)
    fleet.replace("m0", adam_member(5))
    fleet.evaluate(LOADER)
    assert work.total() == 0


def test_groups_are_evaluated_each_with_its_own_loss() -> None:
    def own(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (model(batch[0]) - batch[1]).abs().mean()
        return loss, {"doubled": 2 * loss}

    small = vectors(40, size=2)  # training differs, the examination is the same for all
    members = [adam_member(0), sgd_member(1), adam_member(2, loss=own), adam_member(3, example_batch=small)]
    fleet = Fleet(members, mse, EXAMPLE)
    fleet.step(EXAMPLE, {"m3": small})
    check(fleet, LOADER)
    assert fleet.evaluate(LOADER)["m2"].keys() == {"loss", "doubled"}
    check(fleet, LOADER, two_metrics)


def test_per_member_data_is_evaluated_per_member_or_in_common() -> None:
    loader = [stacked(n, 50 + n, size=size) for n, size in ((0, 5), (1, 5), (2, 3))]
    fleet = Fleet([adam_member(i) for i in range(2)], mse, loader[0], data="per_member")
    fleet.step(loader[0])
    check(fleet, LOADER)
    got = fleet.evaluate(loader)
    fleet.sync()
    for i, member in enumerate(fleet.members):
        alone = evaluate_alone(member, [(x[i], y[i]) for x, y in loader], mse)
        assert got[f"m{i}"]["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)


def test_empty_slots_are_left_out_and_infinite_values_told_as_they_are() -> None:
    fleet = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE)
    fleet.step(EXAMPLE)
    fleet.drop("m1")
    check(fleet, LOADER)
    broken = adam_member(4)
    nn.init.constant_(broken.model[2].bias, torch.inf)
    fleet.add(broken)
    assert fleet.evaluate(LOADER)["m4"]["loss"] == torch.inf
    fleet.drop("m4")
    check(fleet, LOADER)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_has_the_precision_of_training(precision: str) -> None:
    models = [mlp(i, torch.float32) for i in range(2)]
    batch = vectors(dtype=torch.float32)
    fleet = Fleet([sgd(model, f"m{i}") for i, model in enumerate(models)], mse, batch, precision=precision)
    got = fleet.evaluate([batch])
    for name, model in zip(fleet.names, models, strict=True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            expected = mse(model, batch).item()
        assert got[name]["loss"] == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 1e-2)


class Judge:
    """A metric with everything that may be changed between two evaluations."""

    scale = 1.0

    def __init__(self) -> None:
        self.weights = torch.ones(3, dtype=torch.float64)
        self.offsets = np.zeros(3)
        self.options = {"power": 2}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        error = (model(batch[0]) - batch[1]).abs() ** self.options["power"] * self.weights[0]
        return error.mean() * self.scale + float(self.offsets[1])


def test_a_metric_that_is_changed_is_computed_as_it_is_now() -> None:
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    judge = Judge()
    check(fleet, LOADER, judge)
    judge.options["power"] = 3
    check(fleet, LOADER, judge)
    judge.scale = 4.0
    check(fleet, LOADER, judge)
    judge.weights[0] = 5.0
    check(fleet, LOADER, judge)
    judge.weights.numpy()[0] = 6.0  # no version counter tells
    check(fleet, LOADER, judge)
    judge.offsets[1] = 7.0
    check(fleet, LOADER, judge)


factor = 1.0


def scaled(model: nn.Module, batch: Any) -> Tensor:
    return factor * mse(model, batch)


def test_what_a_metric_mentions_may_change_and_members_may_be_in_any_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE)
    check(fleet, LOADER, scaled)
    monkeypatch.setitem(globals(), "factor", 3.0)
    check(fleet, LOADER, scaled)
    before = fleet.evaluate(LOADER, scaled)
    fleet.members[0].model.eval()
    assert fleet.evaluate(LOADER, scaled) == before
    fleet.members[0].model.train()
    fleet.replace("m1", dropout_member(7))
    check(fleet, LOADER, scaled)


# ---- random draws ---------------------------------------------------------------------------------------


def noisy(model: nn.Module, batch: Any) -> Tensor:
    """Draws in evaluation, too, as a variational autoencoder does."""
    return torch.randn_like(batch[0]).mean() + 0.0 * model(batch[0]).sum()


def noisy_member(i: int) -> Member:
    return sgd(mlp(), f"m{i}", lr=0.0, seed=i)


def noise_of(fleet: Fleet, num_batches: int) -> dict[str, float]:
    return {name: found["loss"] for name, found in fleet.evaluate([EXAMPLE] * num_batches).items()}


def test_noise_differs_by_batch_and_is_the_same_in_every_evaluation() -> None:
    fleet = Fleet([noisy_member(i) for i in range(3)], noisy, EXAMPLE)
    first, both, three = (noise_of(fleet, number) for number in (1, 2, 3))
    trained = [dict(zip(fleet.names, fleet.step(EXAMPLE).tolist(), strict=True)) for _ in range(4)]
    for name in fleet.names:
        second, third = 2 * both[name] - first[name], 3 * three[name] - 2 * both[name]
        values = [first[name], second, third, *(losses[name] for losses in trained)]
        near = [(a, b) for i, a in enumerate(values) for b in values[:i] if abs(a - b) < 1e-9]
        assert not near, near
    assert len(set(first.values())) == 3
    assert noise_of(fleet, 3) == three  # training has drawn in between
    alone = Fleet([noisy_member(1)], noisy, EXAMPLE)
    assert noise_of(alone, 3)["m1"] == pytest.approx(three["m1"], rel=TOLERANCE)


def test_a_metric_function_may_have_a_loss_of_its_own() -> None:
    fleet = Fleet([sgd_member(0)], mse, EXAMPLE)

    def named(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": mse(model, batch) + 1, "finite": mse(model, batch)}

    found = fleet.evaluate([EXAMPLE], named)["m0"]
    assert found["loss"] == pytest.approx(found["finite"] + 1, rel=TOLERANCE)
    with pytest.raises(LossError, match="rename"):
        fleet.evaluate([EXAMPLE], lambda model, batch: (mse(model, batch), {"loss": mse(model, batch)}))
