"""Deferred, bucketed and immediate updates on CUDA: the same numbers, less memory.

Operator by operator the bits are the same. In compiled code products and sums that stand in other kernels are
contracted otherwise, and the last bit may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from settled import settle
from torch import Tensor, nn

import trainmux as tm
from trainmux.lowering import compiler_missing

MODES = ("deferred", "bucketed", "immediate")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, eps=1e-3),  # else rounding becomes whole steps
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, centered=True, momentum=0.5),
    "adadelta": lambda p, lr: torch.optim.Adadelta(p, lr=100 * lr),
}


class Net(nn.Module):
    """Layers and norms; ``kink`` is a slope without bound at zero behind the first layer."""

    def __init__(self, size: int, num_layers: int, *, kink: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, size, bias=False)
        self.kink = kink
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(num_layers))
        self.last = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kink:
            x = x.square().sqrt()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).tanh()
        return self.last(x)


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 16, generator=generator)
    return x.cuda(), x.sum(1, keepdim=True).sin().cuda()


def fleet_of(
    update: str,
    *,
    lowering: str = "aten",
    size: int = 256,
    num_layers: int = 4,
    kink: bool = False,
    optimizer: str = "adamw",
) -> tm.Fleet:
    """Four members; with ``kink`` the gradient of m1's first layer is not finite."""
    members = []
    for number in range(4):
        torch.manual_seed(number)
        net = Net(size, num_layers, kink=kink)
        if kink and number == 1:
            nn.init.zeros_(net.first.weight)
        made = OPTIMIZERS[optimizer](net.parameters(), lr=1e-3 * (number + 1))
        members.append(tm.Member(net, made, name=f"m{number}"))
    return tm.Fleet(
        members, loss, batch(0), device="cuda", update=update, lowering=lowering, deterministic=True
    )


def state_of(fleet: tm.Fleet) -> dict[str, Tensor]:
    fleet.sync()
    found: dict[str, Tensor] = {}
    for member in fleet.members:
        found |= {f"{member.name} {key}": v.detach().clone() for key, v in member.model.state_dict().items()}
        for number, state in enumerate(member.optimizer.state.values()):
            found |= {f"{member.name} {number} {key}": torch.as_tensor(v).clone() for key, v in state.items()}
    return found


def assert_alike(got: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    """Differences of at most a share of the largest element of each tensor."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.double().abs().max().item()
        assert (got[name].double() - value.double()).abs().max().item() <= share * scale, name


def needs_a_compiler() -> None:
    missing = compiler_missing(torch.device("cuda", 0))
    if missing:
        pytest.skip(missing)


@pytest.mark.parametrize(
    ("optimizer", "lowering"), [*((name, "aten") for name in OPTIMIZERS), ("adamw", "inductor")]
)
def test_all_modes_train_alike(optimizer: str, lowering: str) -> None:
    if lowering == "inductor":
        needs_a_compiler()
    states = []
    for update in MODES:
        fleet = fleet_of(update, lowering=lowering, optimizer=optimizer)
        for number in range(5):
            fleet.step(batch(number))
        states.append(state_of(fleet))
    for state in states[1:]:
        assert_alike(state, states[0], 0.0 if lowering == "aten" else 1e-4)


@pytest.mark.parametrize(
    ("name", "lowering"), [("mobilenet", "aten"), ("gpt2", "aten"), ("dlrm", "inductor")]
)
def test_small_workloads_train_alike(name: str, lowering: str) -> None:
    if lowering == "inductor":
        needs_a_compiler()
    workload = SMALL[name]
    states = []
    for update in MODES:
        members = []
        for number in range(2):
            model = workload.build(number).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (number + 1), eps=1e-3)
            members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
        options: dict[str, Any] = {"device": "cuda", "lowering": lowering, "deterministic": True}
        fleet = tm.Fleet(members, workload.loss, workload.batch(0, torch.float32), update=update, **options)
        for number in range(3):
            fleet.step(workload.batch(number, torch.float32))
        states.append(state_of(fleet))
    for state in states[1:]:
        assert_alike(state, states[0], 1e-4)


def test_an_immediate_update_reserves_less() -> None:
    size, num_layers = 2048, 8
    found = {}
    for update in ("deferred", "immediate"):
        fleet = fleet_of(update, size=size, num_layers=num_layers)
        for number in range(2):
            fleet.step(batch(number))
        memory = fleet.summary()[0].memory
        assert memory is not None
        assert memory.predicted_bytes is not None
        assert memory.reserved_bytes == pytest.approx(memory.predicted_bytes, rel=0.03)
        found[update] = memory
        del fleet
        settle()
    one = 4 * size * size * 4
    saved = found["deferred"].reserved_bytes - found["immediate"].reserved_bytes
    assert saved >= (num_layers - 4) * one  # one is made, one used up, and some room beside them


@pytest.mark.parametrize("update", MODES)
def test_a_plan_trains_to_the_same_numbers(update: str) -> None:
    # Not AdamW, whose first steps make whole steps of rounding.
    plain, planned = (fleet_of(mode, optimizer="nesterov") for mode in ("deferred", update))
    peak = planned.plan(policy="none").peak_bytes
    plan = planned.plan(int(0.95 * peak))
    assert plan.peak_bytes <= 0.95 * peak
    for number in range(4):
        losses = planned.step(batch(number)), plain.step(batch(number))
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
    got, expected = state_of(planned), state_of(plain)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("update", MODES)
def test_a_gradient_that_is_not_finite_stops_its_member_alone(update: str) -> None:
    fleet = fleet_of(update, kink=True)
    before = state_of(fleet)
    for number in range(3):
        assert torch.isfinite(fleet.step(batch(number))).all()
        assert fleet.metrics["finite"].tolist() == [True, False, True, True]
    assert list(fleet.stopped()) == ["m1"]
    after = state_of(fleet)
    changed = {key for key in before if key.startswith("m1 ") and not torch.equal(after[key], before[key])}
    assert "m1 first.weight" not in changed
    assert bool(changed) == (update == "immediate")
    assert not torch.equal(after["m0 first.weight"], before["m0 first.weight"])
