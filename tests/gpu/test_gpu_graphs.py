"""CUDA-graph replay against the reference engine: bitwise, through everything that happens to a fleet."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import map_batch
from small_fleets import assert_same, batch_of, make_fleet, make_member, states
from torch import Tensor, nn

import trainmux as tm


def captured_fleet(models: list[nn.Module], loss: Callable[..., Tensor], batch: Tensor) -> tm.Fleet:
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    return tm.Fleet(members, loss, batch, device="cuda", engine="cuda_graphs", lowering="aten")


def live_through(fleet: tm.Fleet, name: str) -> list[Tensor]:
    """Steps with a stop, a replacement, a drop, a newcomer, another batch size; everything that came of it.

    The device sleeps now and then: the host is ahead.
    """
    seen = []
    for step in range(12):
        batch = batch_of(name, 100 + step)
        if step % 3 == 2:
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        if step == 2:
            fleet.stop("m1")
        if step == 4:
            fleet.replace("m2", make_member(name, 7))
        if step == 6:
            fleet.drop("m0")
        if step == 9:
            fleet.add(make_member(name, 8))
        if step == 7 and name != "dlrm":
            batch = map_batch(lambda leaf: leaf[:2], batch)
        seen += [fleet.step(batch).clone(), fleet.metrics["grad_norm"].clone()]
    return [value.nan_to_num() for value in (*seen, *states(fleet))]


@pytest.mark.parametrize(
    ("name", "precision", "accumulate"),
    [
        ("mlp", "fp32", 1),
        ("cnn", "fp32", 3),
        ("cnn_with_dropout", "bf16", 1),
        ("lstm_with_dropout", "bf16", 1),
        ("transformer_with_dropout", "fp32", 1),
        ("dlrm", "bf16", 1),
        ("gpt2", "bf16", 1),
    ],
)
def test_replay_is_bitwise_the_reference(name: str, precision: str, accumulate: int) -> None:
    options: dict[str, Any] = {"precision": precision, "accumulate": accumulate}
    options |= {"deterministic": True, "lowering": "aten"}
    assert_same(
        *(
            live_through(make_fleet(name, engine=engine, **options), name)
            for engine in ("cuda_graphs", "reference")
        )
    )


def test_large_embedding_backward_is_captured() -> None:
    """Past a few thousand indices torch sorts them, which must not wait for the device."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 1))

    batch = torch.randint(0, 1000, (64, 128))
    fleet = captured_fleet([build(seed) for seed in range(2)], lambda m, x: m(x).square().mean(), batch)
    first = fleet.step(batch)
    for _ in range(5):
        last = fleet.step(batch)
    assert (last < first).all()


def test_a_step_that_cannot_be_captured_runs_node_by_node_with_a_warning() -> None:
    @torch.library.custom_op("trainmux_tests::waits", mutates_args=())
    def waits(x: Tensor) -> Tensor:
        return x * float(x.sum().item() >= -1e30)

    waits.register_fake(torch.empty_like)
    waits.register_autograd(lambda ctx, grad: grad)
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    batch = torch.randn(8, 4)
    fleet = captured_fleet([model], lambda m, x: waits(m(x)).square().mean(), batch)
    with pytest.warns(tm.errors.TrainmuxWarning, match=r"node by node: .*waits.* at .*test_gpu_graphs\.py"):
        fleet.step(batch)
    assert re.match(r"group 0 is not captured .*waits.* at .*test_gpu_graphs\.py", fleet.explain())
    fleet.step(batch)
    fleet.sync()
    assert not torch.equal(model.weight, weight)


def test_a_step_with_constants_of_the_cpu_is_captured() -> None:
    """A table, a range and a scalar that the model makes on the CPU are on the device when the step runs."""
    table = torch.linspace(0, 1, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        shifted = x + table.to(x.device) + torch.arange(4).to(x.device) * torch.tensor(0.5)
        return (model(shifted) - x.cpu().mean(0).to(x.device)).square().mean()

    model, batch = nn.Linear(4, 4), torch.randn(8, 4)
    expected = loss(copy.deepcopy(model), batch)
    fleet = captured_fleet([model], loss, batch)
    assert torch.allclose(fleet.step(batch).cpu(), expected.detach(), rtol=1e-5)
    assert fleet.summary()[0].memory is not None
