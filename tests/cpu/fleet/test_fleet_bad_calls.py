"""Calls that a running fleet refuses: afterwards it trains on as if they had never been made."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    assert_same,
    assert_trains_alone,
    bn_mlp,
    mse,
    same_bits,
    sgd_member,
    state_of,
    states_of,
    vectors,
)
from torch import Tensor, nn

from trainmux import Fleet, Member
from trainmux.errors import (
    BatchError,
    CheckpointError,
    FleetError,
    LossError,
    MemberError,
    OptimizerError,
    PlanError,
    TraceError,
    TrainmuxError,
)

pytestmark = pytest.mark.usefixtures("built_once")

Batch = dict[str, Any]


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    error = model(batch["x"]) - batch["y"]
    return error.square().mean(), {"largest": error.abs().max()}


def batch(seed: int = 0, **changes: Any) -> Batch:
    x, y = vectors(seed)
    found = {"x": x, "y": y, **changes}
    return {key: value for key, value in found.items() if value is not None}


def member(i: int, name: str | None = None, **options: Any) -> Member:
    """Everything that a failed call could disturb: buffers, dropout, a schedule, optimizer state."""
    model = bn_mlp(i, dropout=0.4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1))
    options.setdefault("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7))
    return Member(model, optimizer, name or f"m{i}", **options)


class Pair:
    """A fleet that sees bad calls, and a control that never does."""

    def __init__(self) -> None:
        self.fleet, self.control = (
            Fleet([member(i) for i in range(2)], loss, batch(), deterministic=True) for _ in range(2)
        )
        self.num_checks = 0
        self.is_clean = True
        self.check()

    def check(self) -> None:
        """Both still do the same, bit for bit."""
        self.num_checks += 1
        assert self.fleet.names == self.control.names == ("m0", "m1")
        assert self.fleet.num_steps == self.control.num_steps
        got, expected = (fleet.step(batch(self.num_checks)) for fleet in (self.fleet, self.control))
        assert same_bits(got, expected)
        assert self.fleet.stopped() == {}
        after, control = states_of(self.fleet), states_of(self.control)
        for name in self.control.names:
            assert_same(after[name], control[name])
        for one, other in zip(self.fleet.members, self.control.members, strict=True):
            assert repr(one.optimizer.param_groups) == repr(other.optimizer.param_groups)
            assert one.scheduler.state_dict() == other.scheduler.state_dict()
        assert [group.width for group in self.fleet.summary()] == [2]

    @contextmanager
    def refuses(self, error: type[TrainmuxError], part: str = "") -> Iterator[None]:
        """The block must raise ``error`` for the reason ``part`` and change nothing."""
        self.is_clean = False
        with pytest.raises(error) as caught:
            yield
        assert part in str(caught.value)
        self.check()
        self.is_clean = True


_PAIRS: list[Pair] = []


@pytest.fixture
def pair() -> Pair:
    """One pair serves all tests, until one of them finds it changed."""
    if not _PAIRS or not _PAIRS[-1].is_clean:
        _PAIRS.append(Pair())
    return _PAIRS[-1]


# ---- batches -------------------------------------------------------------------------------------------


X, Y = vectors()


BAD_BATCHES: dict[str, Any] = {
    "none": None,
    "number": 3,
    "missing": batch(y=None),
    "extra": batch(z=Y),
    "dtype": batch(x=X.float()),
    "kind": batch(y=Y.long()),
    "dims": batch(x=X[0]),
    "nested": batch(x=[X]),
    "tuple": (X, Y),
    "tensor": X,
    "constant": batch(note="new"),
}


@pytest.mark.parametrize("kind", BAD_BATCHES)
def test_batches(pair: Pair, kind: str) -> None:
    bad = BAD_BATCHES[kind]
    with pair.refuses(BatchError, "expected"):
        pair.fleet.step(bad)
    if bad is not None:
        with pair.refuses(BatchError, "expected"):
            pair.fleet.evaluate([bad])


def test_batch_of_other_features(pair: Pair) -> None:
    """Sizes may change from batch to batch; the model says which ones it takes."""
    with pair.refuses(TraceError, "[5, 4]"):
        pair.fleet.step(batch(x=torch.ones(5, 4, dtype=torch.float64)))


def test_overrides_for_members_that_share_the_batch(pair: Pair) -> None:
    with pair.refuses(BatchError, "overrides"):
        pair.fleet.step(batch(), {"m0": batch(), "who": batch()})


def test_evaluation_without_batches(pair: Pair) -> None:
    with pair.refuses(BatchError, "at least one batch"):
        pair.fleet.evaluate([])


@pytest.mark.parametrize(
    ("metric", "part"),
    [
        (lambda model, batch: {"rows": model(batch["x"]).mean(1)}, "metric 'rows'"),
        (lambda model, batch: {"size": 3}, "metric 'size'"),
        (lambda model, batch: {}, "got dict"),
        (lambda model, batch: 0.5, "got float"),
    ],
    ids=["vector", "number", "empty", "float"],
)
def test_metric_functions(pair: Pair, metric: Callable[..., Any], part: str) -> None:
    with pair.refuses(LossError, part):
        pair.fleet.evaluate([batch()], metric)


# ---- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["drop", "stop", "replace"])
def test_unknown_names(pair: Pair, call: str) -> None:
    more = [member(5, "new")] if call == "replace" else []
    with pair.refuses(MemberError, "name of a member"):
        getattr(pair.fleet, call)("m7", *more)


def test_a_member_dropped_twice() -> None:
    fleet = Fleet([sgd_member(i) for i in range(2)], mse, vectors())
    fleet.drop("m1")
    with pytest.raises(MemberError, match=r"'m1'.*dropped or never there.*m0"):
        fleet.drop("m1")
    assert_trains_alone(fleet, sgd_member, [vectors(seed) for seed in range(2)])


# ---- newcomers -----------------------------------------------------------------------------------------


def bad_number() -> Member:
    new = member(5, "new")
    new.optimizer.param_groups[0]["lr"] = math.nan
    return new


def foreign() -> Member:
    model = bn_mlp(5)
    return Member(model, torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(1))]), "new")


def unsupported() -> Member:
    model = bn_mlp(5)
    return Member(model, torch.optim.Adamax(model.parameters()), "new")


def two_devices() -> Member:
    new = member(5, "new")
    new.model[1].register_buffer("extra", torch.empty(1, device="meta"))
    return new


def untraceable() -> Member:
    return member(5, "new", loss=lambda model, batch: model(batch["x"]).mean() * batch["y"].sum().item())


def vector_loss() -> Member:
    return member(5, "new", loss=lambda model, batch: model(batch["x"]).mean(1))


def uneven_steps() -> Member:
    """Torch itself allows parameters of one group to have taken different numbers of steps."""
    new = member(5, "new")
    model, optimizer = new.model, new.optimizer
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return new


def wrong_state() -> Member:
    new = member(5, "new")
    weight = new.model[0].weight
    new.optimizer.state[weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.ones(7, dtype=torch.float64),
        "exp_avg_sq": torch.ones(7, dtype=torch.float64),
    }
    return new


NEWCOMERS = [
    (bad_number, OptimizerError, "lr"),
    (foreign, OptimizerError, "foreign parameter"),
    (unsupported, OptimizerError, "Adamax"),
    (two_devices, MemberError, "one device"),
    (untraceable, TraceError, Path(__file__).name),
    (vector_loss, LossError, "scalar loss"),
    (uneven_steps, OptimizerError, "same number of steps"),
    (wrong_state, OptimizerError, "exp_avg"),
]


@pytest.mark.parametrize(("make", "error", "part"), NEWCOMERS, ids=[case[0].__name__ for case in NEWCOMERS])
@pytest.mark.parametrize("call", ["add", "replace"])
def test_newcomers(
    pair: Pair, call: str, make: Callable[[], Member], error: type[TrainmuxError], part: str
) -> None:
    new = make()
    before = None if make is two_devices else state_of(new)
    with pair.refuses(error, part):
        pair.fleet.add(new) if call == "add" else pair.fleet.replace("m0", new)
    if before is not None:
        assert_same(state_of(new), before)


def test_a_name_that_is_taken(pair: Pair) -> None:
    with pair.refuses(MemberError, "no other member has"):
        pair.fleet.add(member(5, "m1"))
    with pair.refuses(MemberError, "no other member has"):
        pair.fleet.replace("m0", member(5, "m1"))


def test_a_member_that_is_there_already(pair: Pair) -> None:
    present = pair.fleet.members[0]
    with pair.refuses(MemberError):
        pair.fleet.add(present)
    with pair.refuses(MemberError, "'m0'"):
        pair.fleet.replace("m1", present)


@pytest.mark.parametrize("call", ["add", "replace"])
def test_a_model_that_is_there_already(pair: Pair, call: str) -> None:
    model = pair.fleet.members[0].model
    new = Member(model, torch.optim.Adam(model.parameters(), lr=0.1), "new")
    with pair.refuses(MemberError, "a model of its own"):
        pair.fleet.add(new) if call == "add" else pair.fleet.replace("m1", new)


def test_something_that_is_no_member(pair: Pair) -> None:
    with pair.refuses(MemberError, "trainmux.Member"):
        pair.fleet.add(nn.Linear(3, 2))  # type: ignore[arg-type]
    with pair.refuses(MemberError, "trainmux.Member"):
        pair.fleet.replace("m0", nn.Linear(3, 2))  # type: ignore[arg-type]


def test_a_refused_newcomer_keeps_no_name(pair: Pair) -> None:
    new = bad_number()
    new.name = None
    with pair.refuses(OptimizerError):
        pair.fleet.add(new)
    assert new.name is None


# ---- models that changed while they were in the fleet --------------------------------------------------


@contextmanager
def changed_shape(fleet: Fleet) -> Iterator[None]:
    """The second member's last layer has another shape for a while."""
    model = fleet.members[1].model
    layer = model[4]
    model[4] = nn.Linear(4, 3, dtype=torch.float64)
    try:
        yield
    finally:
        model[4] = layer


@contextmanager
def lost_buffer(fleet: Fleet) -> Iterator[None]:
    """The second member has no running mean for a while."""
    norm = fleet.members[1].model[1]
    mean = norm.running_mean
    norm.running_mean = None
    try:
        yield
    finally:
        norm.running_mean = mean


@pytest.mark.parametrize(
    ("change", "part"),
    [(changed_shape, "4.weight"), (lost_buffer, "1.running_mean")],
    ids=["shape", "buffer"],
)
@pytest.mark.parametrize("call", ["sync", "drop", "replace"])
def test_write_back_into_a_changed_model(
    pair: Pair, call: str, change: Callable[[Fleet], Any], part: str
) -> None:
    fleet = pair.fleet
    pair.check()
    others = [state_of(m) for m in fleet.members]
    for one in (fleet, pair.control):  # something new to write back
        one.step(batch(99))
    arguments: list[Any] = {"sync": [], "drop": ["m1"], "replace": ["m1", member(5, "new")]}[call]
    with pair.refuses(MemberError, part), change(fleet):
        try:
            getattr(fleet, call)(*arguments)
        finally:
            # Nothing has been written to any member, the ones that did not change included.
            assert_same(state_of(fleet.members[0]), others[0])


# ---- checkpoints ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints of other fleets, each made once."""
    made: dict[str, Path] = {}

    def make(kind: str, members: Callable[[], list[Member]], **settings: Any) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            fleet = Fleet(members(), loss, batch(), **settings)
            fleet.step(batch())
            fleet.save(made[kind])
        return made[kind]

    return make


class Wider(nn.Module):
    """Another architecture with the same names."""

    def __new__(cls, seed: int) -> nn.Module:  # type: ignore[misc]
        model = bn_mlp(seed, dropout=0.4)
        model[0] = nn.Linear(3, 6, bias=False, dtype=torch.float64)
        model[1] = nn.BatchNorm1d(6, affine=False, dtype=torch.float64)
        model[4] = nn.Linear(6, 2, dtype=torch.float64)
        return model


def members_with(**changes: Any) -> Callable[[], list[Member]]:
    """Members like the pair's, apart from what is said."""
    names = changes.pop("names", ("m0", "m1"))
    model = changes.pop("model", lambda i: bn_mlp(i, dropout=0.4))
    optimizer = changes.pop("optimizer", lambda p: torch.optim.Adam(p, lr=0.1))
    scheduler = changes.pop("scheduler", lambda o: torch.optim.lr_scheduler.StepLR(o, 2))

    def make() -> list[Member]:
        result = []
        for i, name in enumerate(names):
            one = model(i)
            over = optimizer(one.parameters())
            result.append(Member(one, over, name, scheduler=scheduler(over)))
        return result

    return make


def small(i: int) -> nn.Module:
    """For checkpoints that are refused before anyone looks at their tensors."""
    return nn.Linear(3, 2, dtype=torch.float64)


CHECKPOINTS: dict[str, tuple[Callable[[], list[Member]], dict[str, Any], str]] = {
    "other-names": (members_with(names=("m0", "m2"), model=small), {}, "unknown ['m2']"),
    "architecture": (members_with(model=Wider), {}, "0.weight"),
    "dtype": (members_with(model=small), {"precision": "bf16"}, "precision"),
    "accumulate": (members_with(model=small), {"accumulate": 2}, "accumulate"),
    "optimizer": (members_with(model=small, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), {}, "SGD"),
    "no-scheduler": (members_with(model=small, scheduler=lambda o: None), {}, "scheduler"),
    "other-scheduler": (
        members_with(scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)),
        {},
        "CosineAnnealingLR",
    ),
    "amsgrad": (members_with(optimizer=lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True)), {}, "amsgrad"),
    "param-groups": (
        members_with(optimizer=lambda p: torch.optim.Adam([{"params": [q]} for q in p], lr=0.1)),
        {},
        "parameter group",
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_of_other_fleets(pair: Pair, saved: Callable[..., Path], kind: str) -> None:
    make, settings, part = CHECKPOINTS[kind]
    path = saved(kind, make, **settings)
    with pair.refuses(CheckpointError, part):
        pair.fleet.restore(path)


def test_a_checkpoint_that_is_not_there(pair: Pair, tmp_path: Path) -> None:
    with pair.refuses(CheckpointError, str(tmp_path)):
        pair.fleet.restore(tmp_path)


def test_momentum_that_the_fleet_has_not(tmp_path: Path) -> None:
    """A checkpoint with more optimizer state than the fleet can hold is another fleet's."""

    def make(momentum: float) -> Fleet:
        model = bn_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        return Fleet([Member(model, optimizer, "a")], loss, batch())

    rich, plain = make(0.9), make(0.0)
    rich.step(batch())
    rich.save(tmp_path)
    plain.step(batch())
    before = copy.deepcopy(states_of(plain))
    with pytest.raises(CheckpointError, match=r"'a'.*momentum"):
        plain.restore(tmp_path)
    assert_same(states_of(plain)["a"], before["a"])
    assert plain.members[0].optimizer.param_groups[0]["momentum"] == 0.0
    plain.step(batch())


# ---- what a fleet is not for ---------------------------------------------------------------------------


def test_a_fleet_is_not_copied(pair: Pair) -> None:
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        with pair.refuses(FleetError, "fleet.save()"):
            call(pair.fleet)


def test_only_a_plan_is_used(pair: Pair) -> None:
    with pair.refuses(PlanError, "expected a plan"):
        pair.fleet.use("x")  # type: ignore[arg-type]


# ---- numbers that go wrong later -----------------------------------------------------------------------


def test_a_learning_rate_that_turns_bad() -> None:
    """Whoever writes it (a schedule, the user): an error or a frozen member, but no spoilt weights."""
    fleet = Fleet([member(i, scheduler=None) for i in range(2)], loss, batch())
    fleet.step(batch())
    before = states_of(fleet)
    fleet.members[1].optimizer.param_groups[0]["lr"] = math.nan
    with contextlib.suppress(OptimizerError):
        fleet.step(batch(1))
        assert "m1" in fleet.stopped()
    assert_same(states_of(fleet)["m1"], before["m1"])


def test_a_setting_that_stops_one_group_stops_all() -> None:
    """The first group must not have stepped when the second one is refused."""
    adam = member(0, scheduler=None)
    model = bn_mlp(1)
    sgd = Member(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "m1")
    fleet = Fleet([adam, sgd], loss, batch())
    fleet.step(batch())
    before = states_of(fleet)
    sgd.optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(OptimizerError, match="momentum"):
        fleet.step(batch(1))
    sgd.optimizer.param_groups[0]["momentum"] = 0.9
    after = states_of(fleet)
    for name in fleet.names:
        assert_same(after[name], before[name])
