"""fp32 and bf16: a step is as close to fp64 as in plain torch; and bits that repeat, whoever else trains."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from equivalence import PLAIN, PRECISIONS, check_bits, check_precision, members_of, train_alone, train_fused
from fleet_cases import Made
from odd_models import ODD, SERIES, odd
from short_workloads import SHORT
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("traced_once")

ONE_OF_EACH_KIND = {
    "fp32": ("mlp", "dlrm"),
    "bf16": ("cnn", "lstm", "transformer"),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name,
            precision,
            marks=[] if name in ONE_OF_EACH_KIND[precision] else [pytest.mark.extensive],
        )
        for name in PLAIN
        for precision in PRECISIONS
    ],
)
def test_the_error_of_a_step_is_at_most_three_times_that_of_plain_torch(name: str, precision: str) -> None:
    check_precision(SHORT[name], precision)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.extensive)])
def test_recurrent_layers_straight_over_the_batch(precision: str, request: pytest.FixtureRequest) -> None:
    """For inputs that need no gradient torch has kernels of its own in single precision on a CPU."""
    if precision == "bf16":  # oneDNN has no such LSTM for some processors, and torch may ask it all the same
        request.addfinalizer(partial(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled()))
        torch._C._set_mkldnn_enabled(False)
    check_precision(ODD["recurrent"], precision)


def norm_of_halves() -> nn.Module:
    """Layer norm with parameters in single precision over numbers in half precision, as autocast has it."""
    return Made(
        lambda model, x: model.norm((x + model.shift).bfloat16()),
        shift=nn.Parameter(8.0 + torch.rand(8)),
        norm=nn.LayerNorm(8),
    )


def _weighted_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out: Tensor = model(batch[0])
    assert out.dtype == torch.bfloat16
    return (out.float() * batch[0].cos()).sum()


def test_layer_norm_of_halves_keeps_its_statistics_in_single_precision() -> None:
    workload = odd("halves", norm_of_halves, _weighted_sum, SERIES)
    batch = SERIES(0, torch.float32)
    fused, plain = (
        members_of(
            workload,
            range(3),
            dtype=torch.float32,
            optimizer=lambda model, _: torch.optim.SGD(model.parameters(), lr=1.0),
        )
        for _ in range(2)
    )
    before = [member.model.shift.detach().clone() for member in plain]
    found = train_fused(tm.Fleet(fused, _weighted_sum, batch, lowering="aten"), [batch])
    for member, outcome, old in zip(plain, found, before, strict=True):
        wanted = train_alone(member.model, member.optimizer, _weighted_sum, [batch]).tensors["shift"] - old
        assert (outcome.tensors["shift"] - old - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.usefixtures("built_once")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cnn_with_dropout", {"precision": "bf16"}),
        pytest.param("lstm", {}, marks=pytest.mark.extensive),
        ("transformer_with_dropout", {}),
        ("dlrm", {"deterministic": True}),
    ],
    ids=["cnn-bf16", "lstm", "transformer", "dlrm-deterministic"],
)
def test_bits_repeat_and_do_not_depend_on_the_other_members(name: str, options: dict[str, object]) -> None:
    check_bits(SHORT[name], **options)  # type: ignore[arg-type]
