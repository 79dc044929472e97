"""What a fleet refuses: a typed error, and everything as if the call had never been made."""

from __future__ import annotations

import copy
import math
import pickle
import random
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
    BATCHES,
    EXAMPLE,
    SCHEDULERS,
    TOY,
    adam,
    assert_close,
    assert_same,
    assert_same_fleets,
    assert_trains_alone,
    bn_mlp,
    coded,
    dropout_member,
    mlp,
    mse,
    mse_with_metrics,
    scheduled,
    sgd,
    sgd_member,
    state_of,
    train_alone,
    vectors,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainmux as tm
from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")

# ---- making a member -----------------------------------------------------------------------------------


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """Every setting with each bad value of it."""
    return [(name, value) for name in table for value in table[name]]


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


@pytest.mark.parametrize(("name", "value"), pairs(BAD_SETTINGS))
def test_settings_of_a_member(name: str, value: Any) -> None:
    model = mlp()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), name: value}
    with pytest.raises(tm.MemberError, match=name):
        Member(**given)


# ---- making a fleet ------------------------------------------------------------------------------------


def refused(error: type[tm.TrainmuxError], **fleet: Any) -> tm.TrainmuxError:
    """Make a fleet that must be refused and must leave its members, and all else, alone."""
    settings: dict[str, Any] = {"members": [sgd_member(0)], "loss": mse, "example_batch": EXAMPLE, **fleet}
    members = [member for member in settings["members"] if isinstance(member, Member)]

    def everything() -> str:
        """All that could change: lists of numbers are written with every digit."""
        on_host = (m for m in members if not any(p.is_meta for p in m.model.parameters()))
        states = [{name: value.to_dense().tolist() for name, value in state_of(m).items()} for m in on_host]
        generators = (random.getstate(), np.random.get_state(), OWN_RANDOM.getstate())
        own = (OWN_NUMPY.bit_generator.state, NOTES, SCALE)
        attributes = [
            (name, value) for m in members for name, value in vars(m.model).items() if name[0] != "_"
        ]
        settings = [(m.name, m.optimizer.param_groups) for m in members]
        return repr((states, generators, own, attributes, settings))

    before = everything()
    with pytest.raises(error) as caught:
        Fleet(**settings)
    assert type(caught.value) is error
    assert everything() == before
    return caught.value


def told(error: BaseException) -> str:
    """The message and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def with_optimizer(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Member:
    """A member whose optimizer then got values that torch's own constructor would not take."""
    model = mlp()
    optimizer = make(list(model.parameters()))
    optimizer.param_groups[0].update(settings)
    return Member(model, optimizer, "bad")


def changed(change: Callable[[Member], object], i: int = 0) -> Member:
    bad = sgd_member(i, "bad" if i == 0 else None)
    change(bad)
    return bad


def unnamed() -> Member:
    """A name that a refused fleet left behind would decide its random draws."""
    return changed(lambda member: setattr(member, "name", None))


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


def halve(*tensors: Any) -> None:
    for tensor in tensors:
        tensor.data.mul_(0.5)


def patch_step(member: Member) -> None:
    step = member.optimizer.step

    def halving(*given: Any) -> None:
        step(*given)
        halve(*member.model.parameters())

    member.optimizer.step = halving  # type: ignore[assignment, method-assign]


AROUND_THE_UPDATE: dict[str, Callable[[Member], object]] = {
    "hook after accumulation": lambda m: m.model[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: halve(parameter.grad)
    ),
    "hook before the step": lambda m: m.optimizer.register_step_pre_hook(
        lambda *_: halve(*(parameter.grad for parameter in m.model.parameters()))
    ),
    "hook after the step": lambda m: m.optimizer.register_step_post_hook(
        lambda *_: halve(*m.model.parameters())
    ),
    "patched step": patch_step,
}


BAD_MEMBERS: dict[str, tuple[type[tm.TrainmuxError], Callable[[], list[Any]]]] = {
    "none": (tm.MemberError, list),
    "no member": (tm.MemberError, lambda: [sgd_member(0), nn.Linear(3, 2)]),
    "a name twice": (tm.MemberError, lambda: [sgd_member(i, "twin") for i in range(2)]),
    "a member twice": (tm.MemberError, lambda: [sgd_member(0)] * 2),
    "a model twice": (tm.MemberError, lambda: [sgd(model, name) for model in [mlp()] for name in "ab"]),
    "a layer twice": (tm.MemberError, _one_layer_twice),
    "two devices": (tm.MemberError, lambda: [sgd_member(0), changed(_two_devices)]),
    "on meta": (tm.MemberError, lambda: [sgd(mlp().to("meta"))]),
    "sparse buffer": (
        tm.MemberError,
        lambda: [changed(lambda m: m.model.register_buffer("mask", torch.eye(3).to_sparse()))],
    ),
    "script": (tm.MemberError, lambda: [sgd_member(0), sgd(torch.jit.script(mlp()))]),
    "jit trace": (tm.MemberError, lambda: [sgd(torch.jit.trace(mlp(), EXAMPLE[0]))]),
    "script inside": (tm.MemberError, lambda: [sgd(nn.Sequential(torch.jit.script(mlp()), nn.Tanh()))]),
    "data parallel": (tm.MemberError, lambda: [sgd(nn.DataParallel(mlp()))]),
    "foreign parameter": (
        tm.OptimizerError,
        lambda: [with_optimizer(lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(7))]))],
    ),
    "LBFGS": (tm.OptimizerError, lambda: [sgd_member(0), with_optimizer(torch.optim.LBFGS)]),
    "two parameters in the same memory": (tm.MemberError, lambda: [changed(_shared_memory)]),
    **{
        kind: (tm.OptimizerError, lambda install=install: [changed(install)])
        for kind, install in AROUND_THE_UPDATE.items()
    },
    "misshapen state": (tm.OptimizerError, lambda: [changed(_misshapen_state)]),
    **{
        f"{name}={value}": (
            tm.OptimizerError,
            lambda name=name, value=value, kind=kind: [unnamed(), with_optimizer(kind, **{name: value})],
        )
        for name, value, kind in [
            ("lr", "fast", torch.optim.SGD),
            ("betas", (0.9, math.nan), torch.optim.Adam),
            ("differentiable", True, torch.optim.SGD),
        ]
    },
}


def test_a_model_that_does_not_know_its_shapes_yet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them experimental
        bad = sgd(nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)).double())
    with pytest.raises(tm.MemberError):
        Fleet([bad], mse, EXAMPLE)
    bad.model(EXAMPLE[0])
    Fleet([bad], mse, EXAMPLE).step(EXAMPLE)


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


def own_loss(kind: str) -> Member:
    return sgd_member(5, "bad", loss=LOSSES[kind])


def test_hooks_that_come_later_or_from_elsewhere() -> None:
    member = sgd_member(0)
    fleet = Fleet([member], mse, EXAMPLE)
    fleet.step(EXAMPLE)
    AROUND_THE_UPDATE["hook after the step"](member)
    with pytest.raises(tm.MemberChangedError):
        fleet.step(EXAMPLE)
    handle = register_optimizer_step_post_hook(lambda *arguments: None)
    try:
        refused(tm.OptimizerError, members=[sgd_member(1)])
    finally:
        handle.remove()


def test_jobs_with_code_around_the_update_run_eagerly() -> None:
    """Each with its own hook, beside one that is traced."""
    hooks = (*AROUND_THE_UPDATE.values(), lambda member: None)
    members = [changed(install, i) for i, install in enumerate(hooks)]
    jobs = [tm.Job(m.name or "", m.model, m.optimizer, mse, [EXAMPLE], steps=3) for m in members]
    with pytest.warns(tm.TrainmuxWarning, match="runs eagerly"):
        tm.colocate(jobs, budget="64MiB").run()
    for i, install in enumerate(hooks):
        alone = changed(install, i)
        train_alone(alone, [EXAMPLE] * 3)
        assert_close(state_of(members[i]), state_of(alone))


BAD_CONFIGURATIONS: dict[str, list[Any]] = {
    "precision": ["fp8", ["fp32"]],
    "data": [None],
    "accumulate": [0, 1.5, True],
    "deterministic": ["yes"],
    "engine": ["warp"],
    "device": ["tpu", "meta", 3.5, *([] if torch.cuda.is_available() else ["cuda"])],
    "loss": [None, 0.5],
}


BAD_EXAMPLES: list[dict[str, Any]] = [
    {"example_batch": None},
    {"example_batch": {"x": 1}},
    {"example_batch": (EXAMPLE, torch.eye(3).to_sparse())},
    {"example_batch": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)},
    {"example_batch": [leaf.expand(3, *leaf.shape) for leaf in EXAMPLE], "data": "per_member"},
]


# ---- code that cannot be traced, or that changes something ---------------------------------------------

SCALE = torch.zeros(2, dtype=torch.float64)
NOTES: list[Any] = []
OWN_RANDOM = random.Random(3)
OWN_NUMPY = np.random.default_rng(3)


def odd(code: Callable[..., Tensor]) -> nn.Module:
    """With all that the code below holds on to."""
    cells = nn.GRU(3, 2, batch_first=True, dtype=torch.float64)
    shift = torch.zeros(2, dtype=torch.float64)
    return coded(code, inner=nn.Linear(3, 2), cells=cells, shift=shift, calls=0, hidden=None, cached=None)


def chooses(model: Any, x: Tensor) -> Any:
    y = model.layer(x)
    return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # refused


def packs(model: Any, x: Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([5]), batch_first=True)  # refused
    return model.cells(packed)[0].data


def casts_itself(model: Any, x: Tensor) -> Any:
    return model.inner(x.float()).double()  # refused


def counts(model: Any, x: Tensor) -> Any:
    model.calls += 1  # refused
    return model.layer(x) * min(1.0, model.calls / 5)


def remembers_state(model: Any, x: Tensor) -> Any:
    y = model.layer(x) + (0 if model.hidden is None else model.hidden)
    model.hidden = y.mean(0).detach()  # refused
    return y


def initialises_from_data(model: Any, x: Tensor) -> Any:
    y = model.layer(x)
    if not model.calls:
        model.shift = y.detach().mean(0)
        model.calls = 1  # refused
    return y - model.shift


def caches_a_weight(model: Any, x: Tensor) -> Any:
    """Keeps something computed from a parameter: stale after the first update."""
    if model.cached is None:
        model.cached = model.layer[0].weight.detach()[:2] * 2  # refused
    return model.layer(x) + x @ model.cached.t()


CODE = [chooses, packs, casts_itself, counts, remembers_state, initialises_from_data, caches_a_weight]


@pytest.mark.parametrize("code", CODE)
def test_models_that_cannot_be_traced(code: Callable[..., Tensor]) -> None:
    """The member and the line are named."""
    members = [sgd_member(0), sgd(odd(code), "bad")]
    error = refused(tm.TraceError, members=members, precision="fp64")
    assert isinstance(error, tm.TraceError)
    assert "'bad'" in told(error)
    file, line = str(error.location).split(" in ")[0].rsplit(":", 1)
    assert "# refused" in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    if code is casts_itself:  # held in its own dtype it trains
        assert torch.isfinite(Fleet([members[1]], mse, EXAMPLE).step(EXAMPLE)).all()


def ctc(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])[:, None].log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(1, 2, dtype=torch.int64), torch.tensor([5]), torch.tensor([2]))


UNTRACEABLE: dict[str, Callable[..., Any]] = {
    "ctc": ctc,
    "checks its values": lambda m, b: F.gaussian_nll_loss(m(b[0])[:, 0], b[1][:, 0], m(b[0])[:, 1] ** 2),
    "draws from Python": lambda m, b: mse(m, b) * random.random(),
    "draws from NumPy": lambda m, b: mse(m, (np.random.beta(0.4, 0.4) * b[0], b[1])),
    "draws from its own": lambda m, b: mse(m, b) * OWN_RANDOM.random(),
    "draws from its own NumPy": lambda m, b: mse(m, b) * float(OWN_NUMPY.random()),
    "grows a list": lambda m, b: (mse(m, b), NOTES.append(m))[0],
    "changes a tensor": lambda m, b: mse(m, b) + SCALE.add_(1).sum(),
}


BAD_FLEETS: dict[str, tuple[type[tm.TrainmuxError], str, dict[str, Any]]] = {
    # The error, what it says beside others, and settings; members are made when they are needed.
    **{f"member: {kind}": (error, "", {"members": make}) for kind, (error, make) in BAD_MEMBERS.items()},
    **{f"loss: {kind}": (tm.LossError, "", {"loss": loss}) for kind, loss in LOSSES.items()},
    "own loss": (tm.LossError, "'bad'", {"members": lambda: [sgd_member(0), own_loss("vector")]}),
    **{f"{name} {value}": (tm.ConfigError, "", {name: value}) for name, value in pairs(BAD_CONFIGURATIONS)},
    **{f"example {number}": (tm.BatchError, "", bad) for number, bad in enumerate(BAD_EXAMPLES)},
    **{kind: (tm.TraceError, Path(__file__).name, {"loss": UNTRACEABLE[kind]}) for kind in UNTRACEABLE},
}


@pytest.mark.filterwarnings("ignore")  # torch would rather have no more scripts
@pytest.mark.parametrize("kind", BAD_FLEETS)
def test_fleets(kind: str) -> None:
    error, words, settings = BAD_FLEETS[kind]
    made = {name: value() if name == "members" else value for name, value in settings.items()}
    assert words in told(refused(error, **made))


def test_a_failure_of_our_own_is_typed_and_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Node x was invalid, but is output")

    monkeypatch.setattr("trainmux.fleet._build.fuse", fails)
    assert isinstance(refused(tm.FusionError).__cause__, AssertionError)


# ---- calls of a fleet that trains ----------------------------------------------------------------------


def member(i: int, name: str | None = None, **options: Any) -> Member:
    """Everything that a failed call could disturb: buffers, dropout, a schedule, optimizer state."""
    return scheduled(dropout_member(i, name, **options))


class Pair:
    """A fleet that sees bad calls, and a control that never does."""

    def __init__(self) -> None:
        self.fleet, self.control = (
            Fleet([member(i) for i in range(2)], mse_with_metrics, EXAMPLE, deterministic=True)
            for _ in range(2)
        )
        self.num_checks = 0
        self.check()

    def check(self) -> None:
        """Both still do the same, bit for bit."""
        self.num_checks += 1
        got, expected = (fleet.step(vectors(self.num_checks)) for fleet in (self.fleet, self.control))
        assert same_bits(got, expected)
        assert_same_fleets(self.fleet, self.control)
        assert [group.width for group in self.fleet.summary()] == [2]

    @contextmanager
    def refuses(self, error: type[tm.TrainmuxError]) -> Iterator[None]:
        """The block must raise ``error`` and change nothing."""
        with pytest.raises(error) as caught:
            yield
        assert type(caught.value) is error
        self.check()


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


X, Y = EXAMPLE

BAD_BATCHES: dict[str, Any] = {
    "number": 3,
    "missing": (X,),
    "dtype": (X.float(), Y),
    "constant": (X, "new"),
}

BAD_METRICS: dict[str, Callable[..., Any]] = {
    "vector": lambda model, batch: {"rows": model(batch[0]).mean(1)},
    "number": lambda model, batch: {"size": 3},
    "empty": lambda model, batch: {},
    "float": lambda model, batch: 0.5,
}


FIT: dict[str, Any] = {"loader": [EXAMPLE], "epochs": 1, "progress": False}
BAD_FITS: list[dict[str, Any]] = [
    *({"epochs": bad} for bad in (None, 0, True)),
    *({"epochs": None, "steps": bad} for bad in (0, -1, 2.0)),
    {"epochs": 1, "steps": 1},
    {"log_every": 0},
    {"validate_every": 2},
    {"metric_fn": print},
    {"validation": iter([])},
    {"loader": iter([]), "epochs": 2},
    *({"callbacks": [bad]} for bad in (tm.EarlyStopping, print)),
    *({"resume": bad} for bad in ("perhaps", "must", [])),
    {"progress": "loud"},
    {"member_loaders": {"who": [EXAMPLE]}},
]

PLAN: dict[str, Any] = {"budget": "1GiB", "device": TOY}
BAD_PLANS: list[dict[str, Any]] = [
    {"policy": "best"},
    {"device": "b300"},
    *({"num_members": bad} for bad in (0, True, 1.5)),
    {"device": None, "num_members": 5},
    *({"time_limit": bad} for bad in (-1, "long")),
]
BAD_BUDGETS: tuple[Any, ...] = ("much", "2GiB", -5)


def call(method: str, *given: Any, **named: Any) -> Callable[[Fleet], object]:
    return lambda fleet: getattr(fleet, method)(*given, **named)


BAD_CALLS: dict[str, tuple[type[tm.TrainmuxError], Callable[[Fleet], object]]] = {
    **{f"step {kind}": (tm.BatchError, call("step", bad)) for kind, bad in BAD_BATCHES.items()},
    **{f"evaluate {kind}": (tm.BatchError, call("evaluate", [bad])) for kind, bad in BAD_BATCHES.items()},
    **{
        f"metric {kind}": (tm.LossError, call("evaluate", [EXAMPLE], bad))
        for kind, bad in BAD_METRICS.items()
    },
    "step without a batch": (tm.BatchError, call("step", None)),
    "step with other features": (tm.TraceError, call("step", (torch.ones(5, 4).double(), Y))),
    "overrides": (tm.BatchError, call("step", EXAMPLE, {"m0": EXAMPLE, "who": EXAMPLE})),
    "evaluate nothing": (tm.BatchError, call("evaluate", [])),
    **{f"{what} nobody": (tm.MemberError, call(what, "m7")) for what in ("drop", "stop", "refresh")},
    "replace nobody": (tm.MemberError, lambda f: f.replace("m7", member(5, "new"))),
    "add a name twice": (tm.MemberError, lambda f: f.add(member(5, "m1"))),
    "replace by a name twice": (tm.MemberError, lambda f: f.replace("m0", member(5, "m1"))),
    "add a member twice": (tm.MemberError, lambda f: f.add(f.members[0])),
    "replace by a member": (tm.MemberError, lambda f: f.replace("m1", f.members[0])),
    "add a model twice": (tm.MemberError, lambda f: f.add(adam(f.members[0].model))),
    "replace by a model": (tm.MemberError, lambda f: f.replace("m1", adam(f.members[0].model))),
    "add no member": (tm.MemberError, call("add", nn.Linear(3, 2))),
    "replace by no member": (tm.MemberError, call("replace", "m0", nn.Linear(3, 2))),
    **{what.__name__: (tm.FleetError, what) for what in (copy.copy, copy.deepcopy, pickle.dumps)},
    "use no plan": (tm.PlanError, call("use", "x")),
    "restore nothing": (tm.CheckpointError, call("restore", "nowhere")),
    **{f"fit {n}": (tm.ConfigError, call("fit", **{**FIT, **bad})) for n, bad in enumerate(BAD_FITS)},
    **{f"plan {n}": (tm.ConfigError, call("plan", **{**PLAN, **bad})) for n, bad in enumerate(BAD_PLANS)},
    **{f"budget {bad!r}": (tm.BudgetError, call("plan", bad, device=TOY)) for bad in BAD_BUDGETS},
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_calls(pair: Pair, kind: str) -> None:
    error, call = BAD_CALLS[kind]
    with pair.refuses(error):
        call(pair.fleet)


# ---- newcomers -----------------------------------------------------------------------------------------


NEWCOMERS: dict[str, tuple[type[tm.TrainmuxError], Callable[[], Member]]] = {
    "untraceable": (tm.TraceError, lambda: member(5, loss=lambda m, b: mse(m, b) * b[1].sum().item())),
    "vector loss": (tm.LossError, lambda: own_loss("vector")),
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


@pytest.mark.parametrize(
    ("layer", "attribute", "value", "write_back"),
    [
        ("", "4", nn.Linear(4, 3, dtype=torch.float64), call("sync")),
        ("1", "running_mean", None, call("drop", "m1")),
        ("", "4", nn.Linear(4, 3, dtype=torch.float64), lambda f: f.replace("m1", member(5, "new"))),
    ],
    ids=["sync", "drop", "replace"],
)
def test_write_back_into_a_changed_model(
    pair: Pair, layer: str, attribute: str, value: nn.Module | None, write_back: Callable[[Fleet], object]
) -> None:
    fleet = pair.fleet
    pair.check()
    before = state_of(fleet.members[0])
    for one in (fleet, pair.control):  # something new to write back
        one.step(BATCHES[9])
    owner = fleet.members[1].model.get_submodule(layer)
    kept = getattr(owner, attribute)
    setattr(owner, attribute, value)
    with pytest.raises(tm.MemberError) as caught:
        write_back(fleet)
    setattr(owner, attribute, kept)
    assert type(caught.value) is tm.MemberError
    # Nothing has been written to any member, the ones that did not change included.
    assert_same(state_of(fleet.members[0]), before)
    pair.check()


# ---- checkpoints of other fleets -----------------------------------------------------------------------

OTHER_FLEETS: dict[str, dict[str, Any]] = {
    "names": {"names": ("m0", "m2")},
    "architecture": {"hidden": 6},
    "precision": {"precision": "bf16"},
    "accumulate": {"accumulate": 2},
    "optimizer": {"optimizer": torch.optim.SGD},
    "scheduler": {"schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 5)},
    "amsgrad": {"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)},
    "param groups": {"optimizer": lambda p: torch.optim.Adam([{"params": [q]} for q in p])},
}


def other_fleet(
    names: Iterable[str] = ("m0", "m1"),
    hidden: int = 4,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    schedule: Callable[..., Any] = SCHEDULERS["step"],
    **options: Any,
) -> Fleet:
    models = {name: bn_mlp(hidden=hidden) for name in names}
    members = [Member(model, optimizer(model.parameters()), name) for name, model in models.items()]
    return Fleet([scheduled(each, schedule) for each in members], mse_with_metrics, EXAMPLE, **options)


@pytest.mark.parametrize("kind", OTHER_FLEETS)
def test_checkpoints_of_other_fleets(pair: Pair, tmp_path: Path, kind: str) -> None:
    other_fleet(**OTHER_FLEETS[kind]).save(tmp_path)
    with pair.refuses(tm.CheckpointError):
        pair.fleet.restore(tmp_path)


def test_an_empty_fleet_has_nothing_to_step() -> None:
    fleet = Fleet([sgd_member(0)], mse, EXAMPLE)
    fleet.drop("m0")
    for call in (lambda: fleet.step(EXAMPLE), lambda: fleet.evaluate([EXAMPLE]), lambda: fleet.drop("m0")):
        with pytest.raises(tm.MemberError):
            call()
    fleet.sync()
    assert fleet.names == ()
    fleet.add(sgd_member(1))
    assert_trains_alone(fleet, lambda i: sgd_member(1), BATCHES[:2])
