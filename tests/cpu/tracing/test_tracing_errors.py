"""What cannot be traced is refused with the operator and the user's own line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import forward, joint

from trainmux.errors import TraceError

HERE = __file__


class Model(nn.Module):
    """A linear layer followed by whatever a case does, in a ``forward`` of this file."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


X = torch.ones(4, 3)

# The operator to be named, and code that stops the trace in one line.
DATA_DEPENDENT: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "item": ("aten._local_scalar_dense.default", lambda y: y * y.sum().item()),
    "if": ("aten._local_scalar_dense.default", lambda y: y if y.sum() > 0 else -y),
    "int index": ("aten._local_scalar_dense.default", lambda y: y[: int(y.sum())]),
    "boolean mask": ("aten.nonzero.default", lambda y: y[y > 0]),
    "masked_select": ("aten.masked_select.default", lambda y: y.masked_select(y > 0)),
    "unique": ("aten._unique2.default", lambda y: y.unique()),
}


def line_of(fn: Callable[..., Any]) -> str:
    return f"{HERE}:{inspect.getsourcelines(fn)[1]} in "


def refused(loss: Callable[[Any, Any], Any], model: nn.Module | None = None) -> TraceError:
    with pytest.raises(TraceError) as raised:
        joint(model or nn.Linear(3, 3), loss, X)
    return raised.value


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_data_dependent_code_in_a_model(name: str) -> None:
    op, act = DATA_DEPENDENT[name]
    error = refused(mean_loss, Model(act))
    assert error.op == op
    assert error.location is not None
    assert error.location.startswith(line_of(act))


def test_data_dependent_code_in_a_loss_function_and_in_an_evaluation() -> None:
    def metric(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[x > 0].sum()

    for trace in (joint, forward):
        with pytest.raises(TraceError) as raised:
            trace(nn.Linear(3, 3), metric, X)
        assert raised.value.op == "aten.nonzero.default"
        assert (raised.value.location or "").startswith(HERE)


@pytest.mark.parametrize(
    "convert",
    [lambda y: y * y.detach().numpy().mean(), lambda y: torch.tensor(y.detach().tolist())],
    ids=["numpy", "tolist"],
)
def test_numpy_and_lists(convert: Callable[[Tensor], Tensor]) -> None:
    assert (refused(mean_loss, Model(convert)).location or "").startswith(line_of(convert))


class ChangesParameter(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.where == "no_grad":
                self.linear.weight.clamp_(-1, 1)
            if self.where == "data":
                self.linear.weight.data.mul_(0.5)
            if self.where == "slice":
                self.linear.weight[0] = 0.0
        return self.linear(x)


@pytest.mark.parametrize("where", ["no_grad", "data", "slice"])
def test_a_parameter_changed_in_place_by_the_forward_pass(where: str) -> None:
    error = refused(mean_loss, ChangesParameter(where))
    assert "linear.weight" in str(error)
    assert (error.location or "").startswith(HERE)


def test_an_embedding_with_max_norm_changes_its_weight() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 3))
    with pytest.raises(TraceError, match=r"0\.weight"):
        joint(model, mean_loss, torch.tensor([1, 2]))


class Accumulates(nn.Module):
    """Keeps a running value in a tensor that is no buffer: a graph would lose it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.total = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.total += y.detach().sum(0)
        return y * self.total.mean()


def test_a_tensor_that_is_no_buffer_and_is_changed_in_place() -> None:
    model = Accumulates()
    held = model.total
    error = refused(mean_loss, model)
    assert "buffer" in str(error)
    assert model.total is held


# ---- random numbers --------------------------------------------------------------------------------------

UNSUPPORTED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "poisson": ("aten.poisson.default", lambda y: y + torch.poisson(y.detach().abs())),
    "multinomial": ("aten.multinomial.default", lambda y: y[:, torch.multinomial(torch.ones(3), 2)]),
    "binomial": (
        "aten.binomial.default",
        lambda y: y + torch.binomial(torch.full((4, 3), 3.0), torch.full((4, 3), 0.5)),
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_random_operator_without_a_rule(name: str) -> None:
    op, act = UNSUPPORTED[name]
    error = refused(mean_loss, Model(act))
    assert error.op == op
    assert (error.location or "").startswith(HERE)


@pytest.mark.parametrize(
    ("op", "draw"),
    [
        ("aten.rand", lambda y, generator: y + torch.rand(3, generator=generator)),
        ("aten.uniform", lambda y, generator: y + torch.empty(3).uniform_(generator=generator)),
    ],
)
def test_a_generator_of_the_users_own(op: str, draw: Callable[..., Tensor]) -> None:
    generator = torch.Generator()
    error = refused(mean_loss, Model(lambda y: draw(y, generator)))
    assert op in (error.op or "")
    assert (error.location or "").startswith(HERE)


def test_a_random_range_that_is_too_wide() -> None:
    error = refused(mean_loss, Model(lambda y: y + torch.randint(0, 2**40, (3,))))
    assert "2**31" in str(error)


# ---- plain mistakes --------------------------------------------------------------------------------------


def test_an_error_of_the_users_code_keeps_its_words_and_place() -> None:
    def broken(y: Tensor) -> Tensor:
        return y @ torch.ones(7, 2)

    error = refused(mean_loss, Model(broken))
    assert (error.location or "").startswith(f"{HERE}:{inspect.getsourcelines(broken)[1] + 1} in broken")
    assert isinstance(error.__cause__, RuntimeError)


def test_an_exception_raised_on_purpose() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("labels")

    error = refused(loss)
    assert "KeyError: 'labels'" in str(error)
    assert "in loss" in (error.location or "")


def test_a_failed_trace_does_not_spoil_the_next() -> None:
    refused(mean_loss, Model(DATA_DEPENDENT["item"][1]))
    joint(Model(F.relu), mean_loss, X)
    assert not torch.compiler.is_compiling()
