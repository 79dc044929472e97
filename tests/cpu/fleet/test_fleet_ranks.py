"""Adapters of several ranks: one group where padding with zeros is exact, one each where it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads.seeding import seeded
from fleet_cases import BATCHES, EXAMPLE, TOLERANCE, assert_close, mse, state_of, states_of, train
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

Inner = Callable[["Adapted", Tensor], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Adapted(nn.Module):
    """A frozen layer, a low-rank adapter beside it, and a head."""

    def __init__(self, base: nn.Module, rank: int, seed: int, inner: Inner | None = None) -> None:
        super().__init__()
        self.base, self.inner, self.scaling = tm.share_frozen(base), inner, 2.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.down = nn.Linear(3, rank, bias=False).double()
            self.up = nn.Linear(rank, 7, bias=False).double()
            self.head = nn.Linear(7, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        low = self.down(x)
        low = low if self.inner is None else self.inner(self, low)
        return self.head(self.base(x) + self.scaling * self.up(low).tanh())


def base() -> nn.Module:
    return seeded(nn.Linear, in_features=3, out_features=7)(5).double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.02, weight_decay=0.1)


def adapters(
    *ranks: int, inner: Inner | None = None, make: MakeOptimizer = adamw, **options: Any
) -> list[tm.Member]:
    shared, members = base(), []
    for number, rank in enumerate(ranks):
        model = Adapted(shared, rank, number, inner)
        optimizer = make([item for item in model.parameters() if item.requires_grad])
        members.append(tm.Member(model, optimizer, f"m{number}", seed=number, **options))
    return members


def assert_trains_alike(
    fleet: tm.Fleet, plain: list[tm.Member], batches: list[Any], max_norm: float | None = None
) -> None:
    """As the same members, trained one by one; weights and optimizer states included."""
    for batch in batches:
        losses = fleet.step(batch)
        for number, member in enumerate(plain):
            member.optimizer.zero_grad()
            loss = mse(member.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(member.model.parameters(), max_norm or 1e9)
            member.optimizer.step()
            close(losses[number], loss.detach())
            close(fleet.metrics["grad_norm"][number], norm)
    states = states_of(fleet)
    for name, alone in zip(fleet.names, plain, strict=True):
        assert_close(states[name], state_of(alone))


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    assert float((got - expected).detach().abs().max()) <= TOLERANCE * max(scale, 1e-3)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": adamw,
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.5, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.5),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, 0.5),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_ranks_train_in_one_group_as_alone(kind: str) -> None:
    members = adapters(2, 5, 1, 5, make=OPTIMIZERS[kind], clip_norm=0.05)
    plain = copy.deepcopy(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    (summary,) = fleet.summary()
    assert summary.members == ("m0", "m1", "m2", "m3")
    assert "adapters of m0, m2 are padded with zeros" in fleet.explain()
    assert_trains_alike(fleet, plain, BATCHES, max_norm=0.05)


def test_batches_of_another_shape_and_evaluations_are_as_alone() -> None:
    members = adapters(2, 5)
    plain = copy.deepcopy(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    short = [[leaf[:3] for leaf in batch] for batch in BATCHES[:4]]
    assert_trains_alike(fleet, plain, short)
    found = fleet.evaluate(short)
    for member in plain:
        assert member.name is not None
        with torch.no_grad():
            expected = sum(float(mse(member.model, batch)) for batch in short) / len(short)
        assert found[member.name]["loss"] == pytest.approx(expected, rel=TOLERANCE)


def _softmax(model: Adapted, low: Tensor) -> Tensor:
    return low.softmax(-1)


def _shifted(model: Adapted, low: Tensor) -> Tensor:
    return low + 0.1


def _scaled(model: Adapted, low: Tensor) -> Tensor:
    return low / model.down.weight.shape[0]


def _mean(model: Adapted, low: Tensor) -> Tensor:
    return low - low.mean(-1, keepdim=True)


def _flattened(model: Adapted, low: Tensor) -> Tensor:
    return low.reshape(-1).square().reshape(low.shape)


@pytest.mark.parametrize(
    "inner", [_softmax, _shifted, _scaled, pytest.param(_mean, marks=pytest.mark.extensive), _flattened]
)
def test_code_that_depends_on_the_rank_splits_groups(inner: Inner) -> None:
    members = adapters(2, 4, inner=inner)
    plain = copy.deepcopy(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    assert [group.members for group in fleet.summary()] == [("m0",), ("m1",)]
    assert_trains_alike(fleet, plain, BATCHES[:3])


def test_an_epsilon_of_zero_splits_groups() -> None:
    """Where padding would be zero divided by zero."""
    members = adapters(2, 4, make=lambda parameters: torch.optim.Adam(parameters, 0.01, eps=0.0))
    assert len(tm.Fleet(members, mse, EXAMPLE).summary()) == 2


def test_sizes_of_a_model_that_is_no_adapter_split_groups() -> None:
    def mlp(hidden: int) -> tm.Member:
        model = nn.Sequential(nn.Linear(3, hidden, bias=False), nn.Linear(hidden, 2, bias=False)).double()
        return tm.Member(model, torch.optim.SGD(model.parameters(), 0.1))

    assert len(tm.Fleet([mlp(3), mlp(4)], mse, EXAMPLE).summary()) == 2


# ---- members come and go -------------------------------------------------------------------------------


def test_a_smaller_rank_joins_and_takes_the_row_of_a_larger_one() -> None:
    members = adapters(5, 5, 2, 3, 6)
    plain = copy.deepcopy(members)
    fleet = tm.Fleet(members[:2], mse, EXAMPLE)
    train(fleet, BATCHES[:3])  # leaves numbers in the row that a smaller one comes into
    fleet.replace("m1", members[2])
    fleet.drop("m0")
    for member in members[3:]:
        fleet.add(member)
    assert [group.members for group in fleet.summary()] == [("m3", "m2"), ("m4",)]
    order = [plain[int(name[1:])] for name in fleet.names]
    assert_trains_alike(fleet, order, BATCHES)


def test_a_member_that_is_edited_keeps_its_rank() -> None:
    members = adapters(2, 5)
    plain = copy.deepcopy(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    assert_trains_alike(fleet, plain, BATCHES[:2])
    for member in (members[0], plain[0]):
        with torch.no_grad():
            member.model.get_parameter("down.weight").mul_(2.0)
    fleet.refresh("m0")
    assert len(fleet.summary()) == 1
    assert_trains_alike(fleet, plain, BATCHES[2:4])


def test_a_padded_member_whose_rank_was_changed_is_refused() -> None:
    members = adapters(2, 5)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    members[0].model.get_parameter("down.weight").data = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(tm.MemberError, match=r"expected a tensor down\.weight of shape \(2, 3\)"):
        fleet.sync()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_checkpoints_have_each_member_at_its_own_rank(accumulate: int, tmp_path: Path) -> None:
    """So one of them goes on beside other ranks, or alone."""
    fleet = tm.Fleet(adapters(2, 5), mse, EXAMPLE, accumulate=accumulate)
    train(fleet, BATCHES[:3])
    fleet.save(tmp_path / "fleet")
    alike = tm.Fleet(adapters(2, 5), mse, EXAMPLE, accumulate=accumulate)
    alike.restore(tmp_path / "fleet")
    assert torch.equal(fleet.step(BATCHES[3]), alike.step(BATCHES[3]))
    states = states_of(fleet)
    assert {name: states[name]["down.weight"].shape[0] for name in states} == {"m0": 2, "m1": 5}
    fleet.save_member("m0", tmp_path / "member")
    for ranks in ((2,), (2, 9)):
        other = tm.Fleet(adapters(*ranks), mse, EXAMPLE, accumulate=accumulate)
        other.load_member("m0", tmp_path / "member")
        for batch in BATCHES[4:6]:
            close(other.step(batch)[0], alike.step(batch)[0])
        alike.restore(tmp_path / "fleet")
        alike.step(BATCHES[3])


def test_a_plan_trains_several_ranks_as_alone() -> None:
    members = adapters(2, 5, 3)
    plain = copy.deepcopy(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    fleet.plan("64MiB", "none")
    assert_trains_alike(fleet, plain, BATCHES[:4])
    fleet.use(None)
    assert_trains_alike(fleet, plain, BATCHES[4:6])
