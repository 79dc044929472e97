"""Members that differ only in numbers of their code: one group, and the results of each alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_cases import count_work
from torch import Tensor, nn

import trainmux as tm

INPUTS, WIDTH, CLASSES = 6, 12, 5


def batch_of(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


BATCHES = [batch_of(seed) for seed in range(4)]


class Net(nn.Module):
    """A network with a number of each kind that users search over."""

    def __init__(
        self, dropout: float = 0.0, alpha: float = 1.0, slope: float = 0.1, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.down, self.up = nn.Linear(INPUTS, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.alpha, self.slope = alpha, slope

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.up(self.down(x)) * (self.alpha / 2)
        return self.last(self.dropout(self.norm(F.leaky_relu(hidden, self.slope))))


def loss_of(smoothing: float = 0.1, weight: float = 1.0, temperature: float = 1.0, limit: float = 1.0) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0]) / temperature
        penalty = model.first.weight.clamp(-limit, limit).square().sum()
        return F.cross_entropy(logits, batch[1], label_smoothing=smoothing) + weight * penalty

    return loss


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def member_of(number: int, loss: Any = None, seed: int = 0, **settings: float) -> tm.Member:
    torch.manual_seed(number)
    model = Net(**settings).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (number + 1))
    return tm.Member(model, optimizer, name=f"m{number}", seed=seed + number, loss=loss or loss_of())


def fleet_of(members: Sequence[tm.Member], **options: Any) -> tm.Fleet:
    return tm.Fleet(members, None, BATCHES[0], precision="fp64", **options)


def num_groups(fleet: tm.Fleet) -> int:
    return len(fleet.summary())


def weights_of(fleet: tm.Fleet) -> list[dict[str, Tensor]]:
    fleet.sync()
    return [copy.deepcopy(member.model.state_dict()) for member in fleet.members]


def assert_as_plain(
    make: Callable[[], list[tm.Member]], fleet: tm.Fleet, batches: Sequence[Any] = BATCHES
) -> None:
    """Train the members in the fleet and in plain torch; compare losses and weights in fp64."""
    alone = make()
    for batch in batches:
        losses = fleet.step(batch)
        for ours, member in zip(losses, alone, strict=True):
            member.optimizer.zero_grad()
            assert member.loss is not None
            value = member.loss(member.model, batch)
            value.backward()
            member.optimizer.step()
            torch.testing.assert_close(ours, value.detach(), rtol=1e-12, atol=1e-13)
    for found, member in zip(weights_of(fleet), alone, strict=True):
        torch.testing.assert_close(found, member.model.state_dict(), rtol=1e-11, atol=1e-12)


SEARCHES: dict[str, Callable[[int], tm.Member]] = {
    "smoothing": lambda i: member_of(i, loss_of(smoothing=0.05 * (i + 1))),
    "loss weight": lambda i: member_of(i, loss_of(weight=(0.5, 2, 1e-3)[i])),
    "temperature": lambda i: member_of(i, loss_of(temperature=1.0 + i)),
    "clamp": lambda i: member_of(i, loss_of(limit=0.1 * (i + 1))),
    "alpha": lambda i: member_of(i, alpha=(4, 8, 16)[i]),
    "slope": lambda i: member_of(i, slope=0.1 * (i + 1)),
    "epsilon": lambda i: member_of(i, eps=(1e-5, 1e-3, 1e-1)[i]),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_members_that_differ_in_a_number_train_as_one(name: str) -> None:
    def make() -> list[tm.Member]:
        return [SEARCHES[name](number) for number in range(3)]

    fleet = fleet_of(make())
    assert num_groups(fleet) == 1
    assert_as_plain(make, fleet)


class Frozen(nn.BatchNorm1d):
    """Batch norm that keeps its statistics while it trains."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


class Layered(nn.Module):
    """Layers with a number each: ``names`` has where."""

    names = ("eps", "momentum", "eps", "eps", "eps", "eps", "eps", "max_val", "threshold", "value", "lambd")

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 8), nn.Linear(16, CLASSES)
        self.layers = nn.Sequential(
            nn.BatchNorm1d(4, eps=value),
            nn.BatchNorm1d(4, momentum=value),
            nn.BatchNorm1d(4, eps=value, affine=False, track_running_stats=False),
            Frozen(4, eps=value).eval(),
            nn.InstanceNorm1d(4, eps=value, affine=True),
            nn.GroupNorm(2, 4, eps=value),
            nn.RMSNorm(2, eps=value),
            nn.Hardtanh(-1.0, value * 3),
            nn.Threshold(value - 1, value - 1.1),
            nn.ConstantPad1d(1, value),
            nn.Softshrink(value / 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x).reshape(-1, 4, 2)).flatten(1))


def test_layers_that_differ_in_numbers_train_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in plain torch, in training and evaluation, and after a change while they train."""

    def make() -> list[tm.Member]:
        members = []
        for number in range(3):
            torch.manual_seed(number)
            model = Layered(0.1 * (number + 1)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (number + 1))
            members.append(tm.Member(model, optimizer, name=f"m{number}", loss=plain_loss))
        return members

    fleet = fleet_of(make())
    assert num_groups(fleet) == 1
    assert_as_plain(make, fleet)
    scores = fleet.evaluate(BATCHES[:1])
    for member in fleet.members:
        member.model.eval()
        assert scores[str(member.name)]["loss"] == pytest.approx(plain_loss(member.model, BATCHES[0]).item())
        member.model.train()

    live, built = fleet_of(make()), make()
    for model in (live.members[1].model, built[1].model):
        for layer, name in zip(model.layers, Layered.names, strict=True):
            setattr(layer, name, 0.45)
    other = fleet_of(built)
    work = count_work(monkeypatch)
    live.refresh("m1")
    for batch in BATCHES[:2]:
        assert torch.equal(live.step(batch), other.step(batch))
    assert work["fusions"] == 0


def test_dropout_probabilities_draw_what_a_fleet_of_one_draws() -> None:
    """Counters are a member's own, so each draws what it would by itself."""
    rates = (0.1, 0.25, 0.5)

    def make(number: int) -> tm.Member:
        return member_of(number, dropout=rates[number])

    fleet = fleet_of([make(number) for number in range(3)])
    assert num_groups(fleet) == 1
    alone = [fleet_of([make(number)]) for number in range(3)]
    for batch in BATCHES:
        together = fleet.step(batch)
        single = torch.cat([one.step(batch) for one in alone])
        torch.testing.assert_close(together, single, rtol=1e-12, atol=1e-13)
    dropped = torch.tensor([(one.step(BATCHES[0])).item() for one in alone])
    assert len(dropped.unique()) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_as_inputs_round_as_literals_do(precision: str) -> None:
    """A fleet of one has literals; its results in lower precision are those of a fleet with inputs."""

    def make(number: int) -> tm.Member:
        member = member_of(
            number, loss_of(smoothing=0.1 * (number + 1), weight=0.3 + number), alpha=3 + number
        )
        member.model.float()
        return member

    batches = [(inputs.float(), targets) for inputs, targets in BATCHES]
    together = tm.Fleet([make(number) for number in range(3)], None, batches[0], precision=precision)
    alone = [tm.Fleet([make(number)], None, batches[0], precision=precision) for number in range(3)]
    assert num_groups(together) == 1
    for batch in batches[:2]:
        single = torch.cat([one.step(batch) for one in alone])
        torch.testing.assert_close(together.step(batch), single, rtol=3e-6, atol=1e-6)


def test_a_number_changes_live_without_another_trace_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step uses it, no program is built, and the result is bitwise that of a fleet built with it."""
    rates = [0.1, 0.2, 0.3]

    def make(number: int, rate: float) -> tm.Member:
        return member_of(number, dropout=rate, alpha=2.0 + number)

    changed = fleet_of([make(number, rate) for number, rate in enumerate(rates)])
    built = fleet_of([make(number, rate) for number, rate in enumerate((0.1, 0.45, 0.3))])
    work = count_work(monkeypatch)
    changed.members[1].model.dropout.p = 0.45
    with pytest.raises(tm.MemberChangedError):
        changed.step(BATCHES[0])
    changed.refresh("m1")
    assert work["fusions"] == 0
    for batch in BATCHES:
        assert torch.equal(changed.step(batch), built.step(batch))
    assert work["fusions"] == 0
    for ours, theirs in zip(weights_of(changed), weights_of(built), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_number_in_which_all_agreed_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more program, and none after that."""
    fleet = fleet_of([member_of(number, dropout=0.1) for number in range(2)])
    fleet.step(BATCHES[0])
    work = count_work(monkeypatch)
    for rate, num_fusions in ((0.2, 1), (0.3, 1), (0.1, 1)):
        fleet.members[0].model.dropout.p = rate
        fleet.refresh("m0")
        fleet.step(BATCHES[1])
        assert work["fusions"] == num_fusions


def test_members_come_go_and_evaluate_with_numbers_of_their_own() -> None:
    def make(number: int) -> tm.Member:
        return member_of(number, loss_of(temperature=1.0 + number), alpha=1.0 + number)

    fleet = fleet_of([make(0), make(1)])
    fleet.add(make(2))
    fleet.replace("m0", make(3))
    fleet.drop("m1")
    fleet.add(make(4))
    assert num_groups(fleet) == 1
    numbers = [int(name[1:]) for name in fleet.names]
    assert_as_plain(lambda: [make(number) for number in numbers], fleet)
    scores = fleet.evaluate(BATCHES)
    for member in fleet.members:
        member.model.eval()
        with torch.no_grad():
            assert member.loss is not None
            plain = sum(member.loss(member.model, batch).item() for batch in BATCHES) / len(BATCHES)
        member.model.train()
        assert scores[str(member.name)]["loss"] == pytest.approx(plain, rel=1e-12)


def test_batches_of_another_size_use_the_members_numbers() -> None:
    def make() -> list[tm.Member]:
        return [member_of(number, loss_of(smoothing=0.1 * (number + 1))) for number in range(3)]

    fleet = fleet_of(make())
    assert_as_plain(make, fleet, [BATCHES[0], batch_of(9, size=3), BATCHES[1], batch_of(10, size=3)])


def test_a_planned_fleet_trains_by_the_members_numbers() -> None:
    def make() -> list[tm.Member]:
        return [
            member_of(number, loss_of(weight=0.1 * (number + 1)), alpha=1.0 + number) for number in range(2)
        ]

    fleet = fleet_of(make())
    fleet.plan(policy="none")
    assert_as_plain(make, fleet, [*BATCHES, batch_of(9, size=3)])
    fleet.members[0].model.alpha = 7.0
    fleet.refresh("m0")
    reference = fleet_of(make())
    for batch in [*BATCHES, batch_of(9, size=3)]:
        reference.step(batch)
    reference.members[0].model.alpha = 7.0
    reference.refresh("m0")
    torch.testing.assert_close(fleet.step(BATCHES[0]), reference.step(BATCHES[0]), rtol=1e-12, atol=1e-13)


def test_a_checkpoint_of_members_with_numbers_is_restored(tmp_path: Path) -> None:
    def make() -> list[tm.Member]:
        return [member_of(number, dropout=0.1 * (number + 1)) for number in range(2)]

    fleet, other = fleet_of(make()), fleet_of(make())
    fleet.step(BATCHES[0])
    fleet.save(tmp_path)
    other.restore(tmp_path)
    assert torch.equal(fleet.step(BATCHES[1]), other.step(BATCHES[1]))


def test_explain_says_what_is_free_and_what_splits() -> None:
    members = [
        member_of(0, dropout=0.1),
        member_of(1, dropout=0.2),
        member_of(2, dropout=0.0),
    ]
    wide = nn.Sequential(nn.Linear(INPUTS, 3), nn.Linear(3, CLASSES)).double()
    other = tm.Member(
        wide, torch.optim.SGD(wide.parameters(), lr=0.1), loss=lambda m, b: F.cross_entropy(m(b[0]), b[1])
    )
    with pytest.warns(tm.TrainmuxWarning, match="m2 have parameters .* explain"):
        fleet = fleet_of([*members, other])
    first, second, third = fleet.summary()
    assert first.members == ("m0", "m1")
    assert [sorted(number.values) for number in first.numbers if "mul" in number.locations[0]] == [
        sorted((1 / 0.9, 1 / 0.8))
    ]
    assert "test_fleet_numbers.py" in second.split_because
    assert "parameter 0.weight" in third.split_because
    text = fleet.explain()
    assert "per member: " in text
    assert second.split_because in text


def test_the_layers_of_a_search_space_share_a_group() -> None:
    """Optuna's PyTorch example with layers, units and optimizer class fixed: dropout per layer, and lr."""

    def make(trial: int) -> tm.Member:
        torch.manual_seed(trial)
        rates = (0.2 + 0.05 * trial, 0.5 - 0.04 * trial, 0.3)
        layers: list[nn.Module] = []
        for size, rate in zip((INPUTS, 8, 8), rates, strict=True):
            layers += [nn.Linear(size, 8), nn.ReLU(), nn.Dropout(rate)]
        model = nn.Sequential(*layers, nn.Linear(8, CLASSES), nn.LogSoftmax(dim=1)).double()
        return tm.Member(model, torch.optim.Adam(model.parameters(), lr=10.0 ** -(trial + 1)))

    fleet = tm.Fleet(
        [make(trial) for trial in range(4)],
        lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
        BATCHES[0],
        precision="fp64",
    )
    assert num_groups(fleet) == 1
    fleet.add(make(5))
    assert num_groups(fleet) == 1
    assert torch.isfinite(fleet.step(BATCHES[0])).all()
