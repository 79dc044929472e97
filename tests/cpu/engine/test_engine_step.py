"""A step program: its phases in order, members' own numbers, and frozen members untouched."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_tools import Batch, HandFleet, TinyNet, build_fleet, tiny_batch, tiny_loss
from torch import Tensor, fx, nn

from trainmux.engine import StepProgram
from trainmux.engine._program import TAIL_INPUTS
from trainmux.ir import InputKind, Phase
from trainmux.tracing import FakeTensor

WIDTH = 3


def adamw(index: int, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01 * (index + 1), weight_decay=0.1 * index)


def sgd(index: int, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1 / (index + 1), momentum=0.5)


PROGRAMS: dict[Any, StepProgram] = {}


def tiny_fleet(make_optimizer: Any = adamw, *, dropout: float = 0.0, **options: Any) -> HandFleet:
    """Members of their own each time; the program holds no state and is built once."""
    models = [TinyNet(seed, dropout).double() for seed in range(WIDTH)]
    key = (make_optimizer, dropout, *sorted(options.items()))
    fleet = build_fleet(models, make_optimizer, tiny_batch(0), program=PROGRAMS.get(key), **options)
    PROGRAMS[key] = fleet.program
    return fleet


@pytest.fixture(scope="module")
def graph() -> fx.Graph:
    return tiny_fleet(dropout=0.5, clips_norm=True).program.module.graph


def in_place(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# ---- the graph -------------------------------------------------------------------------------------------


def test_phases_come_in_order_and_only_the_update_changes_memory(graph: fx.Graph) -> None:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    order = [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
    ranks = [order.index(node.meta["phase"]) for node in nodes]
    assert set(ranks) == {0, 1, 2}
    assert ranks == sorted(ranks)
    assert {node.meta["phase"] for node in nodes if in_place(node)} == {Phase.UPDATE}


def test_placeholders_are_the_documented_arguments_in_order() -> None:
    program = tiny_fleet(accumulates=True).program
    names = [node.name for node in program.module.graph.find_nodes(op="placeholder")]
    settings = program.settings
    assert len(names) == (
        len(program.inputs) + len(settings.state_keys()) + len(settings.parameters) + len(TAIL_INPUTS)
    )
    assert [name.removeprefix("state_") for name in names[-len(TAIL_INPUTS) :]] == list(TAIL_INPUTS)
    first = next(iter(program.module.graph.nodes))
    assert first.name == names[0]
    assert program.metrics == ("largest",)


class WithConstant(nn.Module):
    """A constant tensor that is no buffer, used forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.table = torch.arange(1.0, 4.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.table).sin()


def with_constant_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean() + torch.tensor([1.0, 2.0], dtype=torch.float64).sum()


def test_constants_are_real() -> None:
    fleet = build_fleet([WithConstant(), WithConstant()], sgd, tiny_batch(0), with_constant_loss)
    module = fleet.program.module
    constants = dict(module.named_buffers())
    assert constants
    assert not any(isinstance(value, FakeTensor) for value in constants.values())
    assert not any(isinstance(value, FakeTensor) for value in vars(module).values())
    assert_trains_like_torch(fleet, with_constant_loss, num_steps=2)


# ---- numbers ---------------------------------------------------------------------------------------------


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], loss_fn: Any
) -> Tensor:
    optimizer.zero_grad()
    for batch in batches:
        result = loss_fn(model, batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()  # torch may give two parameters one gradient
    return loss.detach()


def assert_trains_like_torch(
    fleet: HandFleet, loss_fn: Any = tiny_loss, *, num_steps: int = 3, clip: float | None = None
) -> None:
    models = [copy.deepcopy(model) for model in fleet.models]
    optimizers = [
        type(optimizer)(model.parameters(), **fleet_settings(optimizer))
        for optimizer, model in zip(fleet.optimizers, models, strict=True)
    ]
    for step in range(num_steps):
        batches = [tiny_batch(10 * step + i) for i in range(len(models))]
        loss, norm, finite, *_ = fleet.step(batches)
        assert finite.all()
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            expected = plain_step(model, optimizer, [batches[i]], loss_fn)
            learning = [p for p in model.parameters() if p.grad is not None]
            limit = torch.inf if clip is None else clip * (i + 1)
            total = nn.utils.clip_grad_norm_(learning, limit)
            optimizer.step()
            torch.testing.assert_close(loss[i], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(norm[i], total, rtol=1e-12, atol=1e-12)
    for (_, name), stacked in fleet.tensors.items():
        for i, model in enumerate(models):
            own = dict(model.named_parameters()) | dict(model.named_buffers())
            torch.testing.assert_close(stacked[i], own[name].detach(), rtol=1e-11, atol=1e-12)


def fleet_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (group,) = optimizer.param_groups
    return {name: group[name] for name in ("lr", "weight_decay", "momentum", "betas") if name in group}


class SharesGradient(nn.Module):
    """Two parameters with one and the same gradient, a third with a view of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = (nn.Parameter(torch.randn(3, 3).double()) for _ in range(2))
        self.flat = nn.Parameter(torch.randn(9).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b + self.flat.view(3, 3))


def shared_gradient_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_parameters_that_share_a_gradient(clip: float | None) -> None:
    models = [SharesGradient(seed) for seed in range(WIDTH)]
    fleet = build_fleet(models, adamw, tiny_batch(0), shared_gradient_loss, clips_norm=clip is not None)
    if clip is not None:
        fleet.limits[0] = clip * torch.arange(1, WIDTH + 1, dtype=torch.float64)
    assert_trains_like_torch(fleet, shared_gradient_loss, clip=clip)


class Returned(nn.Module):
    """A loss whose gradient, metric and buffer are one and the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(0)
        self.seen.copy_(total)
        return total


def returned_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    total = model(batch["x"])
    return (model.weight * total).sum(), {"total": total}


def test_a_gradient_that_is_also_a_metric_and_a_buffer_is_not_overwritten() -> None:
    fleet = build_fleet([Returned(), Returned()], sgd, tiny_batch(0), returned_loss)
    fleet.active[1] = False
    batches = [tiny_batch(1), tiny_batch(2)]
    *_, total = fleet.step(batches)
    for i, batch in enumerate(batches):
        torch.testing.assert_close(total[i], batch["x"].sum(0))
    torch.testing.assert_close(fleet.tensors[InputKind.BUFFER, "seen"][0], batches[0]["x"].sum(0))


# ---- frozen members --------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int64) if tensor.dtype == torch.float64 else tensor


def rows(fleet: HandFleet, member: int) -> dict[str, Tensor]:
    return {name: bits(tensor[member].clone()) for name, tensor in fleet.held().items()}


def assert_same_rows(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert set(first) == set(second)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def trained(fleet: HandFleet, num_steps: int = 2, first_seed: int = 0, spoil: int | None = None) -> HandFleet:
    for step in range(num_steps):
        batches = [tiny_batch(first_seed + 10 * step + i) for i in range(WIDTH)]
        if spoil is not None:
            batches[spoil]["x"][0, 0] = torch.nan
        fleet.step(batches)
    return fleet


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
@pytest.mark.parametrize("options", [{}, {"clips_norm": True, "clips_value": True}, {"accumulates": True}])
def test_an_inactive_member_keeps_every_bit(make_optimizer: Any, options: dict[str, bool]) -> None:
    fleet = trained(tiny_fleet(make_optimizer, **options))
    # Both signs of zero, tiny and huge values must survive too.
    special = torch.tensor([-0.0, 0.0, 5e-324, -1e300, 1e-30], dtype=torch.float64)
    for name, tensor in fleet.held().items():
        if tensor.is_floating_point() and "var" not in name and "_sq" not in name:
            flat = tensor[1].view(-1)
            flat[: min(5, flat.numel())] = special[: min(5, flat.numel())]
    fleet.active[1] = False
    before = rows(fleet, 1)
    trained(fleet, first_seed=50)
    assert_same_rows(before, rows(fleet, 1))
    assert fleet.updates.tolist() == [4, 2, 4]
    assert fleet.alive.all()


@pytest.mark.parametrize("options", [{}, {"clips_norm": True}, {"accumulates": True}])
def test_a_member_that_turns_nan_keeps_every_bit_and_is_reported(options: dict[str, bool]) -> None:
    fleet = trained(tiny_fleet(**options))
    before = rows(fleet, 1)
    batches = [tiny_batch(70 + i) for i in range(WIDTH)]
    batches[1]["y"][0, 0] = torch.inf
    loss, _, finite, *_ = fleet.step(batches)
    assert finite.tolist() == [True, False, True]
    assert not loss[1].isfinite()
    assert fleet.alive.tolist() == [True, False, True]
    assert_same_rows(before, rows(fleet, 1))
    trained(fleet, first_seed=80)
    assert fleet.alive.tolist() == [True, False, True]
    assert_same_rows(before, rows(fleet, 1))


@pytest.mark.parametrize("options", [{}, {"clips_norm": True}, {"dropout": 0.5}])
def test_what_happens_to_one_member_changes_no_bit_of_another(options: dict[str, Any]) -> None:
    plain = trained(tiny_fleet(**options), num_steps=3)
    spoiled = trained(tiny_fleet(**options), num_steps=3, spoil=1)
    absent = tiny_fleet(**options)
    absent.active[1] = False
    trained(absent, num_steps=3)
    for member in (0, 2):
        assert_same_rows(rows(plain, member), rows(spoiled, member))
        assert_same_rows(rows(plain, member), rows(absent, member))


def test_the_same_step_twice_is_the_same_bit_for_bit() -> None:
    first, second = (trained(tiny_fleet(dropout=0.5), num_steps=3) for _ in range(2))
    for member in range(WIDTH):
        assert_same_rows(rows(first, member), rows(second, member))
