"""What a fleet refuses when it is made: a typed error, and members as they were."""

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


def refused(error: type[TrainmuxError], part: str = "", **fleet: Any) -> TrainmuxError:
    """Make a fleet that must be refused for the reason ``part`` and leave its members alone."""
    settings: dict[str, Any] = {"members": [sgd_member(0)], "loss": mse, "example_batch": EXAMPLE, **fleet}
    members = [member for member in settings["members"] if isinstance(member, Member)]
    before = [state_of(member) for member in members if not _on_meta(member)]
    groups = [repr(member.optimizer.param_groups) for member in members]
    with pytest.raises(error) as caught:
        Fleet(**settings)
    assert type(caught.value) is error
    assert part in str(caught.value)
    after = [state_of(member) for member in members if not _on_meta(member)]
    for old, new in zip(before, after, strict=True):
        assert_same(new, old)
    assert [repr(member.optimizer.param_groups) for member in members] == groups
    return caught.value


def _on_meta(member: Member) -> bool:
    return any(parameter.is_meta for parameter in member.model.parameters())


def sgd(model: nn.Module, name: str = "bad", **options: Any) -> Member:
    return Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name, **options)


def with_setting(name: str, value: Any, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> Member:
    """A member whose optimizer got a value that torch's own constructor would not take."""
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.param_groups[0][name] = value
    return Member(model, optimizer, "bad")


# ---- members -------------------------------------------------------------------------------------------


def _same_member_twice() -> list[Any]:
    return [sgd_member(0)] * 2


def _one_model_in_two_members() -> list[Any]:
    model = mlp()
    return [sgd(model, "a"), sgd(model, "b")]


def _one_layer_in_two_members() -> list[Any]:
    first, second = mlp(0), mlp(1)
    second[0] = first[0]
    return [sgd(first, "a"), sgd(second, "b")]


def _several_devices() -> list[Any]:
    model = mlp()
    model[2].bias = nn.Parameter(torch.empty(2, dtype=torch.float64, device="meta"))
    return [sgd_member(0), sgd(model)]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (list, "at least one member"),
        (lambda: [sgd_member(0), nn.Linear(3, 2)], "got Linear"),
        (lambda: [sgd_member(i, "twin") for i in range(2)], "'twin' twice"),
        (_same_member_twice, "same Member object twice"),
        (_one_model_in_two_members, "a model of its own"),
        (_one_layer_in_two_members, "parameters of its own"),
        (_several_devices, "['cpu', 'meta']"),
        (lambda: [sgd(mlp().to("meta"))], "meta"),
    ],
)
def test_members(make: Callable[[], list[Any]], part: str) -> None:
    refused(MemberError, part, members=make())


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
    ],
    ids=str,
)
def test_settings_of_a_member(change: dict[str, Any]) -> None:
    model = mlp()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "name": "a", **change}
    with pytest.raises(MemberError, match=next(iter(change))):
        Member(**given)


def test_scheduler_over_another_optimizer() -> None:
    model = mlp()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MemberError, match="over this member's optimizer"):
        sgd(model, scheduler=torch.optim.lr_scheduler.StepLR(other, 3))


# ---- optimizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
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
    ],
    ids=str,
)
def test_settings_of_an_optimizer(name: str, value: Any, kind: type[torch.optim.Optimizer]) -> None:
    refused(OptimizerError, name, members=[with_setting(name, value, kind), sgd_member(0)])


def test_optimizer_over_foreign_parameters() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=0.1)
    refused(OptimizerError, "foreign parameter", members=[Member(model, optimizer, "bad")])


class _MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, _MyAdam])
def test_unsupported_optimizer_lists_the_supported_ones(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = mlp()
    bad = Member(model, kind(model.parameters(), lr=0.1), "bad")
    error = refused(OptimizerError, kind.__name__, members=[sgd_member(0), bad])
    for supported in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"):
        assert f"torch.optim.{supported}" in str(error)


def test_optimizer_state_of_another_shape() -> None:
    bad = sgd_member(0, "bad")
    bad.optimizer.state[bad.model[0].weight]["momentum_buffer"] = torch.zeros(7, dtype=torch.float64)
    refused(OptimizerError, "momentum_buffer", members=[bad])


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
    "wrap",
    [_scripted, _jit_traced, lambda model: nn.Sequential(_scripted(model), nn.Tanh()), nn.DataParallel],
    ids=["script", "trace", "script inside", "DataParallel"],
)
def test_wrapped_models(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(mlp())
    expected = model(EXAMPLE[0])
    refused(MemberError, "plain Python", members=[sgd_member(0), sgd(model)])
    assert torch.equal(model(EXAMPLE[0]), expected)


def test_a_model_that_does_not_know_its_shapes_yet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them experimental
        model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)).double()
    bad = sgd(model)
    with pytest.raises(MemberError, match="run one batch"):
        Fleet([bad], mse, EXAMPLE)
    model(EXAMPLE[0])
    Fleet([bad], mse, EXAMPLE).step(EXAMPLE)


def test_a_buffer_that_is_not_dense() -> None:
    bad = sgd_member(0, "bad")
    bad.model.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(MemberError, match="to_dense"):
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


_OTHER = nn.Parameter(torch.ones((), dtype=torch.float64))


def _of_another_parameter(model: nn.Module, batch: Any) -> Tensor:
    """Has a gradient, but not one that reaches the model."""
    return (_OTHER * batch[0]).mean()


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
    ("loss", "part"),
    [
        (_vector, "scalar loss"),
        (_integer, "floating-point loss"),
        (_detached, "depends on the model's parameters"),
        (_of_the_data, "depends on the model's parameters"),
        (_of_another_parameter, "depends on the model's parameters"),
        (_number, "got float"),
        (_nothing, "got NoneType"),
        (_text_metric, "metric 'note'"),
        (_number_metric, "metric 'size'"),
        (_named("loss"), "rename"),
        (_named("fine", "grad_norm", "finite"), "['finite', 'grad_norm']"),
    ],
)
def test_losses_that_cannot_be_trained_on(loss: Callable[..., Any], part: str) -> None:
    refused(LossError, part, loss=loss)


def test_the_member_is_named_with_its_loss() -> None:
    error = refused(LossError, members=[sgd_member(0), sgd_member(1, "bad", loss=_vector)])
    assert any("'bad'" in note for note in error.__notes__)


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

    error = refused(TraceError, Path(__file__).name, members=[sgd_member(0), sgd(kind())], loss=loss)
    assert isinstance(error, TraceError)
    assert error.op is not None
    assert op in error.op
    assert error.location == f"{__file__}:{line_with(text)} in forward"
    assert any("'bad'" in note for note in error.__notes__)


def test_a_forward_that_fails() -> None:
    """A bug in the user's own code is told with the line where it happened."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].reshape(7, 7)).mean()  # reshaped here

    error = refused(TraceError, "shape '[7, 7]' is invalid", loss=loss)
    assert isinstance(error, TraceError)
    assert error.location == f"{__file__}:{line_with('reshaped here')} in loss"


class _Chooses(_ReadsItem):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # type: ignore[no-any-return]


def test_operators_that_take_functions() -> None:
    error = refused(TraceError, "torch.where", members=[sgd(_Chooses())])
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
    bad = sgd(_CastsItself())
    refused(TraceError, "everything floating in torch.float64", members=[bad], precision="fp64")
    assert torch.isfinite(Fleet([bad], mse, EXAMPLE).step(EXAMPLE)).all()


@pytest.mark.parametrize("stage", ["build_step", "fuse"])
def test_a_failure_of_our_own_is_typed_and_keeps_its_cause(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Node x was invalid, but is output")

    monkeypatch.setattr(_build, stage, fails)
    error = refused(FusionError, "AssertionError: Node x was invalid")
    assert isinstance(error.__cause__, AssertionError)


def test_a_failure_after_tracing_is_typed_and_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(_joint, "draw_from_counters", fails)
    error = refused(TraceError, "AssertionError")
    assert isinstance(error.__cause__, AssertionError)


# ---- settings of the fleet -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("precision", "fp8"),
        ("precision", ["fp32"]),
        ("data", None),
        ("accumulate", 0),
        ("accumulate", 1.5),
        ("accumulate", True),
        ("deterministic", "yes"),
        ("engine", "warp"),
        ("device", "tpu"),
        ("device", "meta"),
        ("device", 3.5),
        ("loss", None),
        ("loss", 0.5),
    ],
    ids=str,
)
def test_settings_of_the_fleet(setting: str, value: Any) -> None:
    refused(ConfigError, setting, **{setting: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there() -> None:
    refused(ConfigError, "without a CUDA device", device="cuda")


@pytest.mark.parametrize(
    ("example", "part"),
    [
        (None, "Fleet(example_batch=...)"),
        ({"x": 1}, "at least one tensor"),
        ((EXAMPLE, torch.eye(3).to_sparse()), "sparse_coo"),
        (
            (EXAMPLE, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)),
            "nested",
        ),
    ],
    ids=["none", "no tensor", "sparse", "nested"],
)
def test_example_batches(example: Any, part: str) -> None:
    refused(BatchError, part, example_batch=example)


def test_example_batch_without_a_row_per_member() -> None:
    example = tuple(leaf.expand(3, *leaf.shape) for leaf in EXAMPLE)
    members = [sgd_member(i) for i in range(2)]
    refused(BatchError, "leading axis of 2", members=members, example_batch=example, data="per_member")
