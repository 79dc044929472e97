"""Members that change while in a fleet on a GPU: captured steps follow, refuse or take over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import MemberChangedError


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(width, dtype=torch.float64)
        self.last = nn.Linear(width, 3, dtype=torch.float64)
        self.kept = self.last.weight.data
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.first(x)).tanh()) * self.scale
        return y + self.kept.sum()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(8, 8, dtype=torch.float64, generator=generator),
            torch.randn(8, 3, dtype=torch.float64, generator=generator),
        )
        for _ in range(count)
    ]


class Both:
    """Members of two widths on the GPU, and the same in plain torch on the host."""

    def __init__(self, **options: Any) -> None:
        self.models, self.plain = [], []
        for seed, width in enumerate((16, 16, 24)):
            torch.manual_seed(seed)
            model = Net(width)
            model.last.bias.register_hook(lambda gradient: gradient * 0.5)
            plain = Net(width)
            plain.load_state_dict(model.state_dict())
            plain.last.bias.register_hook(lambda gradient: gradient * 0.5)
            self.models.append(model)
            self.plain.append(plain)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]
        self.plain_optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.plain]
        members = [
            tm.Member(model, optimizer, name=f"m{i}")
            for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True))
        ]
        self.fleet = tm.Fleet(
            members, loss_fn, batches(1)[0], device="cuda", precision="fp64", lowering="aten", **options
        )

    def step(self, batch: Any) -> None:
        found = self.fleet.step(batch).tolist()
        for model, optimizer, loss in zip(self.plain, self.plain_optimizers, found, strict=True):
            optimizer.zero_grad()
            expected = loss_fn(model, batch)
            expected.backward()
            optimizer.step()
            assert loss == pytest.approx(expected.item(), rel=1e-9)

    def assert_same(self) -> None:
        self.fleet.sync()
        for model, plain in zip(self.models, self.plain, strict=True):
            for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_change_is_noticed_and_taken_over_by_captured_steps() -> None:
    both = Both()
    data = batches(12)
    for batch in data[:4]:
        both.step(batch)
    both.models[0].scale = 0.5
    with pytest.raises(MemberChangedError, match=r"model\.scale"):
        both.fleet.step(data[4])
    both.fleet.refresh("m0")
    both.plain[0].scale = 0.5
    for batch in data[4:8]:
        both.step(batch)
    both.fleet.sync()
    for model in (both.models[1], both.plain[1]):
        with torch.no_grad():
            model.first.weight.mul_(0.5)
    with pytest.raises(MemberChangedError, match=r"first\.weight"):
        both.fleet.step(data[8])
    both.fleet.refresh()
    for batch in data[8:]:
        both.step(batch)
    both.assert_same()


def test_under_a_plan_too() -> None:
    both = Both()
    data = batches(8)
    both.fleet.plan(budget="2GiB", policy="none")
    for batch in data[:3]:
        both.step(batch)
    both.models[2].scale = both.plain[2].scale = 0.5
    both.fleet.refresh("m2")
    for batch in data[3:]:
        both.step(batch)
    both.assert_same()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + torch.randn_like(y)


def test_noise_of_a_planned_evaluation_differs_by_batch_and_repeats() -> None:
    torch.manual_seed(0)
    model = Noisy().double()
    batch = batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    member = tm.Member(model, optimizer, name="a", seed=1)
    fleet = tm.Fleet([member], loss_fn, batch, device="cuda", precision="fp64", lowering="aten")
    fleet.plan(budget="2GiB", policy="none")
    fleet.step(batch)
    one, two = fleet.evaluate([batch])["a"]["loss"], fleet.evaluate([batch] * 2)["a"]["loss"]
    assert one != two
    assert fleet.evaluate([batch])["a"]["loss"] == one
