"""What a fleet refuses: a typed error, and everything as if the call had never been made."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    EXAMPLE,
    assert_same,
    assert_same_states,
    assert_trains_alone,
    bn_mlp,
    mlp,
    mse,
    same_bits,
    sgd_member,
    state_of,
    states_of,
    vectors,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler

from trainmux import Fleet, Member
from trainmux.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    FleetError,
    FusionError,
    LossError,
    MemberError,
    OptimizerError,
    PlanError,
    TraceError,
    TrainmuxError,
)

pytestmark = pytest.mark.usefixtures("built_once")

# ---- making a member -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"model": "mlp"},
        {"optimizer": torch.optim.SGD},
        {"name": ""},
        {"name": 3},
        {"seed": 1.5},
        {"seed": True},
        {"seed": 2**63},
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"clip_value": -0.5},
        {"clip_value": "1"},
        {"scheduler_interval": "batch"},
        {"loss": 3.0},
        {"scheduler": "cosine"},
        pytest.param(
            {"scheduler": lr_scheduler.StepLR(sgd_member(1).optimizer, 3)}, id="another optimizer's scheduler"
        ),
    ],
)
def test_settings_of_a_member(change: dict[str, Any]) -> None:
    model = mlp()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "name": "a", **change}
    with pytest.raises(MemberError, match=next(iter(change))):
        Member(**given)


# ---- making a fleet ------------------------------------------------------------------------------------


def refused(error: type[TrainmuxError], **fleet: Any) -> TrainmuxError:
    """Make a fleet that must be refused and must leave its members alone."""
    settings: dict[str, Any] = {"members": [sgd_member(0)], "loss": mse, "example_batch": EXAMPLE, **fleet}
    members = [member for member in settings["members"] if isinstance(member, Member)]

    def states() -> list[dict[str, Tensor]]:
        on_host = (m for m in members if not any(p.is_meta for p in m.model.parameters()))
        return [{key: value.to_dense() for key, value in state_of(m).items()} for m in on_host]

    before, groups = states(), [repr(member.optimizer.param_groups) for member in members]
    with pytest.raises(error) as caught:
        Fleet(**settings)
    assert type(caught.value) is error
    for old, new in zip(before, states(), strict=True):
        assert_same(new, old)
    assert [repr(member.optimizer.param_groups) for member in members] == groups
    return caught.value


def sgd(model: nn.Module, name: str = "bad", **options: Any) -> Member:
    return Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name, **options)


def with_setting(name: str, value: Any, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> Member:
    """A member whose optimizer got a value that torch's own constructor would not take."""
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.param_groups[0][name] = value
    return Member(model, optimizer, "bad")


def with_optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Member:
    model = mlp()
    return Member(model, make(list(model.parameters())), "bad")


def changed(change: Callable[[Member], object]) -> Member:
    bad = sgd_member(0, "bad")
    change(bad)
    return bad


def _one_layer_twice() -> list[Member]:
    first, second = mlp(0), mlp(1)
    second[0] = first[0]
    return [sgd(first, "a"), sgd(second, "b")]


def _two_devices(member: Member) -> None:
    member.model[2].bias = nn.Parameter(torch.empty(2, dtype=torch.float64, device="meta"))


def _misshapen_state(member: Member) -> None:
    member.optimizer.state[member.model[0].weight]["momentum_buffer"] = torch.zeros(7, dtype=torch.float64)


class _MyAdam(torch.optim.Adam):
    pass


BAD_MEMBERS: dict[str, tuple[type[TrainmuxError], Callable[[], list[Any]]]] = {
    "none": (MemberError, list),
    "no member": (MemberError, lambda: [sgd_member(0), nn.Linear(3, 2)]),
    "a name twice": (MemberError, lambda: [sgd_member(i, "twin") for i in range(2)]),
    "a member twice": (MemberError, lambda: [sgd_member(0)] * 2),
    "a model twice": (MemberError, lambda: [sgd(model, name) for model in [mlp()] for name in "ab"]),
    "a layer twice": (MemberError, _one_layer_twice),
    "two devices": (MemberError, lambda: [sgd_member(0), changed(_two_devices)]),
    "on meta": (MemberError, lambda: [sgd(mlp().to("meta"))]),
    "sparse buffer": (
        MemberError,
        lambda: [changed(lambda m: m.model.register_buffer("mask", torch.eye(3).to_sparse()))],
    ),
    "script": (MemberError, lambda: [sgd_member(0), sgd(torch.jit.script(mlp()))]),
    "jit trace": (MemberError, lambda: [sgd(torch.jit.trace(mlp(), EXAMPLE[0]))]),
    "script inside": (MemberError, lambda: [sgd(nn.Sequential(torch.jit.script(mlp()), nn.Tanh()))]),
    "data parallel": (MemberError, lambda: [sgd(nn.DataParallel(mlp()))]),
    "foreign parameter": (
        OptimizerError,
        lambda: [with_optimizer(lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(7))], lr=0.1))],
    ),
    "LBFGS": (OptimizerError, lambda: [sgd_member(0), with_optimizer(torch.optim.LBFGS)]),
    "own class": (OptimizerError, lambda: [sgd_member(0), with_optimizer(_MyAdam)]),
    "misshapen state": (OptimizerError, lambda: [changed(_misshapen_state)]),
    **{
        f"{name}={value}": (
            OptimizerError,
            lambda name=name, value=value, kind=kind: [with_setting(name, value, kind), sgd_member(0)],
        )
        for name, value, kind in [
            ("lr", -0.1, torch.optim.SGD),
            ("lr", math.inf, torch.optim.AdamW),
            ("lr", "fast", torch.optim.SGD),
            ("weight_decay", math.nan, torch.optim.Adam),
            ("momentum", -0.5, torch.optim.RMSprop),
            ("eps", -1e-8, torch.optim.Adam),
            ("alpha", math.nan, torch.optim.RMSprop),
            ("rho", 1.5, torch.optim.Adadelta),
            ("lr_decay", -0.1, torch.optim.Adagrad),
            ("betas", (1.0, 0.99), torch.optim.Adam),
            ("betas", (0.9, math.nan), torch.optim.Adam),
            ("differentiable", True, torch.optim.SGD),
        ]
    },
}


@pytest.mark.filterwarnings("ignore")  # torch would rather have no more scripts
@pytest.mark.parametrize("kind", BAD_MEMBERS)
def test_members(kind: str) -> None:
    error, make = BAD_MEMBERS[kind]
    refused(error, members=make())


def test_a_model_that_does_not_know_its_shapes_yet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them experimental
        bad = sgd(nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)).double())
    with pytest.raises(MemberError):
        Fleet([bad], mse, EXAMPLE)
    bad.model(EXAMPLE[0])
    Fleet([bad], mse, EXAMPLE).step(EXAMPLE)


def test_names_of_refused_and_unnamed_members() -> None:
    """The name decides a member's random draws: a failed attempt leaves none behind, and none clash."""
    unnamed, bad = sgd_member(0), with_setting("lr", -1.0)
    unnamed.name = bad.name = None
    refused(OptimizerError, members=[unnamed, bad])
    assert (unnamed.name, bad.name) == (None, None)
    fleet = Fleet([sgd_member(1, "member-1"), unnamed], mse, EXAMPLE)
    assert fleet.names[0] == "member-1"
    assert len(set(fleet.names)) == 2


_OTHER = nn.Parameter(torch.ones((), dtype=torch.float64))

LOSSES: dict[str, Callable[..., Any]] = {
    "vector": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1),
    "integer": lambda model, batch: model(batch[0]).argmax(),
    "detached": lambda model, batch: model(batch[0]).detach().sum(),
    "of the data": lambda model, batch: batch[1].mean(),
    "of another parameter": lambda model, batch: (_OTHER * batch[0]).mean(),
    "number": lambda model, batch: 1.0,
    "nothing": lambda model, batch: None,
    "metric of text": lambda model, batch: (mse(model, batch), {"note": "fine"}),
    "metric of a number": lambda model, batch: (mse(model, batch), {"size": 5}),
    "metric named loss": lambda model, batch: (mse(model, batch), {"loss": mse(model, batch)}),
    "metric named finite": lambda model, batch: (mse(model, batch), {"finite": mse(model, batch)}),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses(kind: str) -> None:
    refused(LossError, loss=LOSSES[kind])
    if kind == "vector":
        error = refused(LossError, members=[sgd_member(0), sgd_member(1, "bad", loss=LOSSES[kind])])
        assert any("'bad'" in note for note in error.__notes__)


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (ConfigError, {"precision": "fp8"}),
        (ConfigError, {"precision": ["fp32"]}),
        (ConfigError, {"data": None}),
        (ConfigError, {"accumulate": 0}),
        (ConfigError, {"accumulate": 1.5}),
        (ConfigError, {"accumulate": True}),
        (ConfigError, {"deterministic": "yes"}),
        (ConfigError, {"engine": "warp"}),
        (ConfigError, {"device": "tpu"}),
        (ConfigError, {"device": "meta"}),
        (ConfigError, {"device": 3.5}),
        (ConfigError, {"loss": None}),
        (ConfigError, {"loss": 0.5}),
        (BatchError, {"example_batch": None}),
        (BatchError, {"example_batch": {"x": 1}}),
        (BatchError, {"example_batch": (EXAMPLE, torch.eye(3).to_sparse())}),
        (
            BatchError,
            {
                "example_batch": torch.nested.nested_tensor(
                    [torch.zeros(2), torch.zeros(3)], layout=torch.jagged
                )
            },
        ),
        (
            BatchError,
            {"example_batch": [leaf.expand(3, *leaf.shape) for leaf in EXAMPLE], "data": "per_member"},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_settings_of_a_fleet(error: type[TrainmuxError], settings: dict[str, Any]) -> None:
    refused(error, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there() -> None:
    refused(ConfigError, device="cuda")


# ---- models that cannot be traced ----------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()


class ReadsItem(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x.sum().item()  # reason: _local_scalar_dense


class Branches(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)  # reason: is_nonzero


class Selects(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x[:, 0] > 0])  # reason: nonzero


class Reshapes(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(7, 7))  # reason: a bug


class Chooses(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # reason: takes functions


class CastsItself(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()).double()  # reason: another dtype


@pytest.mark.parametrize("kind", [ReadsItem, Branches, Selects, Reshapes, Chooses, CastsItself])
def test_untraceable_models(kind: type[nn.Module]) -> None:
    """The member and the line are named."""
    members = [sgd_member(0), sgd(kind())]
    error = refused(
        TraceError, members=members, loss=lambda m, batch: m(batch[0]).square().mean(), precision="fp64"
    )
    assert isinstance(error, TraceError)
    assert any("'bad'" in note for note in error.__notes__)
    if error.location is not None:
        file, line = error.location.removesuffix(" in forward").rsplit(":", 1)
        assert "# reason:" in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    else:
        assert kind is CastsItself
    if kind is CastsItself:  # held in its own dtype it trains
        assert torch.isfinite(Fleet([members[1]], mse, EXAMPLE).step(EXAMPLE)).all()


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("fleet._build.build_step", FusionError),
        ("fleet._build.fuse", FusionError),
        ("tracing._joint.draw_from_counters", TraceError),
    ],
)
def test_a_failure_of_our_own_is_typed_and_keeps_its_cause(
    monkeypatch: pytest.MonkeyPatch, stage: str, error: type[TrainmuxError]
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Node x was invalid, but is output")

    def loss(model: nn.Module, batch: Any) -> Tensor:  # nobody has traced this one
        return mse(model, batch) * len(stage)

    monkeypatch.setattr(f"trainmux.{stage}", fails)
    assert isinstance(refused(error, loss=loss).__cause__, AssertionError)


# ---- calls of a fleet that trains ----------------------------------------------------------------------


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
    options.setdefault("scheduler", lr_scheduler.StepLR(optimizer, 2, 0.7))
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
        assert_same_states(states_of(self.fleet), states_of(self.control))
        for one, other in zip(self.fleet.members, self.control.members, strict=True):
            assert repr(one.optimizer.param_groups) == repr(other.optimizer.param_groups)
            assert one.scheduler.state_dict() == other.scheduler.state_dict()
        assert [group.width for group in self.fleet.summary()] == [2]

    @contextmanager
    def refuses(self, error: type[TrainmuxError]) -> Iterator[None]:
        """The block must raise ``error`` and change nothing."""
        self.is_clean = False
        with pytest.raises(error) as caught:
            yield
        assert type(caught.value) is error
        self.check()
        self.is_clean = True


_PAIRS: list[Pair] = []


@pytest.fixture
def pair() -> Pair:
    """One pair serves all tests, until one of them finds it changed."""
    if not _PAIRS or not _PAIRS[-1].is_clean:
        _PAIRS.append(Pair())
    return _PAIRS[-1]


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

BAD_METRICS: dict[str, Callable[..., Any]] = {
    "vector": lambda model, batch: {"rows": model(batch["x"]).mean(1)},
    "number": lambda model, batch: {"size": 3},
    "empty": lambda model, batch: {},
    "float": lambda model, batch: 0.5,
}


def _is_there(fleet: Fleet, name: str = "new") -> Member:
    model = fleet.members[0].model
    return Member(model, torch.optim.Adam(model.parameters(), lr=0.1), name)


BAD_CALLS: dict[str, tuple[type[TrainmuxError], Callable[[Fleet], object]]] = {
    **{f"step {kind}": (BatchError, lambda f, bad=bad: f.step(bad)) for kind, bad in BAD_BATCHES.items()},
    **{
        f"evaluate {kind}": (BatchError, lambda f, bad=bad: f.evaluate([bad]))
        for kind, bad in BAD_BATCHES.items()
        if bad is not None
    },
    **{
        f"metric {kind}": (LossError, lambda f, bad=bad: f.evaluate([batch()], bad))
        for kind, bad in BAD_METRICS.items()
    },
    "step with other features": (TraceError, lambda f: f.step(batch(x=torch.ones(5, 4).double()))),
    "overrides": (BatchError, lambda f: f.step(batch(), {"m0": batch(), "who": batch()})),
    "evaluate nothing": (BatchError, lambda f: f.evaluate([])),
    "drop nobody": (MemberError, lambda f: f.drop("m7")),
    "stop nobody": (MemberError, lambda f: f.stop("m7")),
    "refresh nobody": (MemberError, lambda f: f.refresh("m7")),
    "replace nobody": (MemberError, lambda f: f.replace("m7", member(5, "new"))),
    "add a name twice": (MemberError, lambda f: f.add(member(5, "m1"))),
    "replace by a name twice": (MemberError, lambda f: f.replace("m0", member(5, "m1"))),
    "add a member twice": (MemberError, lambda f: f.add(f.members[0])),
    "replace by a member": (MemberError, lambda f: f.replace("m1", f.members[0])),
    "add a model twice": (MemberError, lambda f: f.add(_is_there(f))),
    "replace by a model": (MemberError, lambda f: f.replace("m1", _is_there(f))),
    "add no member": (MemberError, lambda f: f.add(nn.Linear(3, 2))),  # type: ignore[arg-type]
    "replace by no member": (MemberError, lambda f: f.replace("m0", nn.Linear(3, 2))),  # type: ignore[arg-type]
    "copy": (FleetError, copy.copy),
    "deepcopy": (FleetError, copy.deepcopy),
    "pickle": (FleetError, pickle.dumps),
    "use no plan": (PlanError, lambda f: f.use("x")),  # type: ignore[arg-type]
    "restore nothing": (CheckpointError, lambda f: f.restore("nowhere")),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_calls(pair: Pair, kind: str) -> None:
    error, call = BAD_CALLS[kind]
    with pair.refuses(error):
        call(pair.fleet)


# ---- newcomers -----------------------------------------------------------------------------------------


def untraceable() -> Member:
    return member(5, "new", loss=lambda model, batch: model(batch["x"]).mean() * batch["y"].sum().item())


def vector_loss() -> Member:
    return member(5, "new", loss=lambda model, batch: model(batch["x"]).mean(1))


def uneven_steps() -> Member:
    """Torch itself allows parameters of one group to have taken different numbers of steps."""
    new = member(5, "new")
    for parameter in list(new.model.parameters())[1:]:
        parameter.grad = torch.ones_like(parameter)
    new.optimizer.step()
    new.optimizer.zero_grad()
    return new


NEWCOMERS: dict[str, tuple[type[TrainmuxError], Callable[[], Member]]] = {
    "untraceable": (TraceError, untraceable),
    "vector loss": (LossError, vector_loss),
    "uneven steps": (OptimizerError, uneven_steps),
    **{
        kind: (BAD_MEMBERS[kind][0], lambda make=BAD_MEMBERS[kind][1]: make()[-1])
        for kind in ("two devices", "foreign parameter", "LBFGS", "misshapen state", "data parallel")
    },
}


@pytest.mark.parametrize("kind", NEWCOMERS)
def test_newcomers(pair: Pair, kind: str) -> None:
    error, make = NEWCOMERS[kind]
    new = make()
    before = None if kind == "two devices" else state_of(new)
    with pair.refuses(error):
        pair.fleet.replace("m0", new)
    new.name = None
    with pair.refuses(error):
        pair.fleet.add(new)
    assert new.name is None
    if before is not None:
        assert_same(state_of(new), before)


# ---- models that changed while they were in the fleet --------------------------------------------------


@contextmanager
def changed_shape(model: nn.Module) -> Iterator[None]:
    layer = model[4]
    model[4] = nn.Linear(4, 3, dtype=torch.float64)
    yield
    model[4] = layer


@contextmanager
def lost_buffer(model: nn.Module) -> Iterator[None]:
    mean = model[1].running_mean
    model[1].running_mean = None
    yield
    model[1].running_mean = mean


@pytest.mark.parametrize("change", [changed_shape, lost_buffer])
@pytest.mark.parametrize("call", ["sync", "drop", "replace"])
def test_write_back_into_a_changed_model(pair: Pair, call: str, change: Callable[..., Any]) -> None:
    fleet = pair.fleet
    pair.check()
    before = state_of(fleet.members[0])
    for one in (fleet, pair.control):  # something new to write back
        one.step(batch(99))
    arguments: list[Any] = {"sync": [], "drop": ["m1"], "replace": ["m1", member(5, "new")]}[call]
    with pair.refuses(MemberError):
        with change(fleet.members[1].model), pytest.raises(MemberError) as caught:
            getattr(fleet, call)(*arguments)
        # Nothing has been written to any member, the ones that did not change included.
        assert_same(state_of(fleet.members[0]), before)
        raise caught.value


# ---- checkpoints of other fleets -----------------------------------------------------------------------


def wider(seed: int) -> nn.Module:
    """Another architecture with the same names."""
    model = bn_mlp(seed, dropout=0.4)
    model[0] = nn.Linear(3, 6, bias=False, dtype=torch.float64)
    model[1] = nn.BatchNorm1d(6, affine=False, dtype=torch.float64)
    model[4] = nn.Linear(6, 2, dtype=torch.float64)
    return model


def small(i: int) -> nn.Module:
    """For checkpoints that are refused before anyone looks at their tensors."""
    return nn.Linear(3, 2, dtype=torch.float64)


OTHER_FLEETS: dict[str, dict[str, Any]] = {
    "names": {"model": small, "names": ("m0", "m2")},
    "architecture": {"model": wider},
    "precision": {"model": small, "settings": {"precision": "bf16"}},
    "accumulate": {"model": small, "settings": {"accumulate": 2}},
    "optimizer": {"model": small, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
    "no scheduler": {"model": small, "scheduler": lambda o: None},
    "scheduler": {"scheduler": lambda o: lr_scheduler.CosineAnnealingLR(o, 5)},
    "amsgrad": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True)},
    "param groups": {"optimizer": lambda p: torch.optim.Adam([{"params": [q]} for q in p], lr=0.1)},
}


@pytest.mark.parametrize("kind", OTHER_FLEETS)
def test_checkpoints_of_other_fleets(pair: Pair, tmp_path: Path, kind: str) -> None:
    other = {
        "names": ("m0", "m1"),
        "model": lambda i: bn_mlp(i, dropout=0.4),
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.1),
        "scheduler": lambda o: lr_scheduler.StepLR(o, 2),
        "settings": {},
        **OTHER_FLEETS[kind],
    }
    members = []
    for i, name in enumerate(other["names"]):
        model = other["model"](i)
        optimizer = other["optimizer"](model.parameters())
        members.append(Member(model, optimizer, name, scheduler=other["scheduler"](optimizer)))
    Fleet(members, loss, batch(), **other["settings"]).save(tmp_path)
    with pair.refuses(CheckpointError):
        pair.fleet.restore(tmp_path)


def test_momentum_that_the_fleet_has_not(tmp_path: Path) -> None:
    """A checkpoint with more optimizer state than the fleet can hold is another fleet's."""

    def make(momentum: float) -> Fleet:
        model = bn_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        return Fleet([Member(model, optimizer, "a")], loss, batch())

    rich, plain = make(0.9), make(0.0)
    for fleet in (rich, plain):
        fleet.step(batch())
    rich.save(tmp_path)
    before = states_of(plain)
    with pytest.raises(CheckpointError):
        plain.restore(tmp_path)
    assert_same_states(states_of(plain), before)
    assert plain.members[0].optimizer.param_groups[0]["momentum"] == 0.0
    plain.step(batch())


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
    model = bn_mlp(1)
    second = Member(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "m1")
    fleet = Fleet([member(0, scheduler=None), second], loss, batch())
    fleet.step(batch())
    before = states_of(fleet)
    second.optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(OptimizerError):
        fleet.step(batch(1))
    second.optimizer.param_groups[0]["momentum"] = 0.9
    assert_same_states(states_of(fleet), before)


def test_an_empty_fleet_has_nothing_to_step() -> None:
    fleet = Fleet([sgd_member(0)], mse, EXAMPLE)
    fleet.drop("m0")
    for call in (lambda: fleet.step(EXAMPLE), lambda: fleet.evaluate([EXAMPLE]), lambda: fleet.drop("m0")):
        with pytest.raises(MemberError):
            call()
    fleet.sync()
    assert fleet.names == ()
    fleet.add(sgd_member(1))
    assert_trains_alone(fleet, lambda i: sgd_member(1), [vectors(seed) for seed in range(2)])
