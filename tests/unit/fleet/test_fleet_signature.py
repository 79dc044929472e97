"""Signatures: equal where two models or functions would trace alike, never equal where they would not."""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from trainmux.fleet._traces import graph_key
from trainmux.ir import GraphInput, GraphOutput, InputKind, OutputKind
from trainmux.tracing import Reach, TracedGraph


def model_signature(model: nn.Module) -> Any:
    return Reach(model).signature


def function_signature(fn: Any) -> Any:
    return Reach(None, fn).signature


class Holder(nn.Module):
    """A model with one more attribute."""

    def __init__(self, attribute: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.attribute = attribute


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclass
class Record:
    width: int
    names: tuple[str, ...] = ()


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class HalfSlotted(Slotted):
    """Has a ``__dict__`` beside the slot, in which the value is not."""


class NamedDict(dict[str, Any]):
    """A dict that carries attributes besides its items."""

    def __init__(self, scale: float) -> None:
        super().__init__(a=1)
        self.scale = scale


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


Point = namedtuple("Point", "x y")
Pixel = namedtuple("Pixel", "x y")


def same(a: Any, b: Any) -> bool:
    """Whether two models with these attributes share a signature."""
    one, other = model_signature(Holder(a)), model_signature(Holder(b))
    assert hash(one) == hash(one)
    return one == other


# ---- models --------------------------------------------------------------------------------------------


def test_values_of_parameters_and_buffers_do_not_count() -> None:
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    with torch.no_grad():
        other.weight.fill_(7.0)
        other.running_mean.fill_(7.0)
    assert model_signature(one) == model_signature(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Linear(2, 3), nn.Linear(3, 2)),
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False)),
        (nn.Linear(2, 3), nn.Linear(2, 3).double()),
        (nn.Linear(2, 3), nn.Linear(2, 3).requires_grad_(False)),
        (nn.Linear(2, 3), nn.Linear(2, 3).eval()),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.ReLU(), nn.Tanh()),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU())),
        (nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.2)),
        (nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)),
        (nn.LSTM(2, 2), nn.LSTM(2, 2, num_layers=2)),
    ],
    ids=lambda module: str(module).replace("\n", ""),
)
def test_models_that_differ(one: nn.Module, other: nn.Module) -> None:
    assert model_signature(one) != model_signature(other)
    assert model_signature(copy.deepcopy(one)) == model_signature(copy.deepcopy(one))


def test_tied_weights_are_not_two_weights() -> None:
    def pair(*, tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if tied:
            model[1].weight = model[0].weight
        return model

    assert model_signature(pair(tied=True)) == model_signature(pair(tied=True))
    assert model_signature(pair(tied=True)) != model_signature(pair(tied=False))


def test_a_module_used_twice_is_not_two_modules() -> None:
    shared, copied = nn.Linear(2, 2), nn.Linear(2, 2)
    twice = nn.Sequential(shared, shared)
    apart = nn.Sequential(copied, copy.deepcopy(copied))
    assert model_signature(twice) != model_signature(apart)
    assert model_signature(twice) == model_signature(nn.Sequential(copied, copied))


@pytest.mark.parametrize(
    ("one", "equal", "other"),
    [
        (1, 1, 2),
        (1, 1, True),
        (1, 1, 1.0),
        (0.0, 0.0, -0.0),
        ("a", "a", "b"),
        (None, None, False),
        ([1, 2], [1, 2], [2, 1]),
        ([1, 2], [1, 2], (1, 2)),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 1}, {"b": 1}),
        ({1, 2}, {2, 1}, {1, 3}),
        (torch.float32, torch.float32, torch.float64),
        (Colour.RED, Colour.RED, Colour.BLUE),
        (Point(1, 2), Point(1, 2), Pixel(1, 2)),
        (np.arange(3), np.arange(3), np.arange(3) + 1),
        (np.arange(3), np.arange(3), np.arange(3).astype(float)),
        (np.float64(1.0), np.float64(1.0), np.float64(2.0)),
        (torch.ones(2), torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.tensor(True), torch.tensor(True), torch.tensor(False)),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16(), torch.ones(2).half()),
        (torch.empty(0), torch.empty(0), torch.empty(0, 2)),
        (Config(a=1), Config(a=1), Config(a=2)),
        (Record(1), Record(1), Record(2)),
        (Config(a=Record(1, ("x",))), Config(a=Record(1, ("x",))), Config(a=Record(1, ("y",)))),
        (functools.partial(max, 1), functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(max, 1), functools.partial(max, 1), functools.partial(min, 1)),
        (torch.relu, torch.relu, torch.tanh),
        (nn.ReLU, nn.ReLU, nn.Tanh),
        (types, types, functools),
        ([nn.ReLU()], [nn.ReLU()], [nn.Tanh()]),
        ([nn.Dropout(0.1)], [nn.Dropout(0.1)], [nn.Dropout(0.2)]),
    ],
)
def test_plain_attributes(one: Any, equal: Any, other: Any) -> None:
    assert same(one, equal)
    assert not same(one, other)


def test_objects_that_differ_in_a_later_one() -> None:
    """Nothing of one object may be mistaken for a part of another that was read in the same memory."""

    def objects(last: int) -> list[Config]:
        return [*(Config(value=number) for number in range(10)), Config(value=last)]

    one, other = Holder(objects(2)), Holder(objects(3))
    # Python keeps some dicts that were freed; with that store full, the next one's memory is given out again.
    stored = [{} for _ in range(500)]
    del stored
    assert model_signature(one) != model_signature(other)


def test_one_object_in_two_places_is_not_two_objects() -> None:
    shared = [1]
    assert same([shared, shared], [shared, shared])
    assert not same([shared, shared], [[1], [2]])


def test_an_object_that_contains_itself() -> None:
    def loop(value: int) -> Config:
        config = Config(value=value)
        config.me = config
        return config

    assert same(loop(1), loop(1))
    assert not same(loop(1), loop(2))


def test_a_tensor_of_the_model_in_a_plain_attribute() -> None:
    """Recurrent layers keep a list of their own weights: it counts by which weights, not by value."""

    def model(position: int) -> nn.Module:
        holder = Holder()
        holder.attribute = [list(holder.parameters())[position]]
        return holder

    assert model_signature(model(0)) == model_signature(model(0))
    assert model_signature(model(0)) != model_signature(model(1))


def test_a_foreign_module_with_tensors_counts_by_identity() -> None:
    """Its values end up in the graph as constants."""
    teacher, pupil = nn.Linear(2, 2), nn.Linear(2, 2)
    assert same([teacher], [teacher])
    assert not same([teacher], [pupil])


@pytest.mark.parametrize("kind", [Slotted, HalfSlotted])
def test_what_cannot_be_looked_into_is_never_equal_by_mistake(kind: Callable[[Any], Any]) -> None:
    one, other = kind(1), kind(2)
    assert same(one, one)
    assert not same(one, other)


def test_attributes_beside_the_items_of_a_container() -> None:
    one, other = NamedDict(1.0), NamedDict(2.0)
    assert not same(one, other)


def test_hooks_count_and_their_handles_do_not() -> None:
    def model(hook: Callable[..., Any] | None) -> nn.Module:
        layer = nn.Linear(2, 2)
        if hook is not None:
            layer.register_forward_hook(hook)
        return layer

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return 2 * output

    def triple(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return 3 * output

    assert model_signature(model(double)) == model_signature(model(double))
    assert model_signature(model(double)) != model_signature(model(triple))
    assert model_signature(model(double)) != model_signature(model(None))


def test_two_classes_of_one_name_are_two_classes() -> None:
    """As after a notebook cell was run again."""

    def make() -> type[nn.Module]:
        class Model(nn.Module):
            pass

        return Model

    one, other = make(), make()
    assert model_signature(one()) == model_signature(one())
    assert model_signature(one()) != model_signature(other())


def test_a_method_put_on_an_instance() -> None:
    def model(factor: float) -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.forward = types.MethodType(lambda self, x: factor * x, layer)  # type: ignore[method-assign]
        return layer

    assert model_signature(model(1.0)) == model_signature(model(1.0))
    assert model_signature(model(1.0)) != model_signature(model(2.0))


# ---- functions -----------------------------------------------------------------------------------------


def scaled(factor: Any) -> Callable[..., Any]:
    return lambda model, batch: factor * model(batch)


def with_default(factor: Any) -> Callable[..., Any]:
    def loss(model: Any, batch: Any, factor: Any = factor) -> Any:
        return factor * model(batch)

    return loss


def with_keyword(factor: Any) -> Callable[..., Any]:
    def loss(model: Any, batch: Any, *, factor: Any = factor) -> Any:
        return factor * model(batch)

    return loss


class Loss:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, model: Any, batch: Any) -> Any:
        return self.factor * model(batch)

    def method(self, model: Any, batch: Any) -> Any:
        return self(model, batch)


FACTOR = 1.0


def of_a_global(model: Any, batch: Any) -> Any:
    return FACTOR * model(batch)


@pytest.mark.parametrize(
    "make",
    [
        scaled,
        with_default,
        with_keyword,
        Loss,
        lambda factor: Loss(factor).method,
        lambda factor: functools.partial(of_a_global, factor),
        lambda factor: functools.partial(of_a_global, batch=factor),
        lambda factor: scaled(scaled(factor)),
        lambda factor: scaled({"weights": [factor]}),
    ],
    ids=[
        "closure",
        "default",
        "keyword",
        "callable",
        "method",
        "partial",
        "partial-keyword",
        "nested",
        "container",
    ],
)
def test_functions_differ_by_what_they_carry(make: Callable[[Any], Any]) -> None:
    for one, other in ((1.0, 2.0), (torch.ones(2), torch.zeros(2)), ("a", "b")):
        assert function_signature(make(one)) == function_signature(make(copy.deepcopy(one)))
        assert function_signature(make(one)) != function_signature(make(other))
    assert hash(function_signature(make(1.0))) is not None


def test_functions_differ_by_their_code() -> None:
    one = lambda model, batch: model(batch) + 1  # noqa: E731
    other = lambda model, batch: model(batch) + 2  # noqa: E731
    third = lambda model, batch: model(batch) - 1  # noqa: E731
    fourth = lambda model, batch: model.body(batch) + 1  # noqa: E731
    signatures = {function_signature(fn) for fn in (one, other, third, fourth)}
    assert len(signatures) == 4


def test_code_inside_code_counts() -> None:
    def make(values: tuple[int, ...]) -> Callable[..., Any]:
        if values == (1,):
            return lambda model, batch: [(lambda x: x + 1)(item) for item in batch]
        return lambda model, batch: [(lambda x: x + 2)(item) for item in batch]

    assert function_signature(make((1,))) != function_signature(make((2,)))
    assert function_signature(make((1,))) == function_signature(make((1,)))


def test_plain_globals_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = function_signature(of_a_global)
    assert function_signature(of_a_global) == before
    monkeypatch.setitem(of_a_global.__globals__, "FACTOR", 2.0)
    assert function_signature(of_a_global) != before


def test_a_variable_that_is_not_set_yet() -> None:
    def make() -> Callable[..., Any]:
        def loss(model: Any, batch: Any) -> Any:
            return later * len(batch)

        if FACTOR < 0:
            later = 1
        return loss

    assert function_signature(make()) == function_signature(make())


def test_functions_that_call_themselves() -> None:
    def make(factor: float) -> Callable[..., Any]:
        def loss(model: Any, batch: Any) -> Any:
            return factor * (loss(model, batch[1:]) if len(batch) else 1)

        return loss

    assert function_signature(make(1.0)) == function_signature(make(1.0))
    assert function_signature(make(1.0)) != function_signature(make(2.0))


# ---- graphs --------------------------------------------------------------------------------------------


def traced(
    compute: Callable[[fx.Proxy], Any],
    *,
    name: str = "w",
    shape: tuple[int, ...] = (2,),
    constant: Tensor | None = None,
) -> TracedGraph:
    class Root(nn.Module):
        def forward(self, x: Any) -> Any:
            return compute(x + self.constant) if constant is not None else compute(x)

    root = Root()
    if constant is not None:
        root.register_buffer("constant", constant)
    return TracedGraph(
        fx.symbolic_trace(root),
        (GraphInput(InputKind.PARAMETER, name, shape, "torch.float32"),),
        (GraphOutput(OutputKind.LOSS, "loss"),),
    )


def test_graphs_have_equal_keys_when_they_compute_the_same() -> None:
    key = graph_key(traced(lambda x: x * 2))
    assert graph_key(traced(lambda x: x * 2)) == key
    others = [
        traced(lambda x: x * 3),
        traced(lambda x: x + 2),
        traced(lambda x: x * 2, name="v"),
        traced(lambda x: x * 2, shape=(3,)),
        traced(lambda x: x * 2, constant=torch.ones(2)),
        traced(lambda x: x * 2, constant=torch.zeros(2)),
        traced(lambda x: x * 2, constant=torch.zeros(2, dtype=torch.float64)),
        traced(lambda x: x * 2, constant=torch.zeros(1, 2)),
    ]
    keys = {graph_key(graph) for graph in others}
    assert len(keys) == len(others)
    assert key not in keys
    assert graph_key(traced(lambda x: x * 2, constant=torch.ones(2))) in keys


# ---- code inside code, globals, methods ----------------------------------------------------------------


def test_comprehensions_and_inner_functions_count() -> None:
    losses = [
        lambda m, b: sum((p - q).square() for p, q in [(m, b)]),
        lambda m, b: sum((p + q).square() for p, q in [(m, b)]),
        lambda m, b: [(lambda x: x * 2)(p) for p in b],
        lambda m, b: [(lambda x: x * 3)(p) for p in b],
    ]
    assert len({function_signature(loss) for loss in losses}) == 4


SETTINGS = {"weight": 1.0, "parts": [1, 2]}


def helper(x: float) -> float:
    return x * FACTOR


FACTOR = 1.0


class Scaled(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.layer(x))

    def scaled(self, x: Tensor) -> Tensor:
        return helper(x) * self.gain * SETTINGS["weight"]

    def unused(self) -> Any:
        return UNUSED


UNUSED = [1]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (SETTINGS, "weight", 2.0),
        (SETTINGS, "parts", [1, 3]),
        (globals(), "FACTOR", 2.0),
        (globals(), "helper", lambda x: x),
        (Scaled, "gain", 2.0),
        (Scaled, "scaled", lambda self, x: x),
        (Scaled, "forward", lambda self, x: x),
    ],
    ids=["dict", "list", "global", "function", "class attribute", "method", "forward"],
)
def test_what_a_method_mentions_counts(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    model = Scaled()
    before = model_signature(model)
    assert model_signature(model) == before
    with monkeypatch.context() as patch:
        if isinstance(owner, dict):
            patch.setitem(owner, name, value)
        else:
            patch.setattr(owner, name, value)
        assert model_signature(model) != before
    assert model_signature(model) == before


def test_what_no_code_mentions_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    before = model_signature(model)
    monkeypatch.setitem(globals(), "UNUSED", [2])
    assert model_signature(model) == before


def test_the_path_of_a_difference_is_what_a_user_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def difference(change: Callable[[], object], *functions: Any) -> str:
        before = Reach(model, *functions).signature
        change()
        return next(text for _, text in Reach(model, *functions).differences(before))

    model = nn.Sequential(Scaled(), nn.Dropout(0.1))
    weights = [0.5]
    assert difference(lambda: setattr(model[1], "p", 0.2)) == "model.1.p (was 0.1, is 0.2)"
    assert difference(lambda: weights.append(1.0), lambda m, b: weights) == "loss.weights"
    assert difference(lambda: monkeypatch.setitem(SETTINGS, "weight", 3.0)).endswith(
        "SETTINGS.weight (was 1.0, is 3.0)"
    )
    assert "requires_grad=False" in difference(lambda: model[0].requires_grad_(False))


def test_a_walk_puts_everything_back() -> None:
    model, notes = Scaled(), [1]
    reach = Reach(model, lambda m, b: notes)
    model.layer.extra = 1  # type: ignore[assignment]
    del model.layer.bias
    notes.append(2)
    Scaled.gain = 5.0
    reach.restore()
    assert not hasattr(model.layer, "extra")
    assert isinstance(model.layer.bias, nn.Parameter)
    assert (notes, Scaled.gain) == ([1], 1.0)
