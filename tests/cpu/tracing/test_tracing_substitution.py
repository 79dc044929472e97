"""Other tensors in the place of a module's own, everywhere it holds them, and nothing left behind."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_containers import Doubling, Two, closed
from torch import Tensor, nn
from tracing_tools import assert_equals_torch, doubles, forward, joint, square_loss

from trainmux.errors import TraceError, TrainmuxWarning


class Holds(nn.Module):
    """One weight under two names, one buffer under two names; parameters in plain attributes, lists, tuples
    and dicts; a buffer in whose place it puts another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(2, 2).double(), nn.Linear(2, 2, bias=False)
        self.head.weight = self.linear.weight
        self.register_buffer("mask", torch.ones(2).double())
        self.head.register_buffer("mask", self.mask)
        self.register_buffer("mean", torch.zeros(2).double(), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("also_absent", None)
        self.__dict__["shortcut"] = self.linear.weight
        self.as_list = [self.linear.weight, "text"]
        self.as_tuple = (self.linear.bias, 1)
        self.as_dict = {"w": self.linear.weight}
        self.unrelated = [torch.ones(1)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.linear(x)) * self.mask
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        y = y + x @ self.shortcut + x @ self.as_list[0] + self.as_tuple[0] + x @ self.as_dict["w"]
        return y - self.mean


def held(model: nn.Module) -> dict[str, Any]:
    """Every tensor and container of the module tree, by place."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for registry in (module._parameters, module._buffers, module.__dict__)
        for name, value in registry.items()
        if name not in ("_parameters", "_buffers", "_modules")
    }


def test_a_trace_is_torchs_and_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Holds(), doubles(3, 2)
    before = held(model)
    values = {name: value.clone() for name, value in before.items() if isinstance(value, Tensor)}
    traced = assert_equals_torch(model, square_loss, x)
    forward(model, square_loss, x)
    with pytest.raises(TraceError):
        joint(model, lambda m, v: m(v).mean().item(), x)
    after = held(model)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []
    assert all(torch.equal(value, after[name]) for name, value in values.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [item.name for item in traced.inputs][:4] == ["linear.weight", "linear.bias", "mask", "mean"]


class Remembers(nn.Module):
    """Keeps its last activation, as many models do for hooks and plots."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.newly_made = self.last.detach()
        return self.last


def test_no_fake_tensor_stays_in_a_model_that_remembers_its_activations() -> None:
    model = Remembers()
    with pytest.warns(TrainmuxWarning, match=r"model\.last, model\.newly_made"):
        joint(model, square_loss, torch.ones(3, 2))
    left = {name: value for name, value in held(model).items() if isinstance(value, Tensor)}
    assert all(isinstance(value, nn.Parameter) for value in left.values()), sorted(left)


LIBRARY = """
import torch

CALLS = 0

class Counts(torch.nn.Linear):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return super().forward(x)
"""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "project"])
def test_a_package_installed_anywhere_on_the_path_is_no_code_of_the_users(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .pth file, or PYTHONPATH, adds packages that are installed for another interpreter."""
    name = f"counting_{folder.replace('-', '_')}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{name}.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / folder)
    model = importlib.import_module(name).Counts(2, 2)
    with nullcontext() if folder != "project" else pytest.raises(TraceError):
        joint(model, square_loss, torch.ones(3, 2))


@pytest.mark.parametrize("constant", [np.ma.masked, np.ma.masked_array([1.0, 2.0], mask=[True, False])])
def test_a_model_may_hold_masked_arrays(constant: Any) -> None:
    """Numpy's own ``tobytes`` leaves the mask out, and raises for ``np.ma.masked``."""
    model = nn.Linear(2, 1)
    model.constant = constant
    assert_equals_torch(model, square_loss, torch.ones(3, 2), 1e-6)


class Guarded(deque[Any]):
    def __reduce__(self) -> Any:  # for copies
        return type(self), (list(self),)

    def extend(self, items: Any) -> None:
        raise TypeError("not to be changed")


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda w: closed(w=w), lambda held: held["w"] + held.w),
        (lambda w: Doubling(w=w), lambda held: held["w"] + next(iter(held.values()))),
        (lambda w: Two(w, 3.0), lambda held: held[0] * held[1]),
        (lambda w: Guarded([w]), lambda held: held[0] * 3.0),
    ],
    ids=["closed", "doubling", "two", "guarded"],
)
def test_containers_of_a_class_of_their_own_hold_stand_ins_and_get_everything_back(
    make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2).double()
            self.held = make(self.linear.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ read(self.held)

    model = Holding()
    before = repr(model.held)
    assert_equals_torch(model, square_loss, doubles(3, 2))
    assert repr(model.held) == before
    assert torch.equal(read(model.held), read(make(model.linear.weight)))
