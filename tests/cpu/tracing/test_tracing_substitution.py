"""Other tensors in the place of a module's own, everywhere it holds them, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tracing_tools import assert_equals_torch, forward, joint

from trainmux.errors import TraceError, TrainmuxWarning
from trainmux.tracing import FakeTensor, unique_buffers, unique_parameters
from trainmux.tracing._substitute import Substitution


class Tied(nn.Module):
    """One weight under two names, one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(5))
        self.head.register_buffer("mask", self.mask)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("also_absent", None)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)) * self.mask


class HoldsElsewhere(nn.Module):
    """Parameters reached through plain attributes, lists, tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.__dict__["shortcut"] = self.linear.weight
        self.as_list = [self.linear.weight, "text"]
        self.as_tuple = (self.linear.bias, 1)
        self.as_dict = {"w": self.linear.weight}
        self.unrelated = [torch.ones(1)]

    def held(self) -> list[Any]:
        return [self.shortcut, self.as_list[0], self.as_tuple[0], self.as_dict["w"]]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.shortcut + x @ self.as_list[0] + self.as_tuple[0] + x @ self.as_dict["w"]


def stand_ins(model: nn.Module) -> dict[int, Tensor]:
    named = (*unique_parameters(model), *unique_buffers(model))
    return {id(item.tensor): torch.full_like(item.tensor, float(i)) for i, item in enumerate(named)}


def held_tensors(model: nn.Module) -> dict[str, Any]:
    """Every tensor and container of the module tree, by place."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for registry in (module._parameters, module._buffers, module.__dict__)
        for name, value in registry.items()
        if name not in ("_parameters", "_buffers", "_modules")
    }


def assert_same_objects(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert set(before) == set(after)
    assert [name for name in before if before[name] is not after[name]] == []


def test_tied_tensors_are_named_once() -> None:
    model = Tied()
    assert [item.name for item in unique_parameters(model)] == ["embed.weight"]
    assert [item.name for item in unique_buffers(model)] == ["mask", "scratch"]


def test_tied_tensors_are_replaced_under_every_name() -> None:
    model = Tied()
    replacements = stand_ins(model)
    with Substitution(model).active(list(replacements.values())):
        assert model.embed.weight is model.head.weight
        assert model.embed.weight.unique().tolist() == [0.0]
        assert model.mask is model.head.mask
        assert model.mask.unique().tolist() == [1.0]
        assert model.absent is None
        assert model.also_absent is None


def test_everything_is_back_afterwards() -> None:
    for model in (Tied(), HoldsElsewhere(), nn.LSTM(2, 3), nn.BatchNorm1d(2)):
        before = held_tensors(model)
        with Substitution(model).active(list(stand_ins(model).values())):
            pass
        assert_same_objects(before, held_tensors(model))


def test_everything_is_back_after_an_exception() -> None:
    for model in (Tied(), HoldsElsewhere(), nn.LSTM(2, 3)):
        before = held_tensors(model)
        with (
            pytest.raises(ValueError, match="inside"),
            Substitution(model).active(list(stand_ins(model).values())),
        ):
            raise ValueError("inside")
        assert_same_objects(before, held_tensors(model))


def test_plain_attributes_and_containers_are_replaced() -> None:
    model = HoldsElsewhere()
    weight, bias = stand_ins(model).values()
    replacements = dict(zip(stand_ins(model), (weight, bias), strict=True))
    with Substitution(model).active(list(replacements.values())):
        assert [id(item) for item in model.held()] == [id(weight), id(weight), id(bias), id(weight)]
        assert model.as_list[1] == "text"
        assert model.as_tuple[1] == 1
        assert model.unrelated[0].tolist() == [1.0]


def test_recurrent_layers_read_the_stand_ins() -> None:
    model = nn.LSTM(2, 3, num_layers=2, bidirectional=True)
    with Substitution(model).active(list(stand_ins(model).values())):
        inside = [weight.unique().item() for weight in model._flat_weights]
        assert inside == [float(index) for index in range(len(inside))]
    assert all(isinstance(weight, nn.Parameter) for weight in model._flat_weights)


def test_reassigned_buffers_are_read_and_put_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    before = held_tensors(model)
    substitution = Substitution(model)
    names = tuple(item.name for item in unique_buffers(model))
    with substitution.active(list(stand_ins(model).values())):
        model[0].num_batches_tracked = torch.tensor(7)
        model[0].running_mean = torch.full((2,), 8.0)
        current = dict(zip(names, substitution.current(names), strict=True))
    assert current["0.num_batches_tracked"].item() == 7
    assert current["0.running_mean"].tolist() == [8.0, 8.0]
    assert current["0.running_var"].unique().tolist() == [3.0]
    assert_same_objects(before, held_tensors(model))


# ---- through a whole trace -------------------------------------------------------------------------------


def tied_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).logsumexp(-1).mean()


def test_tied_weights_get_one_gradient_from_both_uses() -> None:
    assert_equals_torch(Tied().double(), tied_loss, torch.tensor([0, 1, 4]))


def test_parameters_reached_through_containers_learn() -> None:
    torch.manual_seed(0)
    assert_equals_torch(
        HoldsElsewhere().double(), lambda m, x: m(x).square().mean(), torch.randn(3, 2).double()
    )


@pytest.mark.parametrize("model", [Tied(), nn.Sequential(nn.Embedding(5, 3), nn.Flatten(0), nn.Linear(9, 2))])
def test_a_trace_leaves_the_model_as_it_was(model: nn.Module) -> None:
    before = held_tensors(model)
    values = {name: value.clone() for name, value in before.items() if isinstance(value, Tensor)}
    joint(model, tied_loss, torch.tensor([0, 1, 4]))
    forward(model, tied_loss, torch.tensor([0, 1, 4]))
    assert_same_objects(before, held_tensors(model))
    assert all(torch.equal(value, held_tensors(model)[name]) for name, value in values.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failed_trace_leaves_the_model_as_it_was() -> None:
    model = Tied()
    before = held_tensors(model)
    with pytest.raises(TraceError):
        joint(model, lambda m, x: m(x).mean().item(), torch.tensor([0]))
    assert_same_objects(before, held_tensors(model))


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
    with pytest.warns(TrainmuxWarning, match=r"model\.last, model\.newly_made: set by every call"):
        joint(model, lambda m, x: m(x).square().mean(), torch.ones(3, 2))
    left = {name: value for name, value in held_tensors(model).items() if isinstance(value, Tensor)}
    assert all(isinstance(value, nn.Parameter) for value in left.values()), sorted(left)
    assert not any(isinstance(value, FakeTensor) for value in left.values())
