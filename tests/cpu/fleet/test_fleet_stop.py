"""Members that train no more: stopped on request, or frozen because a number was not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    adam_member,
    assert_close,
    assert_same,
    count_work,
    dropout_member,
    mse,
    same_bits,
    sgd_member,
    state_of,
    states_of,
    train_alone,
)
from torch import Tensor, nn

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


def pair_of_fleets(make: Callable[[int], Member]) -> tuple[Fleet, Fleet]:
    """Two fleets of three that do the same until someone interferes with one of them."""
    first, second = (Fleet([make(i) for i in range(3)], mse, EXAMPLE, deterministic=True) for _ in range(2))
    return first, second


# ---- on request ----------------------------------------------------------------------------------------


def test_a_stopped_member_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, control = pair_of_fleets(dropout_member)
    work = count_work(monkeypatch)
    for batch in BATCHES[:3]:
        fleet.step(batch)
        control.step(batch)
    fleet.stop("m1")
    before = states_of(fleet)["m1"]
    assert fleet.stopped() == {"m1": "stopped"}
    for batch in BATCHES[3:6]:
        got, expected = fleet.step(batch), control.step(batch)
        assert same_bits(got[[0, 2]], expected[[0, 2]])
    after, others = states_of(fleet), states_of(control)
    assert_same(after["m1"], before)
    for name in ("m0", "m2"):
        assert_same(after[name], others[name])
    assert fleet.stopped() == {"m1": "stopped"}
    assert fleet.metrics["finite"].tolist() == [True] * 3
    assert work.total == 0


def test_signs_of_zero_survive_a_stop() -> None:
    """A frozen row takes part in all arithmetic: what it adds must change no bit."""
    members = [sgd_member(i) for i in range(2)]
    for member in members:
        with torch.no_grad():
            member.model[0].weight.fill_(-0.0)
    fleet = Fleet(members, mse, EXAMPLE)
    fleet.stop("m0")
    before = state_of(members[0])
    for batch in BATCHES[:3]:
        fleet.step(batch)
    fleet.sync()
    for name, value in before.items():
        assert same_bits(state_of(members[0])[name], value), name


def test_all_members_may_be_stopped_and_evaluated() -> None:
    fleet = Fleet([sgd_member(i) for i in range(2)], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    for name in (*fleet.names, "m0"):  # one of them twice
        fleet.stop(name)
    before, metrics = states_of(fleet), fleet.evaluate([EXAMPLE])
    losses = fleet.step(BATCHES[1])
    expected = [mse(member.model, BATCHES[1]).item() for member in fleet.members]
    assert losses.tolist() == pytest.approx(expected, rel=TOLERANCE)
    assert fleet.evaluate([EXAMPLE]) == metrics
    after = states_of(fleet)
    for name in fleet.names:
        assert_same(after[name], before[name])


def test_a_member_stopped_amid_accumulation_never_applies_it() -> None:
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE, accumulate=2, precision="fp64")
    fleet.step(BATCHES[0])
    fleet.stop("m0")
    before = states_of(fleet)["m0"]
    fleet.step(BATCHES[1])
    states = states_of(fleet)
    assert_same(states["m0"], before)
    alone = adam_member(1)
    train_alone(alone, BATCHES[:2], accumulate=2)
    assert_close(states["m1"], state_of(alone))


# ---- not finite ----------------------------------------------------------------------------------------


class Amplifier(nn.Module):
    """With running statistics in front and an overflow behind, when ``gain`` is large."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = dropout_member(seed).model
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.gain


def amplifier(i: int) -> Member:
    """Its gain has a learning rate of its own, zero for now."""
    model = Amplifier(i)
    groups = [{"params": model.body.parameters()}, {"params": [model.gain], "lr": 0.0}]
    return Member(model, torch.optim.Adam(groups, lr=0.02 * (i + 1)), f"m{i}")


def test_a_huge_learning_rate_freezes_its_member_only() -> None:
    """Two steps as usual, then one that throws the gain far off: the loss after it is infinite."""
    fleet, control = pair_of_fleets(amplifier)
    for batch in BATCHES[:2]:
        fleet.step(batch)
        control.step(batch)
    fleet.members[1].optimizer.param_groups[1]["lr"] = 1e300
    for one in (fleet, control):
        one.step(BATCHES[2])
    assert fleet.stopped() == {}
    before = states_of(fleet)["m1"]
    assert before["parameter gain"].abs() > 1e290
    for batch in BATCHES[3:6]:
        got, expected = fleet.step(batch), control.step(batch)
        assert same_bits(got[[0, 2]], expected[[0, 2]])
        assert got[1] == math.inf
        assert fleet.metrics["finite"].tolist() == [True, False, True]
    after, others = states_of(fleet), states_of(control)
    assert_same(after["m1"], before)
    for name in ("m0", "m2"):
        assert_same(after[name], others[name])
    assert fleet.stopped() == {"m1": "not finite at step 4"}
    assert {int(value) for key, value in after["m1"].items() if key.endswith(" step")} == {3}


def test_weights_that_are_not_finite_from_the_start() -> None:
    def members(first: float) -> list[Member]:
        result = [dropout_member(i) for i in range(3)]
        with torch.no_grad():
            result[1].model[4].weight[0, 0] = first
        return result

    fleet, control = (Fleet(members(first), mse, EXAMPLE, deterministic=True) for first in (math.inf, 0.1))
    for batch in BATCHES[:2]:
        got, expected = fleet.step(batch), control.step(batch)
        assert same_bits(got[[0, 2]], expected[[0, 2]])
        assert fleet.metrics["finite"].tolist() == [True, False, True]
    after, others = states_of(fleet), states_of(control)
    assert_same(after["m1"], state_of(members(math.inf)[1]))
    for name in ("m0", "m2"):
        assert_same(after[name], others[name])
    assert fleet.stopped() == {"m1": "not finite at step 1"}


class InfiniteSlope(nn.Module):
    """The root of a weight that is zero: a finite value with an infinite derivative."""

    def __init__(self, seed: int, start: float) -> None:
        super().__init__()
        self.body = dropout_member(seed).model
        self.root = nn.Parameter(torch.full((1,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.root.sqrt()


def test_an_infinite_gradient_of_a_finite_loss() -> None:
    def members(start: float) -> list[Member]:
        result = []
        for i in range(3):
            model = InfiniteSlope(i, start if i == 1 else 1.0)
            result.append(Member(model, torch.optim.Adam(model.parameters(), lr=0.01), f"m{i}"))
        return result

    fleet, control = (Fleet(members(start), mse, EXAMPLE, deterministic=True) for start in (0.0, 1.0))
    losses = fleet.step(EXAMPLE)
    control.step(EXAMPLE)
    assert torch.isfinite(losses).all()
    assert fleet.metrics["grad_norm"][1] == math.inf
    assert fleet.metrics["finite"].tolist() == [True, False, True]
    after, others = states_of(fleet), states_of(control)
    assert_same(after["m1"], state_of(members(0.0)[1]))
    for name in ("m0", "m2"):
        assert_same(after[name], others[name])
    assert fleet.stopped() == {"m1": "not finite at step 1"}


def test_a_batch_that_is_not_finite_freezes_everyone() -> None:
    fleet = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    before = states_of(fleet)
    fleet.step((torch.full_like(EXAMPLE[0], math.nan), EXAMPLE[1]))
    fleet.step(BATCHES[1])
    after = states_of(fleet)
    for name in fleet.names:
        assert_same(after[name], before[name])
    assert fleet.stopped() == dict.fromkeys(fleet.names, "not finite at step 2")


def test_a_frozen_member_goes_on_after_it_was_taken_out_and_put_back() -> None:
    """Dropping hands out weights from before the bad step; whoever repairs the cause may train on."""
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    alone = adam_member(1)
    train_alone(alone, BATCHES[:2])
    for batch in BATCHES[:2]:
        fleet.step(batch)
    fleet.step((EXAMPLE[0] * math.nan, EXAMPLE[1]))
    fleet.add(fleet.drop("m1"))
    assert fleet.stopped() == {"m0": "not finite at step 3"}
    for batch in BATCHES[2:5]:
        fleet.step(batch)
    train_alone(alone, BATCHES[2:5])
    assert_close(states_of(fleet)["m1"], state_of(alone))


def test_freezing_amid_accumulation() -> None:
    """The weights stay as they were, and so do the buffers from the bad micro-batch on."""
    fleet = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE, accumulate=2)
    start = states_of(fleet)["m0"]
    before = start
    for number in range(4):
        x, y = BATCHES[number]
        if number == 1:
            before = states_of(fleet)["m0"]
            x = x * math.nan
        fleet.step((x, y))
    after = states_of(fleet)["m0"]
    assert_same(after, before)
    weights = [name for name in start if name.startswith("parameter")]
    assert all(same_bits(after[name], start[name]) for name in weights)
    assert int(after["buffer 1.num_batches_tracked"]) == 1
    assert fleet.stopped().keys() == {"m0", "m1"}


def test_a_loss_that_overflows_with_clipping() -> None:
    """The gradient would be clipped to something finite; the member is frozen all the same."""
    fleet = Fleet([sgd_member(i, clip_norm=1.0 if i else None) for i in range(2)], mse, EXAMPLE)
    before = states_of(fleet)
    losses = fleet.step((EXAMPLE[0], EXAMPLE[1] * 1e160))
    assert not torch.isfinite(losses).any()
    for name, state in states_of(fleet).items():
        assert_same(state, before[name])
