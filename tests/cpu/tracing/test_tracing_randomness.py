"""Random operators as functions of counters: right distributions, and nothing drawn from torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from tracing_tools import joint, kinds, run, targets

from trainmux.ir import OutputKind
from trainmux.tracing import TracedGraph

N = 20_000


class Draws(nn.Module):
    """Shows what ``draw(x)`` gives, as a metric; the parameter is there to have a loss."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


def loss(model: Draws, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return model.weight * 2, {"drawn": model(x)}


def assert_draws_nothing(traced: TracedGraph) -> None:
    """Nothing comes from torch's own generator."""
    seeded = torch.Tag.nondeterministic_seeded
    assert not any(seeded in getattr(target, "tags", ()) for target in targets(traced))


def drawn(draw: Callable[[Tensor], Tensor], x: Tensor, *, seed: int = 1, counter: int = 0) -> Tensor:
    model = Draws(draw)
    traced = joint(model, loss, x)
    assert_draws_nothing(traced)
    return run(traced, model, x, seed=seed, counter=counter)[OutputKind.METRIC, "drawn"]


# Name: the draw from x of N elements, dtype of x, and the scipy distribution that it must follow.
CONTINUOUS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "rand": (lambda x: torch.rand(N), stats.uniform()),
    "rand double": (lambda x: torch.rand(N, dtype=torch.float64), stats.uniform()),
    "rand_like": (lambda x: torch.rand_like(x), stats.uniform()),
    "randn": (lambda x: torch.randn(N), stats.norm()),
    "randn double": (lambda x: torch.randn(N, dtype=torch.float64), stats.norm()),
    "randn_like": (lambda x: torch.randn_like(x), stats.norm()),
    "uniform_": (lambda x: torch.empty(N).uniform_(-2, 3), stats.uniform(-2, 5)),
    "normal_": (lambda x: torch.empty(N).normal_(2, 3), stats.norm(2, 3)),
    "normal sizes": (lambda x: torch.normal(2.0, 3.0, (N,)), stats.norm(2, 3)),
    "normal mean": (lambda x: torch.normal(torch.full((N,), 2.0), 3.0), stats.norm(2, 3)),
    "normal std": (lambda x: torch.normal(2.0, torch.full((N,), 3.0)), stats.norm(2, 3)),
    "normal both": (
        lambda x: torch.normal(torch.full((N,), 2.0), torch.full((N,), 3.0)),
        stats.norm(2, 3),
    ),
    "normal broadcast mean": (
        lambda x: torch.normal(torch.full((1,), 2.0), torch.full((N,), 3.0)),
        stats.norm(2, 3),
    ),
    "exponential_": (lambda x: torch.empty(N).exponential_(0.5), stats.expon(scale=2)),
    "rrelu": (lambda x: F.rrelu(-torch.ones_like(x), 0.1, 0.4, training=True), stats.uniform(-0.4, 0.3)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_draws_follow_their_distribution(name: str) -> None:
    draw, distribution = CONTINUOUS[name]
    sample = drawn(draw, torch.ones(N))
    reference = draw(torch.ones(N))
    assert (sample.shape, sample.dtype) == (reference.shape, reference.dtype)
    values = sample.double().numpy()
    assert stats.kstest(values, distribution.cdf).pvalue > 1e-3
    low, high = distribution.support()
    assert low <= values.min() <= values.max() <= high


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_below_one_and_have_the_right_mean(dtype: torch.dtype) -> None:
    uniform = drawn(lambda x: torch.rand_like(x), torch.ones(N, dtype=dtype))
    assert uniform.dtype == dtype
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert uniform.double().mean().item() == pytest.approx(0.5, abs=0.02)
    normal = drawn(lambda x: torch.randn_like(x), torch.ones(N, dtype=dtype))
    assert normal.dtype == dtype
    assert normal.double().std().item() == pytest.approx(1.0, abs=0.03)
    assert normal.isfinite().all()


# Name: the draw, and the probability of each value.
DISCRETE: dict[str, tuple[Callable[[Tensor], Tensor], dict[float, float]]] = {
    "bernoulli": (lambda x: torch.bernoulli(torch.full((N,), 0.3)), {0: 0.7, 1: 0.3}),
    "bernoulli p": (lambda x: torch.bernoulli(x, 0.3), {0: 0.7, 1: 0.3}),
    "bernoulli_ p": (lambda x: torch.empty(N).bernoulli_(0.3), {0: 0.7, 1: 0.3}),
    "bernoulli_ tensor": (lambda x: torch.empty(N).bernoulli_(torch.tensor(0.3)), {0: 0.7, 1: 0.3}),
    "randint": (lambda x: torch.randint(4, (N,)), dict.fromkeys(range(4), 0.25)),
    "randint low": (lambda x: torch.randint(-2, 3, (N,)), dict.fromkeys(range(-2, 3), 0.2)),
    "randint float": (lambda x: torch.randint(4, (N,), dtype=torch.float32), dict.fromkeys(range(4), 0.25)),
    "randint_like": (lambda x: torch.randint_like(x, 4), dict.fromkeys(range(4), 0.25)),
    "randint_like low": (lambda x: torch.randint_like(x, 1, 5), dict.fromkeys(range(1, 5), 0.25)),
    "randint_like dtype": (
        lambda x: torch.randint_like(x, 4, dtype=torch.int64),
        dict.fromkeys(range(4), 0.25),
    ),
    "dropout": (lambda x: F.dropout(x, 0.25), {0: 0.25, 1 / 0.75: 0.75}),
    "feature dropout": (
        lambda x: F.dropout1d(x.view(1, -1, 2), 0.25)[0, :, 0].repeat(2),
        {0: 0.25, 1 / 0.75: 0.75},
    ),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_draws_follow_their_distribution(name: str) -> None:
    draw, probabilities = DISCRETE[name]
    sample = drawn(draw, torch.ones(N))
    reference = draw(torch.ones(N))
    assert (sample.shape, sample.dtype) == (reference.shape, reference.dtype)
    rounded = sample.double().mul(1000).round().div(1000)
    expected = {round(value, 3): probability for value, probability in probabilities.items()}
    assert set(rounded.unique().tolist()) == set(expected)
    for value, probability in expected.items():
        share = (rounded == value).double().mean().item()
        assert abs(share - probability) < 8 * math.sqrt(probability * (1 - probability) / N)


def test_a_permutation_has_every_number_once_and_is_fair() -> None:
    permutation = drawn(lambda x: torch.randperm(50, dtype=torch.int32), torch.ones(1))
    assert permutation.dtype == torch.int32
    assert permutation.sort().values.tolist() == list(range(50))
    model = Draws(lambda x: torch.randperm(3))
    traced = joint(model, loss, torch.ones(1))
    seen: dict[tuple[int, ...], int] = {}
    for counter in range(300):
        outputs = run(traced, model, torch.ones(1), counter=counter)
        order = tuple(outputs[OutputKind.METRIC, "drawn"].tolist())
        seen[order] = seen.get(order, 0) + 1
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3
    assert len(seen) == 6


# ---- what a draw depends on ------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_counter_alone() -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.rand_like(x)

    x = torch.ones(100)
    first = drawn(noise, x, seed=1, counter=5)
    assert torch.equal(first, drawn(noise, x, seed=1, counter=5))
    assert not torch.equal(first, drawn(noise, x, seed=2, counter=5))
    assert not torch.equal(first, drawn(noise, x, seed=1, counter=6))


@pytest.mark.parametrize(
    ("draw", "dtype"), [(torch.rand_like, torch.float32), (torch.randn_like, torch.float64)]
)
def test_two_draws_of_one_step_differ(draw: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    both = drawn(lambda x: torch.stack([draw(x), draw(x)]), torch.ones(N, dtype=dtype))
    assert abs(torch.corrcoef(both)[0, 1]) < 5 / math.sqrt(N)


def test_a_double_draw_uses_more_than_32_bits() -> None:
    sample = drawn(lambda x: torch.rand_like(x), torch.ones(1000).double())
    low_bits = (sample * 2**53).long() & 0x1FFFFF
    assert low_bits.unique().numel() > 900


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_at_its_limits(p: float) -> None:
    x = torch.arange(10.0)
    expected = x if p == 0 else torch.zeros(10)
    assert torch.equal(drawn(lambda v: F.dropout(v, p), x), expected)


def test_dropout_passes_gradients_where_it_passes_values() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(1.0, 41.0).double())

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.weight * x, 0.5)

    def total(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(x)
        return out.sum(), {"out": out}

    model, x = Net(), torch.full((40,), 3.0).double()
    traced = joint(model, total, x)
    outputs = run(traced, model, x, seed=4)
    kept = outputs[OutputKind.METRIC, "out"] != 0
    assert 5 < kept.sum() < 35
    expected = torch.where(kept, 6.0, 0.0).double()
    assert torch.equal(outputs[OutputKind.GRADIENT, "weight"], expected)
    assert kinds(traced, OutputKind.GRADIENT) == ["weight"]


@pytest.mark.parametrize(
    "module",
    [nn.Dropout1d(0.3), nn.FeatureAlphaDropout(0.3), nn.RReLU()],
    ids=lambda module: type(module).__name__,
)
def test_random_modules_train_and_hold_still_in_evaluation(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), module).double()
    x = torch.randn(4, 5, 6).double()

    def square(m: nn.Module, v: Tensor) -> Tensor:
        return m(v).square().mean()

    traced = joint(model, square, x)
    assert_draws_nothing(traced)
    first = run(traced, model, x, seed=1)[OutputKind.LOSS, "loss"]
    assert first != run(traced, model, x, seed=2)[OutputKind.LOSS, "loss"]
    assert first == run(traced, model, x, seed=1)[OutputKind.LOSS, "loss"]


def test_gumbel_softmax_is_traced() -> None:
    sample = drawn(lambda x: F.gumbel_softmax(x.view(-1, 4).log(), hard=True), torch.ones(N))
    shares = sample.mean(0)
    assert torch.equal(sample.sum(1), torch.ones(N // 4))
    assert (shares - 0.25).abs().max() < 0.03
