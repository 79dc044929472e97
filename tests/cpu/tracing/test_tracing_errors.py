"""Code that cannot be traced is refused with the operator and the user's own line."""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import forward, joint

from trainmux.errors import TraceError

X = torch.ones(4, 3)
aten = "aten.{}.default".format


class Model(nn.Module):
    """A linear layer followed by an ``act`` of this file."""

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.total = torch.zeros(3)
        self.act = act

    def forward(self, x: Tensor) -> Any:
        return self.act(self.linear(x), self)


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def refused(act: Callable[..., Any]) -> TraceError:
    with pytest.raises(TraceError) as raised:
        joint(Model(act), mean_loss, X)
    return raised.value


@pytest.fixture
def opaque() -> Iterator[None]:
    """An operator that has a kernel and no form for fake tensors."""
    library = torch.library.Library("trainmux_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    yield
    library._destroy()


OWN = torch.Generator()
ONES = torch.ones(3)

# Code that stops the trace, with the operator that the error names.
STOPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "item": (aten("_local_scalar_dense"), lambda y, m: y * y.sum().item()),
    "if": (aten("_local_scalar_dense"), lambda y, m: y if y.sum() > 0 else -y),
    "int index": (aten("_local_scalar_dense"), lambda y, m: y[: int(y.sum())]),
    "boolean mask": (aten("nonzero"), lambda y, m: y[y > 0]),
    "masked_select": (aten("masked_select"), lambda y, m: y.masked_select(y > 0)),
    "unique": (aten("_unique2"), lambda y, m: y.unique()),
    "numpy": ("None", lambda y, m: y * y.detach().numpy().mean()),
    "list": ("None", lambda y, m: torch.tensor(y.detach().tolist())),
    "no fake form": ("trainmux_test.opaque.default", lambda y, m: torch.ops.trainmux_test.opaque(y)),
    "mistake": ("None", lambda y, m: y @ torch.ones(7, 2)),
    # A tensor that is no buffer: a graph would lose what it accumulates.
    "accumulated": ("aten.add_.Tensor", lambda y, m: y * m.total.add_(y.detach().sum(0)).mean()),
    # Random operators without a rule.
    "poisson": (aten("poisson"), lambda y, m: y + torch.poisson(y.detach().abs())),
    "multinomial": (aten("multinomial"), lambda y, m: y[:, torch.multinomial(ONES, 2)]),
    "binomial": (aten("binomial"), lambda y, m: y + torch.binomial(3 * ONES, 0.5 * ONES)),
    "generator": ("aten.rand", lambda y, m: y + torch.rand(3, generator=OWN)),
    "generator in place": ("aten.uniform", lambda y, m: y + torch.empty(3).uniform_(generator=OWN)),
}


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("name", STOPS)
def test_code_that_stops_a_trace_is_named_with_operator_and_line(name: str) -> None:
    op, act = STOPS[name]
    error = refused(act)
    assert str(error.op).startswith(op)
    line = inspect.getsourcelines(act)[1]
    assert (error.location or "").startswith(f"{__file__}:{line} in ")
    joint(Model(lambda y, m: F.relu(y)), mean_loss, X)  # the next trace is not spoiled


def test_torch_does_not_log_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Mock()
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "exception", log)
    assert "run it in plain torch" in str(refused(STOPS["mistake"][1]))
    log.assert_not_called()


def test_data_dependent_code_in_a_loss_function_and_in_an_evaluation() -> None:
    def metric(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[x > 0].sum()

    for trace in (joint, forward):
        with pytest.raises(TraceError) as raised:
            trace(nn.Linear(3, 3), metric, X)
        assert raised.value.op == "aten.nonzero.default"
        assert (raised.value.location or "").startswith(__file__)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda weight: weight.clamp_(-1, 1),
    "data": lambda weight: weight.data.mul_(0.5),
    "row": lambda weight: weight.__setitem__(0, 0.0),
    "embedding": lambda weight: F.embedding(torch.tensor([1, 2]), weight, max_norm=1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_parameter_changed_in_place_by_the_forward_pass(change: Callable[[Tensor], Any]) -> None:
    def act(y: Tensor, m: Model) -> Tensor:
        with torch.no_grad():
            change(m.linear.weight)
        return y

    error = refused(act)
    assert "linear.weight" in str(error)
    assert (error.location or "").startswith(__file__)


def test_numbers_that_are_drawn_after_a_seed_are_refused_and_a_seed_alone_is_not() -> None:
    def seeded(y: Tensor, m: Model) -> Tensor:
        torch.manual_seed(0)
        return y if m.total is ONES else y + torch.randn_like(y)

    error = refused(seeded)
    assert "torch.manual_seed is called" in str(error)
    assert "in seeded" in str(error)
    model = Model(seeded)
    model.total = ONES
    before = torch.get_rng_state()
    joint(model, mean_loss, X)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_random_range_that_is_too_wide() -> None:
    refused(lambda y, m: y + torch.randint(0, 2**40, (3,)))


def test_an_exception_raised_on_purpose_keeps_its_words() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(TraceError, match="KeyError: 'labels'") as raised:
        joint(nn.Linear(3, 3), loss, X)
    assert "in loss" in (raised.value.location or "")
    assert isinstance(raised.value.__cause__, KeyError)


# ---- too long --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [nn.RNN, *(pytest.param(kind, marks=pytest.mark.extensive) for kind in (nn.LSTM, nn.GRU))]
)
def test_a_recurrence_that_is_too_long_is_refused_with_its_length_at_once(kind: type[nn.RNNBase]) -> None:
    model = kind(3, 2, num_layers=2, bidirectional=True, batch_first=True)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].mean()  # unrolled here

    joint(model, loss, torch.ones(1, 4, 3))
    begin = time.perf_counter()
    with pytest.raises(TraceError, match=r"over 500 steps, of 2000 in all .*shorter sequences") as raised:
        joint(model, loss, torch.ones(1, 500, 3))
    assert time.perf_counter() - begin < 5
    assert raised.value.location == f"{__file__}:{inspect.getsourcelines(loss)[1] + 1} in loss"


def test_a_loop_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmux.tracing._torch_private.MAX_NODES", 300)

    def grow(x: Tensor, model: Model) -> Tensor:
        for _ in range(1000):
            x = x * 1.5  # over and over
        return x

    error = refused(grow)
    assert "more than 300 operators" in str(error)
    assert error.location == f"{__file__}:{inspect.getsourcelines(grow)[1] + 2} in grow"


# ---- remedies by the code around -------------------------------------------------------------------------


def checked(y: Tensor, model: Model) -> Tensor:
    assert (y < 100).all(), "too large"
    return y


def routed_to_experts(y: Tensor, model: Model) -> Tensor:
    parts = y.split((y > 0).sum(0).tolist())
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("act", "remedy"),
    [
        (checked, "run Python with -O"),
        (routed_to_experts, r"set_experts_implementation\('batched_mm'\)"),
        (lambda y, model: y * y.sum().item(), "torch.where or a fixed shape"),
    ],
)
def test_the_remedy_fits_the_code_that_reads_values(act: Callable[..., Any], remedy: str) -> None:
    assert re.search(remedy, str(refused(act)))
