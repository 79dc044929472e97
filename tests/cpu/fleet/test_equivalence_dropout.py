"""Dropout belongs to the member: its draws depend on its seed and step, not on who trains beside it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import Workload
from equivalence import (
    Outcome,
    assert_equivalent,
    check_dropout,
    drawn_masks,
    mask_fleet,
    members_of,
    snapshot,
    train_fused,
)
from fleet_cases import Made, bn_mlp, mse, sgd, vectors
from odd_models import SERIES, odd
from short_workloads import SHORT
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")


NORMED = odd("normed", functools.partial(bn_mlp, dropout=0.4), mse, lambda seed, dtype: vectors(seed))
LARGER = [SHORT[f"{name}_with_dropout"] for name in ("cnn", "transformer", "lstm", "bert_mlm")]


@pytest.mark.parametrize(
    "workload",
    [NORMED, *(pytest.param(each, marks=pytest.mark.extensive) for each in LARGER)],
    ids=lambda workload: workload.name,
)
def test_a_member_trains_the_same_at_any_width_in_any_slot_and_after_restore(
    workload: Workload, tmp_path: Path
) -> None:
    check_dropout(workload, tmp_path / "checkpoint")


def first_of(inner: nn.Module, num_inputs: int = 1) -> nn.Module:
    """The first result of a module that returns several."""
    return Made(lambda model, x: model.inner(*[x] * num_inputs)[0], inner=inner)


def _attention(model: nn.Module, x: Tensor) -> Tensor:
    """Dropout of attention weights, and nowhere else."""
    query, key, value = model.qkv(x).unsqueeze(1).chunk(3, -1)
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)


def _behind_a_layer(dropout: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), dropout)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: _behind_a_layer(nn.Dropout(0.5)),
    "dropout-in-place": lambda: _behind_a_layer(nn.Dropout(0.5, inplace=True)),
    "alpha-dropout": lambda: _behind_a_layer(nn.AlphaDropout(0.5)),
    "lstm": lambda: first_of(nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)),
    "attention": lambda: Made(_attention, qkv=nn.Linear(4, 12)),
    "multihead-attention": lambda: first_of(nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dropout_draws_by_seed_and_step(kind: str) -> None:
    """Equal weights that do not change: losses differ by the draws alone."""
    batch = torch.randn(3, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    original = KINDS[kind]().double()
    seeds = {"a": 5, "b": 6, "c": None, "twin of a": 5}
    members = [sgd(copy.deepcopy(original), name, lr=0.0, seed=seed) for name, seed in seeds.items()]
    fleet = tm.Fleet(members, lambda m, x: m(x).square().mean(), batch, precision="fp64", lowering="aten")
    steps = [fleet.step(batch) for _ in range(3)]
    for losses in steps:
        torch.testing.assert_close(losses[0], losses[3], rtol=1e-12, atol=0.0)
    drawn = [loss for losses in steps for loss in losses[:3].tolist()]
    assert len(set(drawn)) == len(drawn)


def test_masks_differ_between_members_steps_and_operators_and_repeat_with_the_seed() -> None:
    masks = drawn_masks(mask_fleet({"a": 5, "b": 6, "c": None, "d": None, "twin of a": 5}))
    assert all(torch.equal(x, y) for x, y in zip(masks["a"], masks["twin of a"], strict=True))
    different = [step for name in "abcd" for step in masks[name]]
    for i, one in enumerate(different):
        assert all(not torch.equal(one, other) for other in different[i + 1 :])
        # The second operator drops twice as many: among what it keeps, the first must still drop some.
        assert ((one[0] == 0) & (one[1] != 0)).any()
        assert ((one[0] != 0) & (one[1] == 0)).any()
    again = drawn_masks(mask_fleet({"c": None, "a": 5}))
    assert all(torch.equal(x, y) for name in again for x, y in zip(again[name], masks[name], strict=True))
    drawn = torch.stack(different)
    for operator, p in enumerate((0.25, 0.5)):
        share = drawn[:, operator]
        assert set(share.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
        # 3840 draws: five standard deviations.
        assert abs((share == 0).float().mean().item() - p) < 5 * (p * (1 - p) / share.numel()) ** 0.5


def _drop(model: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A small net that drops hidden units, by its own draw or by a mask that it is given."""
    hidden = torch.tanh(model.first(x))
    # The hidden units are never exactly zero, so that the mask can be told from what is left.
    dropped = model.dropout(hidden) if mask is None else hidden * mask
    return model.second(dropped).square().mean(), (dropped / hidden).detach()


def dropped() -> nn.Module:
    return Made(_drop, first=nn.Linear(8, 16), second=nn.Linear(16, 1), dropout=nn.Dropout(0.4))


def _own_draw(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss, mask = model(batch)
    return loss, {"mask": mask}


def test_forward_and_backward_use_the_mask_that_was_drawn() -> None:
    """Plain torch with the fleet's masks, written out as products, trains the same."""
    workload = odd("dropped", dropped, _own_draw, SERIES)
    batches = [workload.batch(step, torch.float64)[0] for step in range(5)]
    fused = train_fused(
        tm.Fleet(members_of(workload, range(3)), _own_draw, batches[0], precision="fp64"), batches
    )
    alone = []
    for member, outcome in zip(members_of(workload, range(3)), fused, strict=True):
        losses = {}
        for step, batch in enumerate(batches, 1):
            member.optimizer.zero_grad()
            loss, _ = member.model(batch, outcome.results[f"mask {step}"])
            loss.backward()
            member.optimizer.step()
            losses[f"loss {step}"] = loss.detach()
        alone.append(Outcome(snapshot(member.model, member.optimizer), losses))
    assert_equivalent(fused, alone)


def test_restored_draws_outlast_a_second_save(tmp_path: Path) -> None:
    """A fleet whose members were made with other seeds takes over the saved ones, for good."""
    original, once, twice = (mask_fleet({"m": seed}) for seed in (5, 6, 7))
    original.save(tmp_path / "first")
    once.restore(tmp_path / "first")
    once.save(tmp_path / "second")
    twice.restore(tmp_path / "second")
    expected = drawn_masks(original, 1)["m"][0]
    assert torch.equal(drawn_masks(once, 1)["m"][0], expected)
    assert torch.equal(drawn_masks(twice, 1)["m"][0], expected)
