"""Optimizers without a rule of their own, torch's and a user's: traced from their step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import own_optimizers as own
import pytest
import torch
from fleet_cases import BATCHES, EXAMPLE, mse, train, train_alone
from torch import Tensor, nn
from torch.optim import lr_scheduler

from trainmux import Fleet, Member
from trainmux.errors import MemberChangedError, OptimizerError

pytestmark = pytest.mark.usefixtures("built_once")

Settings = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One class, and settings for each member."""

    make: Callable[..., torch.optim.Optimizer]
    settings: Settings
    tolerance: float = 1e-12


_BETAS = (
    {"lr": 0.01},
    {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1},
    {"lr": 0.005, "betas": (0.7, 0.9)},
)
_MOMENTUM = ({"lr": 0.05, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.5}, {"lr": 0.02, "momentum": 0.7})

CASES = {
    "nadam": Case(torch.optim.NAdam, _BETAS),
    "nadam-decoupled": Case(
        lambda params, **settings: torch.optim.NAdam(params, decoupled_weight_decay=True, **settings),
        [{"lr": 0.01, "momentum_decay": 0.01}, {"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.03, "eps": 1e-3}],
    ),
    "radam": Case(torch.optim.RAdam, _BETAS),
    "adamax": Case(torch.optim.Adamax, _BETAS),
    "asgd": Case(
        torch.optim.ASGD,
        [{"lr": 0.05, "t0": 3}, {"lr": 0.1, "weight_decay": 0.1, "lambd": 0.01, "t0": 1}, {"alpha": 0.5}],
    ),
    "rprop": Case(
        torch.optim.Rprop, [{"lr": 0.01}, {"lr": 0.02, "etas": (0.4, 1.3)}, {"step_sizes": (1e-5, 0.03)}]
    ),
    "adafactor": Case(
        torch.optim.Adafactor,
        [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.1, "d": 1.7}, {"lr": 0.05, "beta2_decay": -0.7}],
    ),
    "lion": Case(own.Lion, _BETAS),
    "lamb": Case(own.Lamb, _BETAS),
    "anchored": Case(own.Anchored, [{"lr": 0.01}, {"lr": 0.2, "pull": 0.3}, {"lr": 0.05, "warmup": 8}]),
    "orthogonal": Case(own.Orthogonal, [{"lr": 0.01}, {"lr": 0.02, "momentum": 0.3}, {"momentum": 0.8}]),
    "adam-subclass": Case(own.Centred, _BETAS),
    "sgd-subclass": Case(own.PlainMomentum, _MOMENTUM),
}
if hasattr(torch.optim, "Muon"):
    _MUON: Settings = [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.3}, {"momentum": 0.8}]
    # Its products are in bfloat16, and those of several members at once round otherwise.
    CASES["muon"] = Case(torch.optim.Muon, _MUON, tolerance=0.02)

every_case = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.extensive] * (name == "nadam-decoupled")) for name in CASES],
)


def model_of(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Matrices only, which all of these optimizers take."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
        return nn.Sequential(*layers).to(dtype)


def members_of(name: str, dtype: torch.dtype = torch.float64, *, model: Any = model_of) -> list[Member]:
    """Three members; the second follows a schedule."""
    case, members = CASES[name], []
    for number, settings in enumerate(case.settings):
        module = model(number, dtype)
        optimizer = case.make(module.parameters(), **settings)
        members.append(Member(module, optimizer, f"m{number}"))
    members[1].scheduler = lr_scheduler.StepLR(members[1].optimizer, 2, 0.5)
    return members


def assert_equal(ours: Member, plain: Member, tolerance: float = 1e-12) -> None:
    """Weights and optimizer state, with torch's names, shapes, dtypes and kinds."""
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert_close(mine.detach(), theirs.detach(), tolerance)
        state, expected = ours.optimizer.state[mine], plain.optimizer.state[theirs]
        assert list(state) == list(expected)
        for entry, value in expected.items():
            assert type(state[entry]) is type(value)
            assert_close(*(torch.as_tensor(number) for number in (state[entry], value)), tolerance)


def assert_close(ours: Tensor, plain: Tensor, tolerance: float) -> None:
    assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
    tolerance = max(tolerance, torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0)
    assert (ours - plain).abs().max() <= tolerance * plain.abs().max()


def assert_trains_as_alone(
    ours: Sequence[Member], plain: Sequence[Member], fleet: Fleet, batches: Sequence[Any], **options: Any
) -> None:
    """Train the fleet, and the others in plain torch; compare each of ours with each of those."""
    tolerance = options.pop("tolerance", 1e-12)
    train(fleet, batches)
    fleet.sync()
    for mine, theirs in zip(ours, plain, strict=True):
        train_alone(theirs, batches, **options)
        assert_equal(mine, theirs, tolerance)


@every_case
def test_members_train_as_alone_and_one_that_is_not_finite_keeps_its_bits(name: str) -> None:
    ours, plain, tolerance = members_of(name), members_of(name), CASES[name].tolerance
    fleet = Fleet(ours, mse, EXAMPLE)
    assert len(fleet._groups) == 1
    assert_trains_as_alone(ours, plain, fleet, BATCHES[:5], tolerance=tolerance)
    group = fleet._groups[0]
    next(iter(group.state.tensors.values()))[2, 0] = math.inf
    before = [rows[2].clone() for rows in group.state.stacked()[:-3]]
    train(fleet, BATCHES[5:9])
    for was, rows in zip(before, group.state.stacked()[:-3], strict=True):
        assert torch.equal(was.view(-1).view(torch.uint8), rows[2].clone().view(-1).view(torch.uint8))
    assert set(fleet.stopped()) == {"m2"}
    fleet.sync()
    for mine, theirs in zip(ours[:2], plain, strict=False):
        train_alone(theirs, BATCHES[5:9])
        assert_equal(mine, theirs, tolerance)
    fleet.drop("m0")
    train_alone(ours[0], BATCHES[9:])
    train_alone(plain[0], BATCHES[9:])
    assert_equal(ours[0], plain[0], tolerance)


def with_extensive(names: Sequence[str], *more: str) -> pytest.MarkDecorator:
    """``more`` have what the others have, in another combination."""
    extensive = [pytest.param(name, marks=pytest.mark.extensive) for name in more]
    return pytest.mark.parametrize("name", [*names, *extensive])


@with_extensive(["adafactor", "anchored", "sgd-subclass"], "nadam", "asgd", "lamb")
def test_members_with_a_history_and_newcomers_go_on_as_alone(name: str) -> None:
    ours, plain = members_of(name), members_of(name)
    for member in (*ours[:2], *plain[:2]):
        train_alone(member, BATCHES[:3])
    grows = name == "anchored"  # else the newcomer takes the place of one that leaves
    fleet = Fleet([*ours[:2], *members_of(name)[2 + grows :]], mse, EXAMPLE)
    train(fleet, BATCHES[3:5])
    if not grows:
        fleet.drop("m2")
    fleet.add(ours[2])
    for member in plain[:2]:
        train_alone(member, BATCHES[3:5])
    assert_trains_as_alone(ours, plain, fleet, BATCHES[5:9])


@pytest.mark.parametrize("name", ["nadam", "rprop", "adafactor", "anchored"])
def test_a_checkpoint_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    fleet = Fleet(members_of(name), mse, EXAMPLE)
    train(fleet, BATCHES[:3])
    fleet.save(tmp_path / "fleet")
    train(fleet, BATCHES[3:6])
    other = Fleet(members_of(name), mse, EXAMPLE)
    other.restore(tmp_path / "fleet")
    train(other, BATCHES[3:6])
    for rows, others in zip(fleet._groups[0].state.stacked(), other._groups[0].state.stacked(), strict=True):
        assert torch.equal(rows, others)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("lamb", torch.bfloat16),
        ("adafactor", torch.bfloat16),
        pytest.param("radam", torch.bfloat16, marks=pytest.mark.extensive),
        *(
            pytest.param(name, torch.float32, marks=pytest.mark.extensive)
            for name in ("radam", "adafactor", "lamb")
        ),
    ],
)
def test_other_precisions_round_like_plain_torch(name: str, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return mse(model, [leaf.to(dtype) for leaf in batch])

    def one_layer(seed: int, dtype: torch.dtype) -> nn.Module:
        layer = nn.Linear(3, 2, bias=False, dtype=dtype)
        layer.weight.data = model_of(seed, dtype)[0].weight.data[:2].clone()  # type: ignore[index, union-attr]
        return layer

    ours, plain = (members_of(name, dtype, model=one_layer) for _ in range(2))
    fleet = Fleet(ours, loss, EXAMPLE)
    train(fleet, BATCHES[:4])
    fleet.sync()
    for mine, theirs in zip(ours, plain, strict=True):
        train_alone(theirs, BATCHES[:4], loss)
        pairs = zip(mine.model.parameters(), theirs.model.parameters(), strict=True)
        assert all((a - b).abs().max() <= 16 * torch.finfo(dtype).eps * b.abs().max() for a, b in pairs)


@with_extensive(["nadam"], "adafactor", "orthogonal")
def test_compiled_updates_are_the_same(name: str) -> None:
    ours = members_of(name)
    fleet = Fleet(ours, mse, EXAMPLE, lowering="inductor")
    assert_trains_as_alone(ours, members_of(name), fleet, BATCHES[:4])


@with_extensive(["adafactor"], "nadam")
def test_a_plan_trains_the_same(name: str) -> None:
    ours = members_of(name)
    fleet = Fleet(ours, mse, EXAMPLE)
    fleet.use(fleet.plan("1 GiB"))
    assert_trains_as_alone(ours, members_of(name), fleet, BATCHES[:4])


def test_clipping_and_accumulation_come_before_the_update() -> None:
    ours, plain = members_of("lamb"), members_of("lamb")
    for members in (ours, plain):
        members[1].clip_norm = 0.01
    fleet = Fleet(ours, mse, EXAMPLE, accumulate=2)
    assert_trains_as_alone(ours, plain, fleet, BATCHES[:6], accumulate=2)


def test_a_decision_on_a_setting_is_followed_while_members_train() -> None:
    """LAMB looks whether there is weight decay; RAdam whether there were enough steps."""
    ours, plain = members_of("lamb"), members_of("lamb")
    fleet = Fleet(ours, mse, EXAMPLE)
    for number, batch in enumerate(BATCHES[:6]):
        for member in (ours[0], plain[0]):
            member.optimizer.param_groups[0]["weight_decay"] = 0.1 * (number % 2)
        fleet.step(batch)
        train_alone(plain[0], [batch])
    fleet.sync()
    assert_equal(ours[0], plain[0])


def test_a_setting_that_decides_what_state_there_is_cannot_change() -> None:
    ours = members_of("sgd-subclass")
    fleet = Fleet(ours, mse, EXAMPLE)
    fleet.step(EXAMPLE)
    ours[0].optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises((OptimizerError, MemberChangedError), match=r"momentum|optimizer"):
        fleet.step(EXAMPLE)


def test_param_groups_have_settings_of_their_own() -> None:
    def make(number: int) -> Member:
        model = model_of(number)
        first, last = model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": [last], "betas": (0.5, 0.9)}]
        return Member(model, torch.optim.NAdam(groups, lr=0.01 * (number + 1)), f"m{number}")

    ours = [make(0), make(1)]
    assert_trains_as_alone(ours, [make(0), make(1)], Fleet(ours, mse, EXAMPLE), BATCHES[:4])


def test_a_member_need_not_have_the_settings_that_a_schedule_adds_to_another() -> None:
    class Unseen(own.Lion):
        """No other test has had it traced."""

    def make() -> list[Member]:
        models = [model_of(seed) for seed in range(2)]
        members = [
            Member(model, Unseen(model.parameters(), lr=0.01), f"m{i}") for i, model in enumerate(models)
        ]
        members[0].scheduler = lr_scheduler.StepLR(members[0].optimizer, 2, 0.5)  # adds "initial_lr"
        return members

    ours = make()
    fleet = Fleet(ours, mse, EXAMPLE)
    assert len(fleet.groups) == 1
    assert_trains_as_alone(ours, make(), fleet, BATCHES[:4])


@pytest.mark.parametrize("reads", [True, False], ids=["one setting", "no setting"])
def test_an_optimizer_may_read_few_settings(reads: bool) -> None:
    class Plain(own._Own):
        def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
            p.sub_(grad, alpha=group["lr"] if reads else 0.125)

    def make() -> list[Member]:
        model = model_of(0)
        return [Member(model, Plain(model.parameters(), unread=1.0), "a")]

    ours = make()
    assert_trains_as_alone(ours, make(), Fleet(ours, mse, EXAMPLE), BATCHES[:4])


_REFUSED = {
    torch.optim.LBFGS: "step needs 'closure'",
    torch.optim.SparseAdam: "SparseAdam",
    own.GlobalNorm: "depends on the other parameters",
    own.OwnCounter: "a number that changes from step to step",
    own.GroupCounter: "writes 'count' into its param group",
    own.ThroughNumpy: "a number that changes from step to step",
    own.Noisy: "draws random numbers",
    own.Searching: "decisions in a row",
    own.Remembering: "'past' is a list",
}


@pytest.mark.parametrize("cls", _REFUSED, ids=lambda cls: cls.__name__)
def test_what_cannot_be_traced_is_refused_with_the_reason(cls: Any) -> None:
    model = model_of(0)
    with pytest.raises(OptimizerError, match=_REFUSED[cls]) as caught:
        Fleet([Member(model, cls(model.parameters(), lr=0.1), "a")], mse, EXAMPLE)
    assert "Member 'a'" in str(caught.value)
    assert "use another optimizer" in str(caught.value)


def test_tracing_leaves_the_optimizer_as_it_was() -> None:
    model = model_of(0)
    optimizer = own.Lamb(model.parameters())
    train_alone(Member(model, optimizer), BATCHES[:1])
    before = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    Fleet([Member(model, optimizer, "a")], mse, EXAMPLE)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert all(map(torch.equal, model.parameters(), weights))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
