"""Tensors that share memory with parameters and buffers, wherever code keeps them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import MemberError

BATCHES = [(torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)) for _ in range(4)]


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()


class Data(Base):
    """The weight without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.layer.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(x, self.kept)


class Transposed(Base):
    """A view through which gradients flow."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.layer.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() @ self.kept


class Part(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"rows": (self.layer.weight.detach()[2:4, 1:], 1)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.kept["rows"][0].sum()


class BufferRow(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 6, dtype=torch.float64))
        self.row = self.rows[1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.rows[1] += y.mean(0)
        return y + self.row


class InAPartial(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = functools.partial(torch.mul, self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.kept(2.0)


class InAClosure(Base):
    def __init__(self) -> None:
        super().__init__()
        weight = self.layer.weight
        self.penalty = lambda: weight.square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.penalty()


KINDS = [Data, Transposed, Part, BufferRow, InAPartial, InAClosure]


@pytest.mark.parametrize("make", KINDS)
def test_they_see_what_training_does(make: Callable[[], nn.Module]) -> None:
    models = []
    for seed in (0, 1, 0, 1):
        torch.manual_seed(seed)
        models.append(make())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    members = [
        tm.Member(model, optimizer, name=str(i))
        for i, (model, optimizer) in enumerate(zip(models[:2], optimizers[:2], strict=True))
    ]
    fleet = tm.Fleet(members, mse, BATCHES[0], precision="fp64")
    assert len(fleet.summary()) == 1
    for batch in BATCHES:
        found = fleet.step(batch).tolist()
        expected = []
        for model, optimizer in zip(models[2:], optimizers[2:], strict=True):
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        assert found == pytest.approx(expected, rel=1e-12)
    fleet.sync()
    for one, other in zip(models[:2], models[2:], strict=True):
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_weight_in_the_closure_of_a_loss_is_the_one_that_trains() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    plain.load_state_dict(model.state_dict())

    def with_penalty(weight: Tensor) -> Callable[..., Tensor]:
        return lambda m, b: mse(m, b) + weight.square().sum()

    fleet = tm.Fleet(
        [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))],
        with_penalty(model.weight),
        BATCHES[0],
        precision="fp64",
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_fn = with_penalty(plain.weight)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = loss_fn(plain, batch)
        loss.backward()
        optimizer.step()
        assert fleet.step(batch).item() == pytest.approx(loss.item(), rel=1e-12)


def test_two_parameters_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[1].weight.data = model[0].weight.data
    with pytest.raises(MemberError, match=r"0\.weight and 1\.weight in the same bytes.*tie the parameter"):
        tm.Fleet([tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))], mse, BATCHES[0])


def test_members_with_other_closures_inside_do_not_share_a_graph() -> None:
    losses = [
        lambda m, b: sum((p - q).square().mean() for p, q in [(m(b[0]), b[1])]),
        lambda m, b: sum((p + q).square().mean() for p, q in [(m(b[0]), b[1])]),
    ]
    members = []
    for number, loss in enumerate(losses):
        torch.manual_seed(0)
        model = nn.Linear(6, 6).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        members.append(tm.Member(model, optimizer, name=str(number), loss=loss))
    with torch.no_grad():
        expected = [
            loss(member.model, BATCHES[0]).item() for loss, member in zip(losses, members, strict=True)
        ]
    fleet = tm.Fleet(members, example_batch=BATCHES[0], precision="fp64")
    assert fleet.step(BATCHES[0]).tolist() == pytest.approx(expected, rel=1e-12)
