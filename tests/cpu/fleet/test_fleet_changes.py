"""Changes of members that are in a fleet: followed, or noticed and taken over by ``refresh``."""

from __future__ import annotations

import copy
import enum
import functools
import types
import zlib
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fit_cases import At
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    Slotted,
    assert_close,
    assert_same,
    count_work,
    mse,
    net,
    sgd,
    state_of,
    states_of,
    train_alone,
)
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import MemberChangedError, TrainmuxError, TrainmuxWarning

pytestmark = pytest.mark.usefixtures("built_once")

WEIGHT = {"penalty": 0.0}


def penalized(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) + WEIGHT["penalty"] * model(batch[0]).square().sum()


class Pair:
    """Two members in a fleet, and the same two in plain torch."""

    def __init__(self, loss: Callable[..., Tensor] = mse, **options: Any) -> None:
        self.members, self.plain = (
            [sgd(net(seed), f"m{seed}", momentum=0.9) for seed in range(2)] for _ in range(2)
        )
        self.models = [member.model for member in self.members]
        self.loss, self.num_steps = loss, 0
        self.fleet = tm.Fleet(self.members, loss, EXAMPLE, precision="fp64", **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            batch = BATCHES[self.num_steps % len(BATCHES)]
            losses = self.fleet.step(batch).tolist()
            expected = [train_alone(member, [batch], self.loss)[0] for member in self.plain]
            assert losses == pytest.approx(expected, rel=1e-10)
            self.num_steps += 1

    def change(self, change: Callable[[Any, Any], object], *which: int) -> None:
        """Make a change on both sides, of some members or of both."""
        for number in which or (0, 1):
            for member in (self.members[number], self.plain[number]):
                change(member.model, member.optimizer)

    def assert_same(self) -> None:
        self.fleet.sync()
        for member, plain in zip(self.members, self.plain, strict=True):
            assert_close(state_of(member), state_of(plain), share=1e-10)


# ---- noticed and taken over ----------------------------------------------------------------------------


def patch_forward(model: Any, optimizer: Any) -> None:
    forward = model.forward
    model.forward = lambda x: forward(x) * 2


def reload_state(model: Any, optimizer: Any) -> None:
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"] * 0.5
    optimizer.load_state_dict(state)


def split_group(model: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter is not model.last.bias]
    optimizer.add_param_group({"params": [model.last.bias], "lr": 0.5})


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "freeze": lambda model, optimizer: model.first.requires_grad_(False),
    "to eval": lambda model, optimizer: model.norm.eval(),
    "rescale": lambda model, optimizer: setattr(model, "scale", 0.5),
    "replace a layer": lambda model, optimizer: setattr(model, "act", nn.ReLU()),
    "patch forward": patch_forward,
    "hook": lambda model, optimizer: model.last.weight.register_hook(lambda gradient: gradient * 0.5),
    "clamp": lambda model, optimizer: [p.detach().clamp_(-0.05, 0.05) for p in model.parameters()],
    "clamp data": lambda model, optimizer: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()],
    "load": lambda model, optimizer: model.load_state_dict(
        {name: value * 0.5 for name, value in model.state_dict().items()}
    ),
    "nesterov": lambda model, optimizer: optimizer.param_groups[0].update(nesterov=True),
    "forget momentum": lambda model, optimizer: optimizer.state.clear(),
    "reload state": reload_state,
    "split group": split_group,
}


@pytest.mark.parametrize(("name", "which"), [*((name, (0,)) for name in CHANGES), ("load", (0, 1))])
def test_a_change_is_refused_and_taken_over_by_refresh(name: str, which: tuple[int, ...]) -> None:
    pair = Pair()
    pair.step(3)
    pair.fleet.sync()
    pair.change(CHANGES[name], *which)
    if name != "clamp data":  # torch keeps no count of those: found where values are compared
        with pytest.raises(MemberChangedError, match=r"member 'm0'.*refresh\('m0'\)"):
            pair.fleet.step(BATCHES[3])
    with pytest.raises(MemberChangedError, match="member 'm0'") if name != "to eval" else nullcontext():
        pair.fleet.evaluate(BATCHES[:1])
    for number in which:
        pair.fleet.refresh(f"m{number}")
    pair.step(4)
    pair.assert_same()


@pytest.mark.parametrize("synced", [True, False], ids=["synced", "not synced"])
def test_another_optimizer_or_model_comes_with_its_own_state(synced: bool) -> None:
    pair = Pair()
    first = [copy.deepcopy(model) for model in pair.models]
    pair.step(3)
    if synced:
        pair.fleet.sync()
    for members in (pair.members, pair.plain):
        members[0].optimizer = sgd(members[0].model, "m0").optimizer
        members[1].model = copy.deepcopy(first[1])
        members[1].optimizer = sgd(members[1].model, "m1").optimizer
    pair.fleet.refresh()
    pair.step(3)
    pair.assert_same()


def test_all_members_at_once_share_a_group_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(penalized)
    pair.step(2)
    for penalty in (0.1, 0.2):
        monkeypatch.setitem(WEIGHT, "penalty", penalty)
        with pytest.raises(MemberChangedError, match=r"loss\.WEIGHT\.penalty \(was .*, is 0\.\d\)"):
            pair.fleet.step(BATCHES[0])
        pair.fleet.refresh()
        pair.step(1)
        assert [group.width for group in pair.fleet.summary()] == [2]
    pair.assert_same()


def test_a_change_that_cannot_be_trained_is_refused_and_the_fleet_goes_on_when_it_is_undone() -> None:
    pair = Pair()
    pair.step(2)
    pair.models[0].forward = lambda x: x.sum().item()  # type: ignore[method-assign]
    with pytest.raises(TrainmuxError):
        pair.fleet.refresh("m0")
    del pair.models[0].forward
    pair.step(2)
    pair.assert_same()


def test_changes_without_consequence_and_values_that_are_put_back_are_no_changes() -> None:
    pair = Pair()
    pair.step(1)
    pair.models[0].note = "anything"  # type: ignore[assignment]
    with torch.no_grad():
        kept = pair.models[0].last.weight.clone()
        pair.models[0].last.weight.zero_()
        pair.models[0].last.weight.copy_(kept)
    pair.step(1)
    pair.fleet.evaluate(BATCHES[:1])
    pair.assert_same()


def test_a_number_that_counts_for_short_batches_only_is_read_again() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * (model.scale if len(batch[0]) == 3 else 1.0)

    models = [nn.Linear(3, 2).double() for _ in range(2)]
    for model in models:
        model.scale = 1.0  # type: ignore[assignment]
    fleet = tm.Fleet([sgd(model, f"m{i}", lr=0.0) for i, model in enumerate(models)], loss, EXAMPLE)
    short = [leaf[:3] for leaf in EXAMPLE]
    for scale in (1.0, 2.0, 3.0):
        models[0].scale = scale  # type: ignore[assignment]
        for batch in (EXAMPLE, short):
            assert fleet.step(batch).tolist() == pytest.approx([loss(each, batch).item() for each in models])


class Titled(dict[str, float]):
    """A dict with attributes of its own."""


def test_a_dict_of_a_class_of_its_own_is_unchanged_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every one of the first steps would walk through all of the member's code."""
    models = [net(seed) for seed in range(2)]
    for model in models:
        model.settings = Titled(scale=2.0)  # type: ignore[assignment]
    fleet = tm.Fleet([sgd(model, f"m{i}") for i, model in enumerate(models)], mse, EXAMPLE)
    monkeypatch.setattr("trainmux.fleet._watch.Reach", None)
    fleet.step(EXAMPLE)
    models[0].settings["scale"] = 3.0  # type: ignore[index, operator]
    with pytest.raises(TypeError):  # looks at it again
        fleet.step(EXAMPLE)


def test_a_change_late_in_training_is_noticed_within_a_hundred_steps() -> None:
    pair = Pair()
    for number in range(40):
        pair.fleet.step(BATCHES[number % 12])
    pair.models[0].scale = 0.5
    with pytest.raises(MemberChangedError, match=r"model\.scale \(was 1\.0, is 0\.5\)"):  # noqa: PT012
        for number in range(100):
            pair.fleet.step(BATCHES[number % 12])


def test_sync_and_save_warn(tmp_path: Path) -> None:
    pair = Pair()
    pair.step(1)
    pair.models[0].scale = 0.5
    for call in (lambda: pair.fleet.save(tmp_path / "a"), pair.fleet.sync):
        with pytest.warns(TrainmuxWarning, match=r"member 'm0': a change of model\.scale .*refresh"):
            call()
    with torch.no_grad():
        pair.models[1].last.bias.zero_()
    with pytest.warns(TrainmuxWarning, match="member 'm1': a change of the values of last.bias"):
        pair.fleet.drop("m1")


def test_fit_looks_at_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in the last step of one is noticed in the first of the next."""
    pair = Pair(penalized)
    anneal = At(24, lambda state: monkeypatch.setitem(WEIGHT, "penalty", 0.1))
    with pytest.raises(MemberChangedError, match=r"WEIGHT\.penalty"):
        pair.fleet.fit(BATCHES * 2, epochs=2, callbacks=[anneal], progress=False)
    assert pair.fleet.num_steps == 24


def test_another_model_in_a_member_and_a_member_of_two_fleets_are_noticed() -> None:
    pair = Pair()
    other = tm.Fleet(pair.fleet.members, mse, BATCHES[0], precision="fp64")
    other.step(BATCHES[0])
    other.sync()
    with pytest.raises(MemberChangedError, match="written by another fleet"):
        pair.fleet.step(BATCHES[0])
    other.members[0].model = net()
    with pytest.raises(MemberChangedError, match="another object"):
        other.step(BATCHES[0])


def test_refresh_while_gradients_are_accumulated_keeps_them() -> None:
    pair = Pair(accumulate=2)
    pair.fleet.step(BATCHES[0])
    pair.change(CHANGES["rescale"], 0)
    pair.fleet.refresh("m0")
    pair.fleet.step(BATCHES[1])
    for number, member in enumerate(pair.plain):
        member.optimizer.zero_grad()
        for scale, batch in zip((1.0, 1.0 if number else 0.5), BATCHES[:2], strict=True):
            member.model.scale = scale
            (mse(member.model, batch) / 2).backward()
        member.optimizer.step()
    pair.assert_same()


def test_refresh_of_a_stopped_member_leaves_it_stopped() -> None:
    pair = Pair()
    pair.step(1)
    pair.fleet.stop("m0")
    pair.models[0].scale = 0.5
    pair.fleet.refresh("m0")
    before = states_of(pair.fleet)["m0"]
    pair.fleet.step(BATCHES[0])
    assert pair.fleet.stopped() == {"m0": "stopped"}
    assert_same(states_of(pair.fleet)["m0"], before)


# ---- what counts as a change ---------------------------------------------------------------------------


class Config:
    """A bag of settings that is printed with them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return repr({key: value for key, value in vars(self).items() if value is not self})


def loop(value: int) -> Config:
    """An object that contains itself."""
    config = Config(value=value)
    config.me = config
    return config


class HalfSlotted(Slotted):
    """Has a ``__dict__`` beside the slot, in which the value is not."""


class NamedDict(dict[str, Any]):
    """Carries an attribute besides its items."""

    def __init__(self, scale: float) -> None:
        super().__init__(a=1)
        self.scale = scale

    def __repr__(self) -> str:
        return f"{dict(self)} {self.scale}"


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


Point = namedtuple("Point", "x y")
Pixel = namedtuple("Pixel", "x y")
SHARED, SLOTTED = [1], (Slotted(1), HalfSlotted(1))

VALUES: list[tuple[Any, Any, Any]] = [
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
    (torch.tensor(True), torch.tensor(True), torch.tensor(False)),
    (torch.ones(2).bfloat16(), torch.ones(2).bfloat16(), torch.ones(2).half()),
    (Config(a=1), Config(a=1), Config(a=2)),
    (Config(a=Config(b=("x",))), Config(a=Config(b=("x",))), Config(a=Config(b=("y",)))),
    (loop(1), loop(1), loop(2)),
    ([SHARED, SHARED], [SHARED, SHARED], [[1], [2]]),
    (NamedDict(1.0), NamedDict(1.0), NamedDict(2.0)),
    (SLOTTED[0], SLOTTED[0], Slotted(2)),
    (SLOTTED[1], SLOTTED[1], HalfSlotted(2)),
    (functools.partial(max, 1), functools.partial(max, 1), functools.partial(max, 2)),
    (functools.partial(max, 1), functools.partial(max, 1), functools.partial(min, 1)),
    (torch.relu, torch.relu, torch.tanh),
    (nn.ReLU, nn.ReLU, nn.Tanh),
    (types, types, functools),
    ([nn.Dropout(0.1)], [nn.Dropout(0.1)], [nn.Dropout(0.2)]),
]
"""A value of an attribute, one that is no change, and one that is."""


class Called:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self) -> float:
        return float(self.factor)

    def method(self) -> float:
        return self()


def recursive(factor: Any) -> Callable[[], float]:
    def call(depth: int = 2) -> float:
        return float(factor) * (call(depth - 1) if depth else 1.0)

    return call


def code_inside(factor: Any) -> Callable[[], float]:
    if factor == 1:
        return lambda: sum((lambda x: x + 1)(item) for item in (1, 2))
    return lambda: sum((lambda x: x + 2)(item) for item in (1, 2))


FUNCTIONS: list[Callable[[Any], Callable[[], float]]] = [
    lambda factor: lambda: float(factor),
    lambda factor: lambda factor=factor: float(factor),
    lambda factor: lambda *, factor=factor: float(factor),
    lambda factor: lambda weights={"parts": [factor]}: float(weights["parts"][0]),
    lambda factor: (lambda: 1.0) if factor == 1 else (lambda: 2.0),
    lambda factor: Called(factor),
    lambda factor: Called(factor).method,
    lambda factor: functools.partial(float, factor),
    recursive,
    code_inside,
]
"""Functions that carry a factor: in a closure, a default, their code, an object."""

SETTINGS = {"weight": 1.0, "parts": [1, 2]}
FACTOR = 1.0
UNUSED = [1]


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


def digest(value: Any) -> float:
    return zlib.crc32(repr(value).encode()) % 10_000 / 10_000


class Reader(nn.Module):
    """Computes with everything that it holds, calls or mentions."""

    gain = 1.0

    def __init__(self, values: dict[int, Any], calls: dict[int, Callable[[], float]]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.values, self.calls = values, calls

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        shift = sum(call() for call in self.calls.values())
        for value in self.values.values():
            if isinstance(value, Tensor):
                out = out * value.sum()
                shift += digest((value.dtype, len(value.shape)))
            else:
                shift += digest(value)
        return self.scaled(out + shift)

    def scaled(self, x: Tensor) -> Tensor:
        return helper(x) * self.gain * SETTINGS["weight"] * sum(SETTINGS["parts"])

    def unused(self) -> Any:
        return UNUSED


@pytest.fixture(scope="module")
def read() -> tm.Fleet:
    """One fleet for all tests that undo their changes."""
    values = {number: value for number, (value, _, _) in enumerate(VALUES)}
    calls = {number: make(1) for number, make in enumerate(FUNCTIONS)}
    return tm.Fleet([sgd(Reader(values, calls), lr=1e-9)], mse, EXAMPLE)


PLACES: list[tuple[Any, Any, list[Any], list[Any]]] = [
    *(("values", number, [equal], [other]) for number, (_, equal, other) in enumerate(VALUES)),
    *(("calls", number, [make(1)], [make(2)]) for number, make in enumerate(FUNCTIONS)),
    (SETTINGS, "weight", [1.0], [2.0]),
    (SETTINGS, "parts", [[1, 2]], [[1, 3]]),
    (globals(), "FACTOR", [1.0], [2.0]),
    (globals(), "helper", [], [lambda x: x * 3]),
    (Reader, "gain", [1.0], [2.0]),
    (Reader, "scaled", [], [lambda self, x: x]),
    (Reader, "forward", [], [lambda self, x: self.layer(x)]),
    (globals(), "UNUSED", [[2]], []),  # no code that runs mentions it
]
"""Where values are held or mentioned, values that are no change there, and values that are."""


@pytest.mark.parametrize(
    "place", PLACES, ids=lambda place: f"{place[0]} {place[1]}" if isinstance(place[0], str) else place[1]
)
def test_values_of_attributes_and_what_functions_carry_and_methods_mention(
    read: tm.Fleet, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    owner, name, same, changed = place
    owner = getattr(read.members[0].model, owner) if isinstance(owner, str) else owner
    work = count_work(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        put: Callable[..., None] = patch.setitem if isinstance(owner, dict) else patch.setattr
        for value in same:
            put(owner, name, value)
            read.sync()
            read.step(EXAMPLE)
        assert work.total() == 0
        for value in changed:
            read.sync()
            put(owner, name, value)
            with pytest.raises(MemberChangedError):
                read.step(EXAMPLE)
    read.step(EXAMPLE)
