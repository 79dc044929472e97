"""Dropout belongs to the member: its draws depend on its seed and step, not on who trains beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from equivalence import (
    WITH_DROPOUT,
    MaskProbe,
    Outcome,
    assert_equivalent,
    check_dropout,
    drawn_masks,
    masks_as_metrics,
    snapshot,
    train_fused,
)
from short_workloads import SHORT
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_member_trains_the_same_at_any_width_in_any_slot_and_after_restore(
    name: str, tmp_path: Path
) -> None:
    check_dropout(SHORT[name], tmp_path / "checkpoint")


class Recurrent(nn.Module):
    """Dropout between the layers of a recurrent network, and nowhere else."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = cell(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)[0]
        return out


class Attention(nn.Module):
    """Dropout of attention weights, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, -1)
        out: Tensor = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        return out


class MultiheadAttention(nn.Module):
    """The same inside torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


def _behind_a_layer(dropout: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), dropout)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: _behind_a_layer(nn.Dropout(0.5)),
    "dropout-in-place": lambda: _behind_a_layer(nn.Dropout(0.5, inplace=True)),
    "dropout1d": lambda: _behind_a_layer(nn.Dropout1d(0.5)),
    "alpha-dropout": lambda: _behind_a_layer(nn.AlphaDropout(0.5)),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "attention": Attention,
    "multihead-attention": MultiheadAttention,
}


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dropout_draws_by_seed_and_step(kind: str) -> None:
    """Equal weights that do not change: losses differ by the draws alone."""
    batch = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    original = KINDS[kind]().double()
    members = []
    for name, seed in {"a": 5, "b": 6, "c": None, "d": None, "twin of a": 5}.items():
        model = copy.deepcopy(original)
        members.append(tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.0), name=name, seed=seed))
    fleet = tm.Fleet(members, mean_square, batch, precision="fp64")
    steps = [fleet.step(batch) for _ in range(3)]
    for losses in steps:
        torch.testing.assert_close(losses[0], losses[4], rtol=1e-12, atol=0.0)
    drawn = [loss for losses in steps for loss in losses[:4].tolist()]
    assert len(set(drawn)) == len(drawn)


def test_masks_differ_between_members_steps_and_operators_and_repeat_with_the_seed() -> None:
    masks = drawn_masks({"a": 5, "b": 6, "c": None, "d": None, "twin of a": 5})
    assert all(torch.equal(x, y) for x, y in zip(masks["a"], masks["twin of a"], strict=True))
    different = [step for name in "abcd" for step in masks[name]]
    for i, one in enumerate(different):
        assert all(not torch.equal(one, other) for other in different[i + 1 :])
        # The second operator drops twice as many: among what it keeps, the first must still drop some.
        assert ((one[0] == 0) & (one[1] != 0)).any()
        assert ((one[0] != 0) & (one[1] == 0)).any()
    again = drawn_masks({"c": None, "a": 5})
    assert all(torch.equal(x, y) for name in again for x, y in zip(again[name], masks[name], strict=True))


def test_masks_drop_the_given_share_and_scale_the_rest() -> None:
    masks = torch.stack([step for steps in drawn_masks({"a": 1, "b": 2}, 10).values() for step in steps])
    for operator, p in enumerate((0.25, 0.5)):
        drawn = masks[:, operator]
        assert set(drawn.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
        # 6400 draws: five standard deviations.
        assert abs((drawn == 0).float().mean().item() - p) < 5 * (p * (1 - p) / drawn.numel()) ** 0.5


class Dropped(nn.Module):
    """A small net that drops hidden units, by its own draw or by a mask that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        # The hidden units are never exactly zero, so that the mask can be told from what is left.
        dropped = self.dropout(hidden) if mask is None else hidden * mask
        return self.second(dropped).square().mean(), (dropped / hidden).detach()


def own_draw(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss, mask = model(batch)
    return loss, {"mask": mask}


def test_forward_and_backward_use_the_mask_that_was_drawn() -> None:
    """Plain torch with the fleet's masks, written out as products, trains the same."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(Dropped().double())
    batches = list(torch.randn(10, 8, 6, dtype=torch.float64))
    members = []
    for number, model in enumerate(models):
        twin = Dropped().double()
        twin.load_state_dict(model.state_dict())
        members.append(tm.Member(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), name=f"m{number}"))
    fused = train_fused(tm.Fleet(members, own_draw, batches[0], precision="fp64"), batches)
    alone = []
    for model, outcome in zip(models, fused, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            loss, _ = model(batch, outcome.metrics[step]["mask"])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        alone.append(Outcome(snapshot(model, optimizer), losses))
    assert_equivalent(fused, alone, 1e-10)


def test_restored_draws_outlast_a_second_save(tmp_path: Path) -> None:
    """A fleet whose members were made with other seeds takes over the saved ones, for good."""
    batch = torch.ones(64, 5)

    def fleet_of(seed: int | None) -> tm.Fleet:
        model = MaskProbe()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return tm.Fleet([tm.Member(model, optimizer, name="m", seed=seed)], masks_as_metrics, batch)

    def masks(fleet: tm.Fleet) -> Tensor:
        fleet.step(batch)
        return fleet.metrics["first"][0]

    original = fleet_of(5)
    original.save(tmp_path / "first")
    expected = masks(original)
    once = fleet_of(6)
    once.restore(tmp_path / "first")
    once.save(tmp_path / "second")
    assert torch.equal(masks(once), expected)
    twice = fleet_of(7)
    twice.restore(tmp_path / "second")
    assert torch.equal(masks(twice), expected)
