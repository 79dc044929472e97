"""What a fleet refuses: a typed error, and everything as if the call had never been made."""

from __future__ import annotations

import copy
import math
import pickle
import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence import same_bits
from fleet_cases import (
    EXAMPLE,
    assert_close,
    assert_same,
    assert_same_fleets,
    assert_same_states,
    assert_trains_alone,
    bn_mlp,
    mlp,
    mse,
    sgd_member,
    state_of,
    states_of,
    train_alone,
    vectors,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainmux import Device, EarlyStopping, Fleet, Job, Member, colocate
from trainmux.errors import (
    BatchError,
    BudgetError,
    CheckpointError,
    ConfigError,
    FleetError,
    FusionError,
    LossError,
    MemberChangedError,
    MemberError,
    OptimizerError,
    PlanError,
    TraceError,
    TrainmuxError,
    TrainmuxWarning,
)

pytestmark = pytest.mark.usefixtures("built_once")

# ---- making a member -----------------------------------------------------------------------------------


def one_by_one(table: dict[str, list[Any]]) -> list[Any]:
    """Pairs of a setting and a bad value of it."""
    return [pytest.param(name, value, id=f"{name} {value}"[:40]) for name in table for value in table[name]]


BAD_SETTINGS: dict[str, list[Any]] = {
    "model": ["mlp"],
    "optimizer": [torch.optim.SGD],
    "name": ["", 3],
    "seed": [1.5, True, 2**63],
    "clip_norm": [0.0, math.nan],
    "clip_value": [-0.5, "1"],
    "scheduler_interval": ["batch"],
    "loss": [3.0],
    "scheduler": ["cosine", lr_scheduler.StepLR(sgd_member(1).optimizer, 3)],  # of another optimizer
}


@pytest.mark.parametrize(("name", "value"), one_by_one(BAD_SETTINGS))
def test_settings_of_a_member(name: str, value: Any) -> None:
    model = mlp()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), name: value}
    with pytest.raises(MemberError, match=name):
        Member(**given)


# ---- making a fleet ------------------------------------------------------------------------------------


def refused(error: type[TrainmuxError], **fleet: Any) -> TrainmuxError:
    """Make a fleet that must be refused and must leave its members, and all else, alone."""
    settings: dict[str, Any] = {"members": [sgd_member(0)], "loss": mse, "example_batch": EXAMPLE, **fleet}
    members = [member for member in settings["members"] if isinstance(member, Member)]

    def states() -> list[dict[str, Tensor]]:
        on_host = (m for m in members if not any(p.is_meta for p in m.model.parameters()))
        return [{key: value.to_dense() for key, value in state_of(m).items()} for m in on_host]

    def the_rest() -> str:
        generators = (random.getstate(), np.random.get_state(), OWN_RANDOM.getstate())
        own = (OWN_NUMPY.bit_generator.state, NOTES, SCALE)
        attributes = [getattr(member.model, name, None) for member in members for name in STATEFUL]
        return repr((generators, own, attributes, [member.optimizer.param_groups for member in members]))

    before, rest = states(), the_rest()
    with pytest.raises(error) as caught:
        Fleet(**settings)
    assert type(caught.value) is error
    for old, new in zip(before, states(), strict=True):
        assert_same(new, old)
    assert the_rest() == rest
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


def _shared_memory(member: Member) -> None:
    member.model[2].bias.data = member.model[0].weight.data[0, :2]


def _misshapen_state(member: Member) -> None:
    member.optimizer.state[member.model[0].weight]["momentum_buffer"] = torch.zeros(7, dtype=torch.float64)


def patched_step(model: Any, optimizer: Any) -> None:
    def step(self: Any, closure: Any = None) -> None:
        torch.optim.SGD.step(self, closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.9)

    optimizer.step = types.MethodType(step, optimizer)


def each(tensors: Iterable[Tensor], change: Callable[[Tensor], object]) -> None:
    for tensor in tensors:
        change(tensor)


AROUND_THE_UPDATE: dict[str, Callable[[Any, Any], object]] = {
    "hook after accumulation": lambda model, optimizer: model[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: each([parameter.grad], lambda gradient: gradient.mul_(0.5))
    ),
    "hook before the step": lambda model, optimizer: optimizer.register_step_pre_hook(
        lambda *_: each(model.parameters(), lambda parameter: parameter.grad.sign_())  # type: ignore[union-attr]
    ),
    "hook after the step": lambda model, optimizer: optimizer.register_step_post_hook(
        lambda *_: each(model.parameters(), lambda parameter: parameter.data.clamp_(-0.05, 0.05))
    ),
    "patched step": patched_step,
}


def hooked(i: int, install: Callable[[Any, Any], object]) -> Member:
    member = sgd_member(i)
    install(member.model, member.optimizer)
    return member


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
    "two parameters in the same memory": (MemberError, lambda: [changed(_shared_memory)]),
    **{
        kind: (OptimizerError, lambda install=install: [hooked(0, install)])
        for kind, install in AROUND_THE_UPDATE.items()
    },
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


def test_a_refused_fleet_leaves_no_names_behind() -> None:
    """The name decides a member's random draws."""
    unnamed, bad = sgd_member(0), with_setting("lr", -1.0)
    unnamed.name = bad.name = None
    refused(OptimizerError, members=[unnamed, bad])
    assert (unnamed.name, bad.name) == (None, None)


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


def test_hooks_that_come_later_or_from_elsewhere() -> None:
    member = sgd_member(0)
    fleet = Fleet([member], mse, EXAMPLE)
    fleet.step(EXAMPLE)
    AROUND_THE_UPDATE["hook after the step"](member.model, member.optimizer)
    with pytest.raises(MemberChangedError):
        fleet.step(EXAMPLE)
    handle = register_optimizer_step_post_hook(lambda *arguments: None)
    try:
        refused(OptimizerError, members=[sgd_member(1)])
    finally:
        handle.remove()


def test_jobs_with_code_around_the_update_run_eagerly() -> None:
    """Each with its own hook, beside one that is traced."""
    hooks = (*AROUND_THE_UPDATE.values(), lambda model, optimizer: None)
    members = [hooked(i, install) for i, install in enumerate(hooks)]
    jobs = [Job(m.name or "", m.model, m.optimizer, mse, [EXAMPLE], steps=3) for m in members]
    with pytest.warns(TrainmuxWarning, match="runs eagerly"):
        colocate(jobs, budget="64MiB").run()
    for i, install in enumerate(hooks):
        alone = hooked(i, install)
        train_alone(alone, [EXAMPLE] * 3)
        assert_close(state_of(members[i]), state_of(alone))


BAD_CONFIGURATIONS: dict[str, list[Any]] = {
    "precision": ["fp8", ["fp32"]],
    "data": [None],
    "accumulate": [0, 1.5, True],
    "deterministic": ["yes"],
    "engine": ["warp"],
    "device": ["tpu", "meta", 3.5],
    "loss": [None, 0.5],
}


@pytest.mark.parametrize(("name", "value"), one_by_one(BAD_CONFIGURATIONS))
def test_settings_of_a_fleet(name: str, value: Any) -> None:
    refused(ConfigError, **{name: value})


def test_example_batches() -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    for bad in (None, {"x": 1}, (EXAMPLE, torch.eye(3).to_sparse()), ragged):
        refused(BatchError, example_batch=bad)
    refused(BatchError, example_batch=[leaf.expand(3, *leaf.shape) for leaf in EXAMPLE], data="per_member")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there() -> None:
    refused(ConfigError, device="cuda")


# ---- code that cannot be traced, or that changes something ---------------------------------------------

SCALE = torch.zeros(2, dtype=torch.float64)
NOTES: list[Any] = []
OWN_RANDOM = random.Random(3)
OWN_NUMPY = np.random.default_rng(3)
STATEFUL = ("calls", "hidden", "initialised", "shift", "cached", "centre")
"""Attributes that the models below change."""


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()


class ReadsItem(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x.sum().item()  # refused


class Chooses(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # refused


class Packs(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(3, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([4]), batch_first=True)  # refused
        return self.cells(packed)[0].data  # type: ignore[no-any-return]


class CastsItself(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()).double()  # refused


class Counts(Wrapped):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # refused
        return self.layer(x) * min(1.0, self.calls / 5)


class RemembersState(Wrapped):
    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + (0 if self.hidden is None else self.hidden)
        self.hidden = y.mean(0).detach()  # refused
        return y


class InitialisesFromData(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.initialised = False
        self.register_buffer("shift", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not self.initialised:
            self.shift = y.detach().mean(0)
            self.initialised = True  # refused
        return y - self.shift


class CachesAWeight(Wrapped):
    """Keeps something computed from a parameter: stale after the first update."""

    cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = self.layer[0].weight.detach()[:2] * 2  # refused
        return self.layer(x) + x @ self.cached.t()


MODELS = [ReadsItem, Chooses, Packs, CastsItself, Counts, RemembersState, InitialisesFromData, CachesAWeight]


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch[0])
    return found.square().mean()


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_cannot_be_traced(kind: type[nn.Module]) -> None:
    """The member and the line are named."""
    members = [sgd_member(0), sgd(kind())]
    error = refused(TraceError, members=members, loss=mean_square, precision="fp64")
    assert isinstance(error, TraceError)
    assert any("'bad'" in note for note in error.__notes__)
    file, line = str(error.location).split(" in ")[0].rsplit(":", 1)
    assert "# refused" in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    if kind is CastsItself:  # held in its own dtype it trains
        assert torch.isfinite(Fleet([members[1]], mse, EXAMPLE).step(EXAMPLE)).all()


def ctc(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])[:, None].log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(1, 2, dtype=torch.int64), torch.tensor([5]), torch.tensor([2]))


UNTRACEABLE_LOSSES: dict[str, Callable[..., Any]] = {
    "ctc": ctc,
    "checks its values": lambda m, b: F.gaussian_nll_loss(m(b[0])[:, 0], b[1][:, 0], m(b[0])[:, 1] ** 2),
    "draws from Python": lambda m, b: mse(m, b) * random.random(),
    "draws from NumPy": lambda m, b: mse(m, (np.random.beta(0.4, 0.4) * b[0], b[1])),
    "draws from its own": lambda m, b: mse(m, b) * OWN_RANDOM.random(),
    "draws from its own NumPy": lambda m, b: mse(m, b) * float(OWN_NUMPY.random()),
    "grows a list": lambda m, b: (mse(m, b), NOTES.append(m))[0],
    "changes a tensor": lambda m, b: mse(m, b) + SCALE.add_(1).sum(),
}


@pytest.mark.parametrize("kind", UNTRACEABLE_LOSSES)
def test_losses_that_cannot_be_traced(kind: str) -> None:
    """The line is named."""
    error = refused(TraceError, loss=UNTRACEABLE_LOSSES[kind])
    assert Path(__file__).name in str(error)


def test_a_failure_of_our_own_is_typed_and_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Node x was invalid, but is output")

    monkeypatch.setattr("trainmux.fleet._build.fuse", fails)
    assert isinstance(refused(FusionError).__cause__, AssertionError)


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
        got, expected = (fleet.step(batch(self.num_checks)) for fleet in (self.fleet, self.control))
        assert same_bits(got, expected)
        assert_same_fleets(self.fleet, self.control)
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


FIT: dict[str, Any] = {"loader": [batch()], "progress": False}
BAD_FITS: dict[str, list[Any]] = {
    "epochs": [None, 0, True],
    "steps": [0, -1, 2.0],
    "log_every": [0],
    "validate_every": [2],
    "metric_fn": [print],
    "validation": [iter([])],
    "loader": [iter([])],
    "callbacks": [[EarlyStopping], [print]],
    "resume": ["perhaps", "must", []],
    "progress": ["loud"],
    "member_loaders": [{"who": [batch()]}],
}

TOY = Device("toy", 1 << 30, 1 << 32, 8, 1e12, 1e12, 1e11, 1e10, 1e10)
BAD_PLANS: list[tuple[type[TrainmuxError], dict[str, Any]]] = [
    *(
        (BudgetError, {"budget": budget, "device": TOY})
        for budget in ("-1", "0", "20 GiBs", "", "much", "2GiB", -5, 0, True, 1.5)
    ),
    (ConfigError, {"budget": "1GiB", "policy": "best", "device": TOY}),
    (ConfigError, {"budget": "1GiB", "device": "b300"}),
    *((ConfigError, {"budget": "1GiB", "device": TOY, "num_members": wrong}) for wrong in (0, True, 1.5)),
    (ConfigError, {"budget": "1GiB", "num_members": 5}),
    *((ConfigError, {"budget": "1GiB", "device": TOY, "time_limit": wrong}) for wrong in (-1, "long")),
]


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
    "fit by epochs and by steps": (ConfigError, lambda f: f.fit([batch()], epochs=1, steps=1)),
    "copy": (FleetError, copy.copy),
    "deepcopy": (FleetError, copy.deepcopy),
    "pickle": (FleetError, pickle.dumps),
    "use no plan": (PlanError, lambda f: f.use("x")),  # type: ignore[arg-type]
    "restore nothing": (CheckpointError, lambda f: f.restore("nowhere")),
    **{
        f"fit {name} {number}": (
            ConfigError,
            lambda f, name=name, value=value: f.fit(
                **{**FIT, "epochs": {"steps": None, "loader": 2}.get(name, 1), name: value}
            ),
        )
        for name, values in BAD_FITS.items()
        for number, value in enumerate(values)
    },
    **{
        f"plan {arguments}": (error, lambda f, arguments=arguments: f.plan(**arguments))
        for error, arguments in BAD_PLANS
    },
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


@pytest.mark.parametrize(
    ("call", "change"), [("sync", changed_shape), ("drop", lost_buffer), ("replace", changed_shape)]
)
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

    rich, plain, control = make(0.9), make(0.0), make(0.0)
    for fleet in (rich, plain, control):
        fleet.step(batch())
    rich.save(tmp_path)
    with pytest.raises(CheckpointError):
        plain.restore(tmp_path)
    assert_same_fleets(plain, control)


# ---- numbers that go wrong later -----------------------------------------------------------------------


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
