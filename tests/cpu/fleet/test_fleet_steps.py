"""What a step does to every member: clipping, accumulation, short batches, results without waiting."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    adam_member,
    assert_alone,
    assert_close,
    assert_trains_alone,
    bn_cnn,
    count_work,
    dropout_member,
    images,
    mlp,
    mse,
    mse_with_metrics,
    same_bits,
    sgd_member,
    state_of,
    states_of,
    train_alone,
    vectors,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")

# ---- clipping ------------------------------------------------------------------------------------------

CLIPS: list[dict[str, float]] = [
    {},
    {"clip_norm": 0.05},
    {"clip_value": 0.01},
    {"clip_norm": 1e6},
    {"clip_norm": 0.5, "clip_value": 0.02},
    {"clip_norm": math.inf},
]


def clipped(i: int) -> Member:
    """The gradient itself must be clipped: SGD shows its size, which Adam would hide."""
    return sgd_member(i, **CLIPS[i])


def test_clipping_is_each_members_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported norm is that of the gradient before clipping."""
    work = count_work(monkeypatch)
    fleet = Fleet([clipped(i) for i in range(len(CLIPS))], mse, EXAMPLE)
    assert_trains_alone(fleet, clipped, BATCHES[:3])
    assert work.traces == work.fusions == 1
    norms = Fleet([clipped(i) for i in range(len(CLIPS))], mse, EXAMPLE)
    norms.step(EXAMPLE)
    for i in range(len(CLIPS)):
        alone = clipped(i)
        mse(alone.model, EXAMPLE).backward()
        expected = torch.stack([p.grad.norm() for p in alone.model.parameters()]).norm()
        torch.testing.assert_close(norms.metrics["grad_norm"][i], expected, rtol=TOLERANCE, atol=0.0)


def test_the_norm_counts_parameters_that_the_optimizer_does_not_hold() -> None:
    """As ``clip_grad_norm_(model.parameters())`` does."""

    def make(i: int) -> Member:
        model = mlp(i)
        return Member(
            model, torch.optim.SGD(model[2].parameters(), lr=0.1 * (i + 1)), f"m{i}", clip_norm=0.05
        )

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE)
    assert_trains_alone(fleet, make, BATCHES[:3])


def test_clipping_in_single_precision() -> None:
    def make(i: int) -> Member:
        model = mlp(i, dtype=torch.float32)
        return Member(model, torch.optim.SGD(model.parameters(), lr=0.1), f"m{i}", **CLIPS[i])

    batches = [vectors(seed, dtype=torch.float32) for seed in range(4)]
    fleet = Fleet([make(i) for i in range(len(CLIPS))], mse, batches[0])
    for batch in batches:
        fleet.step(batch)
    states = states_of(fleet)
    for i, name in enumerate(fleet.names):
        alone = make(i)
        train_alone(alone, batches)
        assert_close(states[name], state_of(alone), share=1e-5)


# ---- accumulation --------------------------------------------------------------------------------------


def cnn_member(i: int) -> Member:
    model = bn_cnn(i)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (i + 1))
    return Member(model, optimizer, f"m{i}", clip_norm=0.3 if i else None)


def test_accumulation_is_the_mean_over_micro_batches() -> None:
    """Losses are the micro-batch's own, and running statistics move with every one of them."""
    batches = [images(seed) for seed in range(6)]
    fleet = Fleet([cnn_member(i) for i in range(2)], mse, batches[0], accumulate=3, precision="fp64")
    assert_trains_alone(fleet, cnn_member, batches, accumulate=3)


def test_weights_wait_for_the_last_micro_batch_and_buffers_do_not() -> None:
    batches = [images(seed) for seed in range(3)]
    fleet = Fleet([cnn_member(i) for i in range(2)], mse, batches[0], accumulate=3)
    states = [states_of(fleet)["m0"]]
    for batch in batches:
        fleet.step(batch)
        states.append(states_of(fleet)["m0"])
    weights = [{k: v for k, v in state.items() if k.startswith("parameter")} for state in states]
    means = [state["buffer 1.running_mean"] for state in states]
    for earlier, later in itertools.pairwise(weights[:3]):
        assert all(same_bits(earlier[name], later[name]) for name in earlier)
    assert not any(same_bits(weights[2][name], weights[3][name]) for name in weights[0])
    assert not any(same_bits(one, other) for one, other in itertools.pairwise(means))
    assert [int(state["buffer 1.num_batches_tracked"]) for state in states] == [0, 1, 2, 3]
    assert "state 0 step" not in states[2]
    assert states[3]["state 0 step"] == 1


def test_accumulation_of_a_double_model_in_a_fleet_of_singles() -> None:
    """``precision="fp32"`` leaves a model its own dtype: a third must then be a third in fp64."""

    def make(i: int) -> Member:
        model = mlp(i, dtype=(torch.float32, torch.float64)[i])
        return Member(model, torch.optim.SGD(model.parameters(), lr=0.1), f"m{i}")

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (model(x.to(model[0].weight.dtype)) - y).square().mean()

    fleet = Fleet([make(i) for i in range(2)], loss, EXAMPLE, accumulate=3)
    for batch in BATCHES[:3]:
        fleet.step(batch)
    assert_alone(fleet, (make(1), BATCHES[:3]), loss=loss, accumulate=3)


# ---- batches of another size ---------------------------------------------------------------------------


def test_a_short_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [*BATCHES[:2], vectors(50, size=2), *BATCHES[3:5], vectors(51, size=2), BATCHES[5]]
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    work = count_work(monkeypatch)
    assert_trains_alone(fleet, adam_member, batches)
    assert work.traces == 1  # once for both short batches
    assert work.fusions == 1


# ---- results -------------------------------------------------------------------------------------------


def test_losses_and_metrics_have_a_row_per_member() -> None:
    fleet = Fleet([adam_member(i) for i in range(3)], mse_with_metrics, EXAMPLE)
    assert fleet.metrics == {}
    losses = fleet.step(EXAMPLE)
    metrics = fleet.metrics
    assert list(metrics) == ["grad_norm", "finite", "largest", "per_output"]
    assert metrics["finite"].tolist() == [True] * 3
    assert {key: tuple(value.shape) for key, value in metrics.items()} == {
        "grad_norm": (3,),
        "finite": (3,),
        "largest": (3,),
        "per_output": (3, 2),
    }
    for i in range(3):
        loss, expected = mse_with_metrics(adam_member(i).model, EXAMPLE)
        torch.testing.assert_close(losses[i], loss.detach(), rtol=TOLERANCE, atol=0.0)
        for key, value in expected.items():
            torch.testing.assert_close(metrics[key][i], value.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def test_results_of_a_step_are_not_overwritten_by_the_next() -> None:
    fleet = Fleet([adam_member(i) for i in range(2)], mse_with_metrics, EXAMPLE)
    losses, metrics = fleet.step(EXAMPLE), fleet.metrics
    kept = losses.clone(), {key: value.clone() for key, value in metrics.items()}
    fleet.step(BATCHES[1])
    assert same_bits(losses, kept[0])
    assert all(same_bits(metrics[key], value) for key, value in kept[1].items())


class _NoHostReads(TorchDispatchMode):
    """Refuses everything that would make the host wait for a device."""

    FORBIDDEN = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.FORBIDDEN, f"{func} during a step"
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [dropout_member(0), dropout_member(1, clip_norm=0.1, clip_value=0.1), sgd_member(2)]
    for member in members:
        member.scheduler = torch.optim.lr_scheduler.StepLR(member.optimizer, 1, 0.9)
    fleet = Fleet(members, mse_with_metrics, EXAMPLE, accumulate=2)
    fleet.stop("m2")
    fleet.drop("m0")

    def refuse(self: Tensor, *args: Any) -> Any:
        raise AssertionError("a tensor was read on the host during a step")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, refuse)
    results = []
    with _NoHostReads():
        for batch in BATCHES[:4]:
            results.append((fleet.step(batch), fleet.metrics))
    monkeypatch.undo()
    for losses, metrics in results:
        assert torch.isfinite(losses).all()
        assert metrics["finite"].tolist() == [True, True]


class _Spare(nn.Module):
    """Parameters in the optimizer that no gradient reaches, that are frozen, and that have no dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.used = mlp(seed)
        self.scale = nn.Parameter(torch.tensor(1.0 + seed, dtype=torch.float64))
        self.unused = nn.Parameter(torch.full((3,), float(seed), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((2,), 1.0 + seed, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.scale * self.frozen


def test_parameters_of_every_kind() -> None:
    """Those without gradients stay as they are: weight decay too passes them by, as in torch."""

    def make(i: int) -> Member:
        model = _Spare(i)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        return Member(model, optimizer, f"m{i}", clip_norm=0.1)

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE)
    assert_trains_alone(fleet, make, BATCHES[:3])
