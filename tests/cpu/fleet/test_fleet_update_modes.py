"""``Fleet(update=...)``: what an immediate update saves and gives up, with plans and all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import assert_same, state_of, states_of
from torch import Tensor, nn

import trainmux as tm
from trainmux.engine import _units
from trainmux.errors import BudgetError, ConfigError

pytestmark = pytest.mark.usefixtures("built_once")

MODES = ("deferred", "bucketed", "immediate")


class Net(nn.Module):
    """Layers of one size, and running statistics; ``kink`` is a slope without bound at zero before them."""

    def __init__(self, size: int, num_layers: int, *, kink: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, size, bias=False)  # a bias before the norm has no gradient but rounding
        self.kink = kink
        self.norm = nn.BatchNorm1d(size, affine=False)
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        self.last = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kink:
            x = x.square().sqrt()  # at zero the slope is infinite times zero
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x).tanh()
        result: Tensor = self.last(x)
        return result


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    value: Tensor = (net(batch[0]) - batch[1]).square().mean()
    return value


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def member(
    number: int, *, size: int = 8, num_layers: int = 2, kink: bool = False, **options: Any
) -> tm.Member:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        net = Net(size, num_layers, kink=kink).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2 * (number + 1))
    return tm.Member(net, optimizer, name=f"m{number}", seed=number, **options)


def fleet_of(update: str, num_members: int = 3, *, fleet: Any = None, **options: Any) -> tm.Fleet:
    """``fleet`` has options of the fleet, the rest are the members'."""
    members = [member(number, **options) for number in range(num_members)]
    return tm.Fleet(members, loss, batch(0), update=update, deterministic=True, **(fleet or {}))


@pytest.fixture(autouse=True)
def each_parameter_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As large ones are; and nothing that other tests measured."""
    monkeypatch.setattr(_units, "SMALL", 0)
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


# ---- memory --------------------------------------------------------------------------------------------


def test_an_immediate_update_needs_the_memory_of_few_gradients() -> None:
    """Predicted for a GPU, by compiled regions."""
    size, num_layers, num_members = 64, 4, 2
    peaks = {}
    for update in ("deferred", "immediate"):
        fleet = fleet_of(update, num_members, size=size, num_layers=num_layers)
        peaks[update] = fleet.plan(policy="none", device="h200-141gb").peak_bytes
    one = num_members * size * size * 8
    # All layers' gradients exist at once, or two: that of one layer is made while the other's is used up.
    assert peaks["deferred"] - peaks["immediate"] >= (num_layers - 2) * one
    assert peaks["deferred"] - peaks["immediate"] <= (num_layers + 1) * one


def test_plans_within_less_memory_train_as_without_a_plan() -> None:
    """Parameters that are recomputed from, swapped and updated in the middle of the backward pass."""
    plain = fleet_of("deferred", 2, size=16, num_layers=4)
    for number in range(4):
        plain.step(batch(number))
    expected = states_of(plain)
    most = fleet_of("immediate", 2, size=16, num_layers=4).plan(policy="none").peak_bytes
    for policy, share in (("auto", 0.0), ("mutwo", 0.95)):
        fleet = fleet_of("immediate", 2, size=16, num_layers=4)
        budget = max(1, int(share * most))
        try:
            plan = fleet.plan(budget, policy, max_partitions=3)
        except BudgetError as error:
            plan = fleet.plan(error.smallest_bytes, policy, max_partitions=3)
        assert plan.swaps or plan.recomputes or len(plan.partition) > 1
        for number in range(4):
            fleet.step(batch(number))
        for name, state in states_of(fleet).items():
            for key, value in state.items():
                torch.testing.assert_close(value, expected[name][key], rtol=1e-10, atol=1e-12)


# ---- members that are not finite -----------------------------------------------------------------------


def with_a_broken_member(update: str) -> tm.Fleet:
    """Member m1's loss is finite; the gradient of its first layer is not."""
    members = [member(number, kink=True) for number in range(3)]
    nn.init.zeros_(members[1].model.first.weight)  # type: ignore[arg-type, union-attr]
    return tm.Fleet(members, loss, batch(0), update=update, deterministic=True)


@pytest.mark.parametrize("update", MODES)
def test_a_gradient_that_is_not_finite_stops_its_member_alone(update: str) -> None:
    fleet, healthy = with_a_broken_member(update), fleet_of("deferred", kink=True)
    before = {key: value.clone() for key, value in state_of(fleet.members[1]).items()}
    for number in range(3):
        losses = fleet.step(batch(number))
        assert torch.isfinite(losses).all()
        assert fleet.metrics["finite"].tolist() == [True, False, True]
        healthy.step(batch(number))
    assert list(fleet.stopped()) == ["m1"]
    states, others = states_of(fleet), states_of(healthy)
    for name in ("m0", "m2"):
        assert_same(states[name], others[name])
    changed = {key for key, value in states["m1"].items() if not torch.equal(value, before[key])}
    if update != "immediate":
        assert not changed
        return
    # What came before it in the backward pass was updated, once; nothing else, and no running statistics.
    assert changed == {
        *(f"parameter layers.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")),
        "parameter last.weight",
        "parameter last.bias",
    }


class Late(nn.Module):
    """The first layer's gradient comes last; that of ``kink``, in the middle, is not finite at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kink, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + 0.0 * self.kink(x.detach()).square().sqrt())


def test_from_the_first_bad_gradient_on_nothing_changes() -> None:
    """Also where later gradients are finite again: each mask has all those before it in it."""
    members = []
    for name in ("good", "bad"):
        torch.manual_seed(0)
        net = Late().double()
        if name == "bad":
            for parameter in net.kink.parameters():
                nn.init.zeros_(parameter)
        members.append(tm.Member(net, torch.optim.SGD(net.parameters(), lr=0.1), name=name))
    before = state_of(members[1])
    fleet = tm.Fleet(members, loss, batch(0), update="immediate")
    fleet.step(batch(0))
    after = states_of(fleet)["bad"]
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed <= {"parameter last.weight", "parameter last.bias"}
    assert fleet.metrics["finite"].tolist() == [True, False]


def test_a_loss_that_is_not_finite_changes_nothing_in_any_mode() -> None:
    for update in MODES:
        fleet = fleet_of(update)
        before = states_of(fleet)
        x, y = batch(0)
        fleet.step((x, y * torch.inf))
        assert fleet.metrics["finite"].tolist() == [False] * 3
        for name, state in states_of(fleet).items():
            assert_same(state, before[name])


# ---- what is refused -----------------------------------------------------------------------------------


def test_unknown_modes_and_accumulation_of_immediate_updates_are_refused() -> None:
    with pytest.raises(ConfigError):
        fleet_of("later")
    with pytest.raises(ConfigError):
        fleet_of("immediate", fleet={"accumulate": 2})
    fleet_of("bucketed", fleet={"accumulate": 2})


def test_clipping_by_norm_needs_all_gradients() -> None:
    with pytest.raises(ConfigError):
        fleet_of("immediate", clip_norm=1.0)
    fleet = fleet_of("immediate", clip_value=0.1)
    control = fleet_of("deferred", clip_value=0.1)
    newcomer = member(7, clip_norm=1.0)
    with pytest.raises(ConfigError):
        fleet.add(newcomer)
    with pytest.raises(ConfigError):
        fleet.replace("m1", newcomer)
    # One that is set later is refused with the step, and nothing has changed.
    fleet.members[0].clip_norm = 1.0
    with pytest.raises(ConfigError):
        fleet.step(batch(0))
    fleet.members[0].clip_norm = None
    for number in range(2):
        assert torch.equal(fleet.step(batch(number)), control.step(batch(number)))
    for name, state in states_of(fleet).items():
        assert_same(state, states_of(control)[name])


# ---- all else ------------------------------------------------------------------------------------------


def test_slots_schedules_and_checkpoints_do_not_know_the_mode(tmp_path: Path) -> None:
    fleets = [fleet_of(update) for update in MODES]
    for number, fleet in enumerate(fleets):
        for trained in fleet.members:
            trained.scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 1, 0.5)
        fleet.step(batch(0))
        fleet.replace("m1", member(5))
        fleet.stop("m2")
        fleet.step(batch(1))
        fleet.save(tmp_path / MODES[number])
        fleet.step(batch(2))
    expected = states_of(fleets[0])
    for fleet in fleets[1:]:
        for name, state in states_of(fleet).items():
            assert_same(state, expected[name])
        assert fleet.evaluate([batch(9)]) == fleets[0].evaluate([batch(9)])
    fleets[2].restore(tmp_path / "deferred")
    fleets[2].step(batch(2))
    for name, state in states_of(fleets[2]).items():
        assert_same(state, expected[name])


def test_a_table_whose_rows_are_updated_immediately() -> None:
    def words_loss(model: nn.Module, words: Tensor) -> Tensor:
        value: Tensor = model(words).square().mean()
        return value

    words = torch.randint(0, 2500, (4, 6), generator=torch.Generator().manual_seed(0))
    words[0] = 7  # one row again and again
    found = []
    for update in ("deferred", "immediate"):
        members = []
        for number in range(2):
            torch.manual_seed(number)
            model = nn.Sequential(nn.Embedding(2500, 32), nn.Linear(32, 1)).double()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 * (number + 1))
            members.append(tm.Member(model, optimizer, name=f"m{number}"))
        fleet = tm.Fleet(members, words_loss, words, update=update, lowering="aten")
        for step in range(3):
            fleet.step((words + step) % 2500)
        found.append(states_of(fleet))
    for name, state in found[0].items():
        for key, value in state.items():
            torch.testing.assert_close(found[1][name][key], value, rtol=1e-12, atol=1e-14)


def test_explain_says_how_parameters_are_updated() -> None:
    assert "as soon as its gradient exists" in fleet_of("immediate").explain()
    assert "updated by one kernel: not through ATen" in fleet_of("bucketed").explain()
    assert "updated" not in fleet_of("deferred").explain()
