"""Members that train no more: stopped on request, or frozen because a number was not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    adam_member,
    assert_alone,
    assert_same,
    assert_same_states,
    bn_mlp,
    count_work,
    dropout_member,
    mse,
    same_bits,
    sgd_member,
    state_of,
    states_of,
)
from torch import Tensor, nn

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


class Watched:
    """A fleet of three whose second member comes to grief, and a control in which it does not."""

    def __init__(self, make: Callable[[int], Member], control: Callable[[int], Member] | None = None) -> None:
        self.fleet, self.control = (
            Fleet([one(i) for i in range(3)], mse, EXAMPLE, deterministic=True)
            for one in (make, control or make)
        )

    def step(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """The others' losses are the same, bit for bit."""
        got = torch.empty(0)
        for batch in batches:
            got, expected = self.fleet.step(batch), self.control.step(batch)
            assert same_bits(got[[0, 2]], expected[[0, 2]])
        return got

    def assert_kept(self, kept: dict[str, Tensor], reason: str) -> None:
        """The second member is as it was, the others as in the control."""
        assert_same_states(states_of(self.fleet), {**states_of(self.control), "m1": kept})
        assert self.fleet.stopped() == {"m1": reason}


# ---- on request ----------------------------------------------------------------------------------------


def test_a_stopped_member_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(dropout_member)
    work = count_work(monkeypatch)
    watched.step(BATCHES[:3])
    watched.fleet.stop("m1")
    before = states_of(watched.fleet)["m1"]
    watched.step(BATCHES[3:6])
    watched.assert_kept(before, "stopped")
    assert watched.fleet.metrics["finite"].tolist() == [True] * 3
    assert work.total == 0


def test_all_members_may_be_stopped_and_evaluated() -> None:
    """Frozen rows take part in all arithmetic: not even the sign of a zero changes."""
    members = [sgd_member(i) for i in range(2)]
    nn.init.constant_(members[0].model[0].weight, -0.0)
    fleet = Fleet(members, mse, EXAMPLE)
    for name in (*fleet.names, "m0"):  # one of them twice
        fleet.stop(name)
    before, metrics = states_of(fleet), fleet.evaluate([EXAMPLE])
    losses = fleet.step(BATCHES[1])
    expected = [mse(member.model, BATCHES[1]).item() for member in members]
    assert losses.tolist() == pytest.approx(expected, rel=TOLERANCE)
    assert fleet.evaluate([EXAMPLE]) == metrics
    assert_same_states(states_of(fleet), before)


def test_a_member_stopped_amid_accumulation_never_applies_it() -> None:
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE, accumulate=2, precision="fp64")
    fleet.step(BATCHES[0])
    fleet.stop("m0")
    before = states_of(fleet)["m0"]
    fleet.step(BATCHES[1])
    assert_same(states_of(fleet)["m0"], before)
    assert_alone(fleet, (adam_member(1), BATCHES[:2]), accumulate=2)


# ---- not finite ----------------------------------------------------------------------------------------


class Amplifier(nn.Module):
    """With running statistics in front and an overflow behind, when ``gain`` is large."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = bn_mlp(seed, dropout=0.4)
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
    watched = Watched(amplifier)
    watched.step(BATCHES[:2])
    watched.fleet.members[1].optimizer.param_groups[1]["lr"] = 1e300
    watched.step(BATCHES[2:3])
    assert watched.fleet.stopped() == {}
    before = states_of(watched.fleet)["m1"]
    assert before["parameter gain"].abs() > 1e290
    assert watched.step(BATCHES[3:6])[1] == math.inf
    assert watched.fleet.metrics["finite"].tolist() == [True, False, True]
    watched.fleet.members[1].optimizer.param_groups[1]["lr"] = 0.0
    watched.assert_kept(before, "not finite at step 4")
    assert {int(value) for key, value in before.items() if key.endswith(" step")} == {3}


class Root(nn.Module):
    """The root of a weight that is zero: a finite value with an infinite derivative."""

    def __init__(self, seed: int, start: float) -> None:
        super().__init__()
        self.body = bn_mlp(seed, dropout=0.4)
        self.root = nn.Parameter(torch.full((1,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.root.sqrt()


def rooted(i: int, start: float = 1.0) -> Member:
    model = Root(i, start)
    return Member(model, torch.optim.Adam(model.parameters(), lr=0.01), f"m{i}")


def infinite(i: int) -> Member:
    member = dropout_member(i)
    if i == 1:
        nn.init.constant_(member.model[4].weight, math.inf)
    return member


@pytest.mark.parametrize(
    ("bad", "good", "loss_is_finite"),
    [(infinite, dropout_member, False), (lambda i: rooted(i, float(i != 1)), rooted, True)],
    ids=["weights", "gradient of a finite loss"],
)
def test_members_that_are_not_finite_from_the_start(
    bad: Callable[[int], Member], good: Callable[[int], Member], loss_is_finite: bool
) -> None:
    watched = Watched(bad, good)
    losses = watched.step(BATCHES[:1])
    assert torch.isfinite(losses).tolist() == [True, loss_is_finite, True]
    assert not torch.isfinite(watched.fleet.metrics["grad_norm"][1])
    watched.step(BATCHES[1:2])
    assert watched.fleet.metrics["finite"].tolist() == [True, False, True]
    watched.assert_kept(state_of(bad(1)), "not finite at step 1")


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_batch_that_is_not_finite_freezes_everyone(clip_norm: float | None) -> None:
    """A gradient that would be clipped to something finite is no excuse."""
    fleet = Fleet([dropout_member(i, clip_norm=clip_norm) for i in range(2)], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    before = states_of(fleet)
    fleet.step((EXAMPLE[0], EXAMPLE[1] * (math.nan if clip_norm is None else 1e160)))
    fleet.step(BATCHES[1])
    assert_same_states(states_of(fleet), before)
    assert fleet.stopped() == dict.fromkeys(fleet.names, "not finite at step 2")


def test_a_frozen_member_goes_on_after_it_was_taken_out_and_put_back() -> None:
    """Dropping hands out weights from before the bad step; whoever repairs the cause may train on."""
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    for batch in (*BATCHES[:2], (EXAMPLE[0] * math.nan, EXAMPLE[1])):
        fleet.step(batch)
    fleet.add(fleet.drop("m1"))
    assert fleet.stopped() == {"m0": "not finite at step 3"}
    for batch in BATCHES[2:5]:
        fleet.step(batch)
    assert_alone(fleet, (adam_member(0), BATCHES[:2]), (adam_member(1), BATCHES[:5]))


def test_freezing_amid_accumulation() -> None:
    """The weights stay as they were, and so do the buffers from the bad micro-batch on."""
    fleet = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE, accumulate=2)
    start = states_of(fleet)["m0"]
    fleet.step(BATCHES[0])
    before = states_of(fleet)["m0"]
    for x, y in ((BATCHES[1][0] * math.nan, BATCHES[1][1]), *BATCHES[2:4]):
        fleet.step((x, y))
    after = states_of(fleet)["m0"]
    assert_same(after, before)
    assert all(same_bits(after[name], start[name]) for name in start if name.startswith("parameter"))
    assert int(after["buffer 1.num_batches_tracked"]) == 1
    assert fleet.stopped().keys() == {"m0", "m1"}
