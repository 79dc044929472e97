"""fp32 and bf16: a step in a fleet is as close to fp64 as the same step in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from benchmarks.workloads import SMALL, Workload
from equivalence import PLAIN, PRECISIONS, check_precision, clone, train_alone, train_fused
from short_workloads import SHORT
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("traced_once")

every_precision = pytest.mark.parametrize("precision", PRECISIONS)


RELATIVES = (
    "bottleneck",
    "mobilenet",
    "lstm_untied",
    "lstm_translation",
    "dlrm_joint",
    "bert_nsp",
    "vit",
    "gpt2",
)
"""Models that have a near relative among the others: in single precision one of each kind is enough."""
NEAR_RELATIVES = ("bottleneck", "lstm_untied", "dlrm_joint", "bert_nsp")
"""Those with no operator that the others have not: one of each kind is enough in half precision too."""
LEFT_OUT = {"fp32": RELATIVES, "bf16": NEAR_RELATIVES}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=pytest.mark.extensive)
        if name in LEFT_OUT[precision]
        else (name, precision)
        for name in PLAIN
        for precision in PRECISIONS
    ],
)
def test_the_error_of_a_step_is_at_most_three_times_that_of_plain_torch(name: str, precision: str) -> None:
    is_long = name in ("lstm", "lstm_untied")  # eight steps of equal cells
    check_precision(SHORT[name] if is_long else SMALL[name], precision)


class Recurrent(nn.Module):
    """A recurrent layer straight over the batch: its input needs no gradient.

    torch then has kernels of its own for single precision on a CPU.
    """

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = cell(4, 6, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


def _build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _series(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1.0).square().mean()


@every_precision
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_straight_over_the_batch(
    cell: type[nn.RNNBase], precision: str, request: pytest.FixtureRequest
) -> None:
    if precision == "bf16":  # oneDNN has no such LSTM for some processors, and torch may ask it all the same
        request.addfinalizer(partial(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled()))
        torch._C._set_mkldnn_enabled(False)
    check_precision(
        Workload(cell.__name__, partial(_build, partial(Recurrent, cell)), _mean_square, _series), precision
    )


class NormOfHalves(nn.Module):
    """Layer norm with parameters in single precision over numbers in half precision, as autocast has it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(8.0 + torch.rand(16))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm((x + self.shift).bfloat16())
        return out


def _weighted_sum(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    assert out.dtype == torch.bfloat16
    return (out.float() * x.cos()).sum()


def test_layer_norm_of_halves_keeps_its_statistics_in_single_precision() -> None:
    models = [_build(NormOfHalves, seed) for seed in range(3)]
    batch = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    twins = [clone(model) for model in models]
    members = [tm.Member(twin, torch.optim.SGD(twin.parameters(), lr=1.0)) for twin in twins]
    fused = train_fused(tm.Fleet(members, _weighted_sum, batch, lowering="aten"), [batch])
    for model, outcome in zip(models, fused, strict=True):
        before = model.shift.detach().clone()
        train_alone(model, torch.optim.SGD(model.parameters(), lr=1.0), _weighted_sum, [batch])
        update, wanted = outcome.tensors["shift"] - before, model.shift.detach() - before
        assert (update - wanted).norm() <= 1e-3 * wanted.norm()
