"""What models and losses are made of, each by itself: in a fleet as alone, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import (
    Outcome,
    adamw,
    assert_equivalent,
    check_fp64,
    train_alone,
    train_fused,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainmux as tm

NUM_MEMBERS = 3
NUM_STEPS = 20
FEATURES, HIDDEN, CLASSES = 6, 10, 4

Pair = tuple[Tensor, Tensor]


def batches(num_steps: int = NUM_STEPS, *, size: int = 5, seed: int = 0) -> list[Pair]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def models(make: Callable[[], nn.Module], num_members: int = NUM_MEMBERS) -> list[nn.Module]:
    made = []
    for number in range(num_members):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            made.append(make().double().train())
    return made


def cross_entropy(model: nn.Module, batch: Pair) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


# ---- tied, frozen and unused parameters --------------------------------------------------------------


class Tied(nn.Module):
    """One matrix used three times: twice as it is, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head(F.linear(x, self.first.weight.t()))
        return out


def test_tied_weights_train_as_one_and_stay_tied() -> None:
    fleet = check_fp64(models(Tied), cross_entropy, batches())
    for member in fleet.members:
        assert isinstance(member.model, Tied)
        assert member.model.first.weight is member.model.second.weight


class PartlyFrozen(nn.Module):
    """A frozen layer between two that learn; layers and a buffer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.unused = nn.Linear(3, 2)
        self.unused_frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("scale", torch.rand(HIDDEN))
        self.register_buffer("unused_buffer", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.gelu(self.frozen(self.first(x).relu())) * self.scale)
        return out


def test_frozen_and_unused_parameters_are_left_as_they_are() -> None:
    """Those in the optimizer too: torch skips what has no gradient, weight decay included."""
    made = models(PartlyFrozen)
    before = [copy.deepcopy(model.state_dict()) for model in made]
    fleet = check_fp64(made, cross_entropy, batches())
    for member, old in zip(fleet.members, before, strict=True):
        new = member.model.state_dict()
        changed = {name for name in old if not torch.equal(new[name], old[name])}
        assert changed == {"first.weight", "first.bias", "head.weight", "head.bias"}


def test_frozen_parameters_that_all_members_share_are_left_as_they_are() -> None:
    made = models(PartlyFrozen)
    for model in made[1:]:
        model.frozen.load_state_dict(made[0].frozen.state_dict())
        model.scale.copy_(made[0].scale)
    check_fp64(made, cross_entropy, batches())


def test_parameters_outside_the_optimizer_pass_gradients_on_and_do_not_change() -> None:
    def over_the_head(model: nn.Module, number: int) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.head.parameters(), lr=1e-2 * (number + 1))

    check_fp64(models(Tied), cross_entropy, batches(), optimizer=over_the_head)


class WithScalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(()) + 0.5)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x) * self.temperature
        return out


def test_a_scalar_parameter_trains() -> None:
    check_fp64(models(WithScalar), cross_entropy, batches())


# ---- in-place operators ------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Activations and arithmetic that overwrite their input, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.leaky = nn.LeakyReLU(0.1, inplace=True)
        self.register_buffer("average", torch.zeros(HIDDEN))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.leaky(self.first(x))
        hidden = self.second(hidden + F.silu(self.first(x), inplace=True))
        hidden.mul_(0.5).clamp_(-2.0, 2.0)
        hidden[:, ::2] = hidden[:, ::2] * 2.0
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.num_calls += 1
        out: Tensor = self.head(F.elu_(hidden))
        return out


def test_in_place_activations_and_buffer_updates() -> None:
    fleet = check_fp64(models(InPlace), cross_entropy, batches())
    assert [int(member.model.num_calls) for member in fleet.members] == [NUM_STEPS] * NUM_MEMBERS


# ---- losses ------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.5], dtype=torch.float64)


def smoothed(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def smoothed_and_weighted(model: nn.Module, batch: Pair) -> Tensor:
    """Class 0 does not count, the others count differently."""
    return F.cross_entropy(
        model(batch[0]), batch[1], weight=CLASS_WEIGHTS, ignore_index=0, label_smoothing=0.2
    )


def summed(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def squared(model: nn.Module, batch: Pair) -> Tensor:
    wanted = F.one_hot(batch[1], CLASSES).to(batch[0].dtype)
    return F.mse_loss(model(batch[0]).softmax(-1), wanted) + F.smooth_l1_loss(model(batch[0]), wanted)


def with_metrics(model: nn.Module, batch: Pair) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch[0])
    hits = (logits.argmax(-1) == batch[1]).double()
    metrics = {
        "accuracy": hits.mean(),
        "num_hits": hits.sum().long(),
        "logits": logits,
        "entropy": -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean().detach(),
    }
    return F.cross_entropy(logits, batch[1]), metrics


@pytest.mark.parametrize("loss", [smoothed, smoothed_and_weighted, summed, squared, with_metrics])
def test_losses(loss: Callable[[nn.Module, Pair], Any]) -> None:
    fleet = check_fp64(models(mlp), loss, batches())
    if loss is with_metrics:
        assert {"accuracy", "num_hits", "logits", "entropy"} <= fleet.metrics.keys()


def test_members_with_losses_and_batch_sizes_of_their_own() -> None:
    """Three groups in one fleet: two members of one loss, one of another, one of another batch size."""
    made = models(mlp, 4)
    common, own = batches(), batches(size=3, seed=1)
    losses = (cross_entropy, smoothed, cross_entropy, cross_entropy)
    twins = [copy.deepcopy(model) for model in made]
    alone = [
        train_alone(model, adamw(model, number), losses[number], own if number == 3 else common)
        for number, model in enumerate(made)
    ]
    members = [
        tm.Member(
            model,
            adamw(model, number),
            name=f"m{number}",
            loss=losses[number],
            example_batch=own[0] if number == 3 else None,
        )
        for number, model in enumerate(twins)
    ]
    fleet = tm.Fleet(members, example_batch=common[0], precision="fp64")
    assert sorted(group.width for group in fleet.summary()) == [1, 1, 2]
    steps = [
        fleet.step(batch, overrides={"m3": override}) for batch, override in zip(common, own, strict=True)
    ]
    fleet.sync()
    fused = train_fused(fleet, [])
    for number, outcome in enumerate(fused):
        outcome.losses = [step[number] for step in steps]
    assert_equivalent(fused, alone, 1e-10)


# ---- activation checkpointing ------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two blocks, each recomputed in the backward pass; ``reentrant=None`` keeps their activations."""

    def __init__(self, reentrant: bool | None, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(dropout), nn.Linear(HIDDEN, HIDDEN)
            )
            for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
            x = self.dropout(x)
        out: Tensor = self.head(x)
        return out


every_variant = pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])


@every_variant
def test_checkpointed_blocks_equal_plain_torch(reentrant: bool) -> None:
    check_fp64(models(lambda: Checkpointed(reentrant, 0.0)), cross_entropy, batches())


def in_fleet(make: Callable[[], nn.Module]) -> list[Outcome]:
    members = [
        tm.Member(model, adamw(model, number), name=f"m{number}", seed=number)
        for number, model in enumerate(models(make))
    ]
    fed = batches()
    return train_fused(tm.Fleet(members, cross_entropy, fed[0], precision="fp64"), fed)


@every_variant
def test_the_recomputation_of_a_checkpointed_block_draws_the_same_dropout(reentrant: bool) -> None:
    kept = in_fleet(lambda: Checkpointed(None, 0.3))
    recomputed = in_fleet(lambda: Checkpointed(reentrant, 0.3))
    assert_equivalent(recomputed, kept, 1e-12)
