"""On a GPU a fleet gives every member the numbers it would have alone: the CPU's suite, on CUDA.

The reference is plain eager torch on the same device. Less than four minutes on an H200.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import SMALL
from equivalence import (
    LOOSER,
    PLAIN,
    PRECISIONS,
    WITH_DROPOUT,
    adamw,
    assert_equivalent,
    assert_same_bits,
    batch_to,
    batches_of,
    check_bits,
    check_dropout,
    check_fp64,
    check_precision,
    drawn_masks,
    models_of,
    train_alone,
    train_fused,
)
from test_equivalence_convolution import Everything2d
from test_equivalence_convolution import batches as image_batches
from test_equivalence_convolution import loss as image_loss
from test_equivalence_convolution import models as image_models
from test_equivalence_features import Checkpointed, cross_entropy
from test_equivalence_features import batches as vector_batches
from test_equivalence_features import models as vector_models
from torch import Tensor, nn

import trainmux as tm

DEVICE = "cuda"
NUM_MEMBERS = 6
NUM_STEPS = 50


# ---- fp64 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_fifty_steps_of_six_members_equal_training_one_by_one(name: str) -> None:
    workload = SMALL[name]
    check_fp64(
        models_of(workload, NUM_MEMBERS, device=DEVICE),
        workload.loss,
        batches_of(workload, NUM_STEPS, device=DEVICE),
        device=DEVICE,
        looser=LOOSER.get(name),
    )


@pytest.mark.parametrize("name", ["transformer", "dlrm"])
def test_members_with_batches_of_their_own_equal_training_one_by_one(name: str) -> None:
    workload = SMALL[name]
    check_fp64(
        models_of(workload, 3, device=DEVICE),
        workload.loss,
        [batches_of(workload, 20, device=DEVICE, seed=1000 * number) for number in range(3)],
        device=DEVICE,
        data="per_member",
    )


def test_convolutions_equal_plain_torch() -> None:
    check_fp64(
        [model.to(DEVICE) for model in image_models(Everything2d)],
        image_loss,
        [batch_to(batch, DEVICE) for batch in image_batches()],
        device=DEVICE,
    )


def test_models_and_batches_may_stay_on_the_host() -> None:
    """Members are copied to the device and back: the host's own run is the reference."""
    workload = SMALL["cnn"]
    models, twins, batches = models_of(workload, 3), models_of(workload, 3), batches_of(workload, 20)
    alone = [
        train_alone(model, adamw(model, number), workload.loss, batches)
        for number, model in enumerate(models)
    ]
    members = [tm.Member(model, adamw(model, number)) for number, model in enumerate(twins)]
    fleet = tm.Fleet(members, workload.loss, batches[0], device=DEVICE, precision="fp64", lowering="aten")
    fused = train_fused(fleet, batches)
    assert all(tensor.device.type == "cpu" for outcome in fused for tensor in outcome.tensors.values())
    assert_equivalent(fused, alone, 1e-10, looser=LOOSER["cnn"])


# ---- fp32 and bf16 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", PLAIN)
def test_the_error_of_a_step_is_at_most_three_times_that_of_plain_torch(name: str, precision: str) -> None:
    check_precision(SMALL[name], precision, device=DEVICE)


# ---- dropout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_member_trains_the_same_at_any_width_in_any_slot_and_after_restore(
    name: str, tmp_path: Path
) -> None:
    check_dropout(SMALL[name], tmp_path / "checkpoint", device=DEVICE)


def test_the_host_and_the_device_draw_the_same_masks() -> None:
    seeds = {"a": 5, "b": -(2**63), "c": None}
    on_host, on_device = drawn_masks(seeds), drawn_masks(seeds, device=DEVICE)
    for name in seeds:
        assert all(torch.equal(a, b) for a, b in zip(on_host[name], on_device[name], strict=True))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_the_recomputation_of_a_checkpointed_block_draws_the_same_dropout(reentrant: bool) -> None:
    batches = [batch_to(batch, DEVICE) for batch in vector_batches()]

    def train(reentrant: bool | None) -> Any:
        models = [model.to(DEVICE) for model in vector_models(lambda: Checkpointed(reentrant, 0.3))]
        members = [tm.Member(model, adamw(model, number), seed=number) for number, model in enumerate(models)]
        fleet = tm.Fleet(members, cross_entropy, batches[0], device=DEVICE, precision="fp64", lowering="aten")
        return train_fused(fleet, batches)

    assert_equivalent(train(reentrant), train(None), 1e-12)


# ---- bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn_with_dropout", "lstm", "transformer_with_dropout", "dlrm"])
def test_bits_repeat_and_do_not_depend_on_the_other_members(name: str) -> None:
    check_bits(SMALL[name], device=DEVICE, deterministic=True)


@pytest.mark.parametrize("name", ["residual", "bert_mlm_with_dropout", "gpt2", "vit"])
def test_bits_repeat(name: str) -> None:
    check_bits(SMALL[name], device=DEVICE, deterministic=True, others=False)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_bits_repeat_in_bf16(name: str) -> None:
    check_bits(SMALL[name], device=DEVICE, precision="bf16", deterministic=True, others=False)


class LongAttention(nn.Module):
    """Attention over sequences of several blocks, whose backward pass adds up gradients of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (1, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        return F.scaled_dot_product_attention(*parts)


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_over_long_sequences_repeats_bit_for_bit(precision: str) -> None:
    batch = torch.randn(1, 2048, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def train() -> Any:
        members = []
        for number in range(2):
            torch.manual_seed(number)
            model = LongAttention().to(DEVICE)
            members.append(tm.Member(model, adamw(model, number), name=f"m{number}"))
        fleet = tm.Fleet(
            members,
            _mean_square,
            batch,
            device=DEVICE,
            precision=precision,
            deterministic=True,
            lowering="aten",
        )
        return train_fused(fleet, [batch] * 5)

    first = train()
    for again in (train(), train()):
        for one, other in zip(first, again, strict=True):
            assert_same_bits(one, other)
