"""What a fleet refuses when it is made: a typed error with what was expected and what was got."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import EXAMPLE, assert_same, mlp, mse, sgd_member, state_of
from torch import Tensor, nn

from trainmux import Fleet, Member
from trainmux.errors import (
    BatchError,
    ConfigError,
    FusionError,
    LossError,
    MemberError,
    OptimizerError,
    TraceError,
    TrainmuxError,
)
from trainmux.fleet import _build
from trainmux.tracing import _joint

SUPPORTED = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta")


def refused(error: type[TrainmuxError], *parts: str, **fleet: Any) -> TrainmuxError:
    """Makes a fleet that must be refused with ``parts`` in the message and leave its members alone."""
    settings: dict[str, Any] = {"loss": mse, "example_batch": EXAMPLE, **fleet}
    members = [member for member in settings["members"] if isinstance(member, Member)]
    before = [state_of(member) for member in members if not _on_meta(member)]
    groups = [[dict(group) for group in member.optimizer.param_groups] for member in members]
    with pytest.raises(error) as caught:
        Fleet(**settings)
    for part in parts:
        assert part in str(caught.value)
    after = [state_of(member) for member in members if not _on_meta(member)]
    for old, new in zip(before, after, strict=True):
        assert_same(new, old)
    for member, old in zip(members, groups, strict=True):
        assert repr(member.optimizer.param_groups) == repr(old)
    assert type(caught.value) is error
    return caught.value


def _on_meta(member: Member) -> bool:
    return any(parameter.is_meta for parameter in member.model.parameters())


# ---- who is in the fleet -------------------------------------------------------------------------------


def test_no_members() -> None:
    refused(MemberError, "at least one member", "got none", members=[])


def test_something_that_is_no_member() -> None:
    refused(MemberError, "trainmux.Member", "got Linear", members=[sgd_member(0), nn.Linear(3, 2)])


def test_duplicate_names() -> None:
    refused(
        MemberError, "unique member names", "'twin' twice", members=[sgd_member(i, "twin") for i in range(2)]
    )


def test_the_same_member_twice() -> None:
    member = sgd_member(0)
    refused(MemberError, "same Member object twice", members=[member, member])


def test_one_model_in_two_members() -> None:
    model = mlp()
    members = [Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name) for name in ("a", "b")]
    refused(MemberError, "member 'b'", "a model of its own", "'a'", members=members)


def test_a_parameter_in_two_members() -> None:
    """Two models that share a layer cannot both own it, as little as the whole model."""
    first, second = mlp(0), mlp(1)
    second[0] = first[0]
    members = [
        Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name)
        for model, name in ((first, "a"), (second, "b"))
    ]
    refused(MemberError, "'b'", "'a'", members=members)


def test_given_names_do_not_clash_with_made_up_ones() -> None:
    """Only names that the user gave twice are the user's mistake."""
    named, unnamed = sgd_member(0, "member-1"), sgd_member(1)
    unnamed.name = None
    fleet = Fleet([named, unnamed], mse, EXAMPLE)
    assert fleet.names[0] == "member-1"
    assert len(set(fleet.names)) == 2


def test_a_refused_member_keeps_no_name() -> None:
    """The name decides a member's random draws: a failed attempt must not leave one behind."""
    unnamed, bad = sgd_member(0), sgd_member(1)
    unnamed.name = bad.name = None
    bad.optimizer.param_groups[0]["lr"] = -1.0
    refused(OptimizerError, members=[unnamed, bad])
    assert (unnamed.name, bad.name) == (None, None)


# ---- a member by itself --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model": "mlp"}, ("torch.nn.Module", "got str")),
        ({"optimizer": torch.optim.SGD}, ("torch.optim.Optimizer instance", "got type")),
        ({"name": ""}, ("non-empty string", "''")),
        ({"name": 3}, ("non-empty string", "3")),
        ({"seed": 1.5}, ("seed to be an integer", "1.5")),
        ({"seed": True}, ("seed to be an integer", "True")),
        ({"seed": 2**63}, ("64 bits", str(2**63))),
        ({"clip_norm": 0.0}, ("clip_norm", "positive", "0.0")),
        ({"clip_norm": -1}, ("clip_norm", "positive", "-1")),
        ({"clip_norm": math.nan}, ("clip_norm", "positive", "nan")),
        ({"clip_value": -0.5}, ("clip_value", "positive", "-0.5")),
        ({"clip_value": math.nan}, ("clip_value", "positive", "nan")),
        ({"clip_value": "1"}, ("clip_value", "positive", "'1'")),
        ({"scheduler_interval": "batch"}, ("scheduler_interval", "('step', 'epoch')", "'batch'")),
        ({"loss": 3.0}, ("loss to be callable", "got float")),
        ({"scheduler": "cosine"}, ("scheduler", "torch.optim.lr_scheduler", "got str")),
    ],
)
def test_settings_of_a_member(change: dict[str, Any], parts: tuple[str, ...]) -> None:
    model = mlp()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "name": "a", **change}
    with pytest.raises(MemberError) as caught:
        Member(**given)
    for part in parts:
        assert part in str(caught.value)


def test_scheduler_over_another_optimizer() -> None:
    model = mlp()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MemberError, match=r"'a'.*over this member's optimizer.*StepLR.*same optimizer"):
        Member(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            "a",
            scheduler=torch.optim.lr_scheduler.StepLR(other, 3),
        )


# ---- optimizers ----------------------------------------------------------------------------------------


def with_setting(name: str, value: Any, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> Member:
    """A member whose optimizer got a value that torch's own constructor would not take."""
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.param_groups[0][name] = value
    return Member(model, optimizer, "bad")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("lr", -0.1, torch.optim.SGD),
        ("lr", math.nan, torch.optim.SGD),
        ("lr", math.inf, torch.optim.AdamW),
        ("lr", "fast", torch.optim.SGD),
        ("weight_decay", -1e-3, torch.optim.SGD),
        ("weight_decay", math.nan, torch.optim.Adam),
        ("momentum", math.nan, torch.optim.SGD),
        ("momentum", -0.5, torch.optim.RMSprop),
        ("eps", -1e-8, torch.optim.Adam),
        ("alpha", math.nan, torch.optim.RMSprop),
        ("rho", 1.5, torch.optim.Adadelta),
        ("lr_decay", -0.1, torch.optim.Adagrad),
    ],
    ids=str,
)
def test_numbers_of_an_optimizer(name: str, value: Any, kind: type[torch.optim.Optimizer]) -> None:
    bad = with_setting(name, value, kind)
    refused(OptimizerError, "'bad'", "param group 0", name, repr(value), members=[bad, sgd_member(0)])


@pytest.mark.parametrize("betas", [(1.0, 0.99), (-0.1, 0.99), (0.9, math.nan)], ids=str)
def test_betas_of_adam(betas: tuple[float, float]) -> None:
    refused(OptimizerError, "'bad'", "betas[", members=[with_setting("betas", betas, torch.optim.Adam)])


def test_optimizer_over_foreign_parameters() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=0.1)
    refused(OptimizerError, "'bad'", "foreign parameter", "(7,)", members=[Member(model, optimizer, "bad")])


class _MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda p: torch.optim.LBFGS(p), "torch.optim.lbfgs.LBFGS"),
        (lambda p: _MyAdam(p, lr=0.1), "_MyAdam"),
    ],
    ids=["lbfgs", "subclass"],
)
def test_unsupported_optimizer_lists_the_supported_ones(
    make: Callable[[Any], torch.optim.Optimizer], got: str
) -> None:
    model = mlp()
    bad = Member(model, make(model.parameters()), "bad")
    supported = [f"torch.optim.{name}" for name in SUPPORTED]
    refused(OptimizerError, "'bad'", got, *supported, members=[sgd_member(0), bad])


def test_differentiable_optimizer() -> None:
    refused(
        OptimizerError, "differentiable=False", "got True", members=[with_setting("differentiable", True)]
    )


def test_optimizer_state_of_another_shape() -> None:
    bad = sgd_member(0, "bad")
    bad.optimizer.state[bad.model[0].weight]["momentum_buffer"] = torch.zeros(7, dtype=torch.float64)
    refused(OptimizerError, "momentum_buffer", "(4, 3)", "(7,)", members=[bad])


# ---- devices -------------------------------------------------------------------------------------------


def test_parameters_on_several_devices() -> None:
    model = mlp()
    model[2].bias = nn.Parameter(torch.empty(2, dtype=torch.float64, device="meta"))
    bad = Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "bad")
    refused(MemberError, "'bad'", "one device", "['cpu', 'meta']", members=[sgd_member(0), bad])


def test_a_model_without_values() -> None:
    model = mlp().to("meta")
    bad = Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "bad")
    refused(MemberError, "'bad'", "meta", members=[bad])


# ---- models that are no plain modules ------------------------------------------------------------------


def _scripted(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have no more of them
        return torch.jit.script(model)  # type: ignore[no-any-return]


def _jit_traced(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, EXAMPLE[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("wrap", "parts"),
    [
        (_scripted, ("the model", "RecursiveScriptModule", "made from")),
        (_jit_traced, ("the model", "TopLevelTracedModule", "made from")),
        (lambda model: nn.Sequential(_scripted(model), nn.Tanh()), ("'bad', 0:", "made from")),
        (nn.DataParallel, ("the model", "DataParallel", "model.module")),
    ],
    ids=["script", "trace", "script inside", "DataParallel"],
)
def test_wrapped_models(wrap: Callable[[nn.Module], nn.Module], parts: tuple[str, ...]) -> None:
    model = wrap(mlp())
    expected = model(EXAMPLE[0])
    bad = Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "bad")
    refused(MemberError, "'bad'", "plain Python", *parts, members=[sgd_member(0), bad])
    assert torch.equal(model(EXAMPLE[0]), expected)


def test_a_model_that_does_not_know_its_shapes_yet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them experimental
        model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)).double()
    bad = Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "bad")
    with pytest.raises(MemberError, match=r"'bad', 1:.*'weight'.*LazyLinear.*run one batch"):
        Fleet([bad], mse, EXAMPLE)
    model(EXAMPLE[0])
    Fleet([bad], mse, EXAMPLE).step(EXAMPLE)


def test_a_buffer_that_is_not_dense() -> None:
    bad = sgd_member(0, "bad")
    bad.model.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(MemberError, match=r"'bad'.*dense.*'mask'.*sparse_coo.*to_dense"):
        Fleet([bad], mse, EXAMPLE)


# ---- loss functions ------------------------------------------------------------------------------------


def _vector(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(1)


def _integer(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).argmax()


def _detached(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).detach().sum()


def _of_the_data(model: nn.Module, batch: Any) -> Tensor:
    return batch[1].mean()


def _number(model: nn.Module, batch: Any) -> float:
    return 1.0


def _nothing(model: nn.Module, batch: Any) -> None:
    return None


def _text_metric(model: nn.Module, batch: Any) -> Any:
    return mse(model, batch), {"note": "fine"}


def _number_metric(model: nn.Module, batch: Any) -> Any:
    return mse(model, batch), {"size": 5}


def _named(*names: str) -> Callable[..., Any]:
    def loss(model: nn.Module, batch: Any) -> Any:
        value = mse(model, batch)
        return value, dict.fromkeys(names, value)

    return loss


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (_vector, ("scalar loss", "(5,)", ".mean()")),
        (_integer, ("floating-point loss", "torch.int64")),
        (_detached, ("depends on the model's parameters", "does not")),
        (_of_the_data, ("depends on the model's parameters", "does not")),
        (_number, ("scalar tensor", "got float")),
        (_nothing, ("scalar tensor", "got NoneType")),
        (_text_metric, ("metric 'note'", "expected a tensor", "got str")),
        (_number_metric, ("metric 'size'", "expected a tensor", "got int")),
        (_named("loss"), ("metrics with names other", "got ['loss']", "rename")),
        (_named("fine", "grad_norm", "finite"), ("got ['finite', 'grad_norm']", "rename")),
    ],
)
def test_losses_that_cannot_be_trained_on(loss: Callable[..., Any], parts: tuple[str, ...]) -> None:
    refused(LossError, *parts, members=[sgd_member(0)], loss=loss)


def test_loss_that_depends_on_another_parameter_only() -> None:
    """It has a gradient, but not one that reaches the model."""
    other = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (other * batch[0]).mean()

    refused(LossError, "depends on the model's parameters", members=[sgd_member(0)], loss=loss)


def test_the_member_is_named_with_its_loss() -> None:
    bad = sgd_member(1, "bad", loss=_vector)
    error = refused(LossError, members=[sgd_member(0), bad])
    assert any("'bad'" in note for note in error.__notes__)


def test_no_loss_at_all() -> None:
    refused(ConfigError, "loss function", "'m0'", "got none", members=[sgd_member(0)], loss=None)


def test_loss_that_is_not_callable() -> None:
    refused(ConfigError, "callable", "float", members=[sgd_member(0)], loss=0.5)


# ---- models that cannot be traced ----------------------------------------------------------------------


class _ReadsItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: Tensor) -> Tensor:
        scale = x.sum().item()  # read here
        return self.layer(x) * scale


class _Branches(_ReadsItem):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # branched here
            return self.layer(x)
        return -self.layer(x)


class _Selects(_ReadsItem):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x[:, 0] > 0])  # selected here


def line_with(text: str) -> int:
    """Number of the line of this file that ends with ``text``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {text}")]
    return found


@pytest.mark.parametrize(
    ("kind", "op", "text"),
    [
        (_ReadsItem, "_local_scalar_dense", "read here"),
        (_Branches, "_local_scalar_dense", "branched here"),
        (_Selects, "nonzero", "selected here"),
    ],
)
def test_untraceable_models(kind: type[nn.Module], op: str, text: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    model = kind()
    bad = Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "bad")
    error = refused(TraceError, op, Path(__file__).name, members=[sgd_member(0), bad], loss=loss)
    assert isinstance(error, TraceError)
    assert error.op is not None
    assert op in error.op
    assert error.location == f"{__file__}:{line_with(text)} in forward"
    assert any("'bad'" in note for note in error.__notes__)


def test_a_forward_that_fails() -> None:
    """A bug in the user's own code is told with the line where it happened."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].reshape(7, 7)).mean()  # reshaped here

    error = refused(TraceError, "shape '[7, 7]' is invalid", members=[sgd_member(0)], loss=loss)
    assert isinstance(error, TraceError)
    assert error.location == f"{__file__}:{line_with('reshaped here')} in loss"


class _Chooses(_ReadsItem):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # type: ignore[no-any-return]


def test_operators_that_take_functions() -> None:
    model = _Chooses()
    bad = Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "bad")
    error = refused(TraceError, "higher_order.cond", "torch.where", members=[bad])
    assert isinstance(error, TraceError)
    assert error.location is not None
    assert error.location.endswith("in forward")


class _CastsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()).double()  # type: ignore[no-any-return]


def test_a_model_that_casts_to_a_dtype_which_the_fleet_does_not_hold() -> None:
    model = _CastsItself()
    bad = Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "bad")
    parts = ("torch.float32 and torch.float64", "everything floating in torch.float64", "weight.dtype")
    refused(TraceError, "addmm", *parts, members=[bad], precision="fp64")
    assert torch.isfinite(Fleet([bad], mse, EXAMPLE).step(EXAMPLE)).all()


@pytest.mark.parametrize("stage", ["build_step", "fuse"])
def test_a_failure_of_our_own_is_typed_and_keeps_its_cause(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Node x was invalid, but is output")

    monkeypatch.setattr(_build, stage, fails)
    error = refused(FusionError, "AssertionError: Node x was invalid", "report", members=[sgd_member(0)])
    assert isinstance(error.__cause__, AssertionError)


def test_a_failure_after_tracing_is_typed_and_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(_joint, "draw_from_counters", fails)
    error = refused(TraceError, "AssertionError", members=[sgd_member(0)])
    assert isinstance(error.__cause__, AssertionError)


# ---- settings of the fleet -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("precision", "fp8"),
        ("precision", None),
        ("data", "mine"),
        ("accumulate", 0),
        ("accumulate", 1.5),
        ("accumulate", True),
        ("deterministic", "yes"),
        ("engine", "warp"),
        ("device", "tpu"),
        ("device", "meta"),
        ("device", 3.5),
    ],
    ids=str,
)
def test_settings_of_the_fleet(setting: str, value: Any) -> None:
    expected = "expected" if setting != "accumulate" else "at least 1"
    refused(ConfigError, f"{setting}:", expected, repr(value), members=[sgd_member(0)], **{setting: value})


def test_unhashable_settings_are_refused_like_others() -> None:
    for setting in ("precision", "data"):
        refused(ConfigError, f"{setting}:", "['fp32']", members=[sgd_member(0)], **{setting: ["fp32"]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there() -> None:
    refused(ConfigError, "device:", "'cuda'", "without a CUDA device", members=[sgd_member(0)], device="cuda")


# ---- example batches -----------------------------------------------------------------------------------


def test_no_example_batch() -> None:
    refused(
        BatchError,
        "example batch",
        "'m0'",
        "Fleet(example_batch=...)",
        members=[sgd_member(0)],
        example_batch=None,
    )


def test_example_batch_without_tensors() -> None:
    refused(BatchError, "at least one tensor", "got dict", members=[sgd_member(0)], example_batch={"x": 1})


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "nested"],
)
def test_example_batch_that_is_not_dense(leaf: Tensor, text: str) -> None:
    refused(
        BatchError,
        "batch[1]",
        "dense",
        text,
        "to_dense",
        members=[sgd_member(0)],
        example_batch=(EXAMPLE, leaf),
    )


def test_example_batch_without_a_row_per_member() -> None:
    example = tuple(leaf.expand(3, *leaf.shape) for leaf in EXAMPLE)
    refused(
        BatchError,
        "batch[0]",
        "leading axis of 2 members",
        "(3, 5, 3)",
        members=[sgd_member(i) for i in range(2)],
        example_batch=example,
        data="per_member",
    )
