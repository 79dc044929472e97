"""Random operators as functions of counters: right distributions, and nothing drawn from torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from tracing_tools import doubles, joint, run, square_loss, targets

from trainmux.errors import TraceError
from trainmux.ir import OutputKind

aten = torch.ops.aten

N = 20_000
X = torch.ones(N)


class Drawing(nn.Module):
    """A weight times whatever ``draw`` makes of the input."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.weight.to(x.dtype) * x)


def loss(model: Drawing, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(x)
    return model.weight * 2, {"drawn": out}


def drawn(draw: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result of a draw whose graph takes nothing from torch's own generator."""
    model = Drawing(draw)
    traced = joint(model, loss, x)
    seeded = torch.Tag.nondeterministic_seeded
    assert not any(seeded in getattr(target, "tags", ()) for target in targets(traced.module))
    return run(traced, model, x, seed=1)[OutputKind.METRIC, "drawn"]


UNIFORM, NORMAL, SHIFTED = stats.uniform(), stats.norm(), stats.norm(2, 3)
COIN, DICE = {0: 0.7, 1: 0.3}, dict.fromkeys(range(4), 0.25)
TWO, THREE = torch.full((N,), 2.0), torch.full((N,), 3.0)

# Draws of N numbers, with their distribution or the probability of each value.
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "rand": (lambda x: torch.rand(N), UNIFORM),
    "rand double": (lambda x: torch.rand(N, dtype=torch.float64), UNIFORM),
    "rand_like": (lambda x: torch.rand_like(x), UNIFORM),
    "randn": (lambda x: torch.randn(N), NORMAL),
    "randn double": (lambda x: torch.randn(N, dtype=torch.float64), NORMAL),
    "randn_like": (lambda x: torch.randn_like(x), NORMAL),
    "uniform_": (lambda x: torch.empty(N).uniform_(-2, 3), stats.uniform(-2, 5)),
    "normal_": (lambda x: torch.empty(N).normal_(2, 3), SHIFTED),
    "normal sizes": (lambda x: torch.normal(2.0, 3.0, (N,)), SHIFTED),
    "normal mean": (lambda x: torch.normal(TWO, 3.0), SHIFTED),
    "normal std": (lambda x: torch.normal(2.0, THREE), SHIFTED),
    "normal both": (lambda x: torch.normal(TWO, THREE), SHIFTED),
    "normal broadcast mean": (lambda x: torch.normal(TWO[:1], THREE), SHIFTED),
    "exponential_": (lambda x: torch.empty(N).exponential_(0.5), stats.expon(scale=2)),
    "rrelu": (lambda x: F.rrelu(-torch.ones_like(x), 0.1, 0.4, training=True), stats.uniform(-0.4, 0.3)),
    "bernoulli": (lambda x: torch.bernoulli(torch.full((N,), 0.3)), COIN),
    "bernoulli p": (lambda x: torch.bernoulli(x, 0.3), COIN),
    "bernoulli_ p": (lambda x: torch.empty(N).bernoulli_(0.3), COIN),
    "bernoulli_ tensor": (lambda x: torch.empty(N).bernoulli_(torch.tensor(0.3)), COIN),
    "randint": (lambda x: torch.randint(4, (N,)), DICE),
    "randint low": (lambda x: torch.randint(-2, 3, (N,)), dict.fromkeys(range(-2, 3), 0.2)),
    "randint float": (lambda x: torch.randint(4, (N,), dtype=torch.float32), DICE),
    "randint_like": (lambda x: torch.randint_like(x, 4), DICE),
    "randint_like low": (lambda x: torch.randint_like(x, 1, 5), dict.fromkeys(range(1, 5), 0.25)),
    "randint_like dtype": (lambda x: torch.randint_like(x, 4, dtype=torch.int64), DICE),
    "dropout": (lambda x: F.dropout(x, 0.25), {0: 0.25, 1 / 0.75: 0.75}),
    "feature dropout": (
        lambda x: F.dropout1d(x.view(1, -1, 2), 0.25)[0, :, 0].repeat(2),
        {0: 0.25, 1 / 0.75: 0.75},
    ),
    "gumbel softmax": (lambda x: F.gumbel_softmax(x.view(-1, 4).log(), hard=True), {0: 0.75, 1: 0.25}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_their_distribution(name: str) -> None:
    draw, distribution = DRAWS[name]
    sample, reference = drawn(draw, X), draw(X)
    assert (sample.shape, sample.dtype) == (reference.shape, reference.dtype)
    values = sample.double().flatten()
    if not isinstance(distribution, dict):
        assert stats.kstest(values.numpy(), distribution.cdf).pvalue > 1e-3
        low, high = distribution.support()
        assert low <= values.min() <= values.max() <= high
        return
    found = Counter(values.mul(1000).round().div(1000).tolist())
    assert set(found) == {round(value, 3) for value in distribution}
    for value, probability in distribution.items():
        spread = math.sqrt(probability * (1 - probability) / N)
        assert abs(found[round(value, 3)] / N - probability) < 8 * spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_below_one_and_have_the_right_mean(dtype: torch.dtype) -> None:
    uniform = drawn(torch.rand_like, X.to(dtype))
    assert uniform.dtype == dtype
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert uniform.double().mean().item() == pytest.approx(0.5, abs=0.02)
    normal = drawn(torch.randn_like, X.to(dtype))
    assert normal.dtype == dtype
    assert normal.double().std().item() == pytest.approx(1.0, abs=0.03)
    assert normal.isfinite().all()


def test_a_permutation_has_every_number_once_and_is_fair() -> None:
    permutation = drawn(lambda x: torch.randperm(50, dtype=torch.int32), torch.ones(1))
    assert permutation.dtype == torch.int32
    assert permutation.sort().values.tolist() == list(range(50))
    model = Drawing(lambda x: torch.randperm(3))
    traced = joint(model, loss, torch.ones(1))
    runs = [run(traced, model, torch.ones(1), counter=counter) for counter in range(300)]
    seen = Counter(tuple(outputs[OutputKind.METRIC, "drawn"].tolist()) for outputs in runs)
    assert len(seen) == 6
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3


def test_a_double_draw_uses_more_than_32_bits() -> None:
    sample = drawn(torch.rand_like, X[:1000].double())
    low_bits = (sample * 2**53).long() & 0x1FFFFF
    assert low_bits.unique().numel() > 900


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_at_its_limits(p: float) -> None:
    x = torch.arange(10.0)
    assert torch.equal(drawn(lambda v: F.dropout(v, p), x), x * (1 - p))


class LayerDrop(nn.Module):
    """Skips its layer as Hugging Face's speech models do, for a whole batch."""

    def __init__(self, skips: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.skips = nn.Linear(3, 3).double(), skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x if self.training and self.skips(torch.rand([])) else self.layer(x)


@pytest.mark.parametrize(
    ("skips", "num_layers"),
    [
        (lambda draw: draw < 0.0, 2),
        (lambda draw: torch.lt(draw, 0), 2),
        (lambda draw: not draw >= 0, 2),
        (lambda draw: draw < 1.0, 1),
        (lambda draw: draw <= 1, 1),
        (lambda draw: draw > 1.0, 2),
    ],
)
def test_a_layer_that_is_never_or_always_skipped_is_traced(skips: Any, num_layers: int) -> None:
    found = targets(joint(LayerDrop(skips), square_loss, doubles(4, 3)).module)
    assert found.count(aten.addmm.default) == num_layers
    assert not any("random" in str(target) for target in found)


@pytest.mark.parametrize("skips", [lambda draw: draw < 0.1, lambda draw: draw > 0, lambda draw: draw.item()])
def test_a_layer_that_is_sometimes_skipped_is_refused_with_the_setting_to_change(skips: Any) -> None:
    with pytest.raises(TraceError, match=r"random number at .*test_tracing_randomness.*layerdrop"):
        joint(LayerDrop(skips), square_loss, doubles(4, 3))
