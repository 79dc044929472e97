"""CUDA-graph replay against the reference engine: bitwise, through everything that happens to a fleet."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from equivalence import map_batch
from small_fleets import batch_of, make_fleet, make_member
from torch import Tensor, nn

import trainmux as tm


def replayed_or_not(name: str, engine: str, **options: Any) -> tm.Fleet:
    return make_fleet(name, engine=engine, deterministic=True, lowering="aten", **options)


def live_through(fleet: tm.Fleet, name: str) -> list[Tensor]:
    """Steps with a stop, a replacement, a drop, another batch size; everything that came out of it."""
    seen = []
    for step in range(9):
        batch = batch_of(name, 100 + step)
        if step == 2:
            fleet.stop("m1")
        if step == 4:
            fleet.replace("m2", make_member(name, 7))
        if step == 6:
            fleet.drop("m0")
        if step == 7 and name != "dlrm":
            batch = map_batch(lambda leaf: leaf[:2], batch)
        seen.append(fleet.step(batch).cpu())
        seen.append(fleet.metrics["grad_norm"].cpu())
    fleet.sync()
    for member in fleet.members:
        seen += [tensor.detach().clone() for tensor in (*member.model.parameters(), *member.model.buffers())]
    return seen


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
    replayed, reference = (
        live_through(replayed_or_not(name, engine, precision=precision, accumulate=accumulate), name)
        for engine in ("cuda_graphs", "reference")
    )
    for a, b in zip(replayed, reference, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_capturing_changes_nothing_before_the_first_step() -> None:
    fleet = replayed_or_not("cnn", "cuda_graphs")
    before = [tensor.clone() for tensor in fleet.members[0].model.state_dict().values()]
    fleet.stop("m0")
    fleet.step(batch_of("cnn", 0))
    fleet.sync()
    after = list(fleet.members[0].model.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_large_embedding_backward_is_captured() -> None:
    """Past a few thousand indices torch sorts them, which must not wait for the device."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 1))

    models = [build(seed) for seed in range(2)]
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    batch = torch.randint(0, 1000, (64, 128))
    fleet = tm.Fleet(
        members,
        loss=lambda model, x: model(x).square().mean(),
        example_batch=batch,
        device="cuda",
        engine="cuda_graphs",
        lowering="aten",
    )
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
    fleet = tm.Fleet(
        [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))],
        loss=lambda model, x: waits(model(x)).square().mean(),
        example_batch=batch,
        device="cuda",
        engine="cuda_graphs",
        lowering="aten",
    )
    with pytest.warns(tm.errors.TrainmuxWarning, match="node by node"):
        fleet.step(batch)
    fleet.step(batch)
    fleet.sync()
    assert not torch.equal(model.weight, weight)


def test_step_does_not_wait_for_the_device() -> None:
    fleet = replayed_or_not("mlp", "cuda_graphs")
    batch = batch_of("mlp", 0)
    on_device = tuple(leaf.cuda() for leaf in batch)
    for _ in range(3):
        fleet.step(on_device)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        fleet.step(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
