"""Models that nobody wrote fusion rules for: each must train fused as it trains alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainmux as tm
from trainmux.errors import TraceError

F64 = torch.float64


class UNet(nn.Module):
    """Group norm, strided and transposed convolution, skip connection, two kinds of upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.up = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.silu(self.norm(self.enter(x)))
        low = F.silu(self.down(high))
        small = F.avg_pool2d(x, 2)
        out: Tensor = self.leave(torch.cat([high, self.up(low)], 1))
        return (
            out + F.interpolate(small, scale_factor=2, mode="bilinear") + F.interpolate(small, scale_factor=2)
        )


class Recurrent(nn.Module):
    """Bidirectional GRU, then a loop over cells written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 6, 2, batch_first=True, bidirectional=True)
        self.cell, self.leave = nn.LSTMCell(12, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        sequence, _ = self.gru(x)
        state: tuple[Tensor, Tensor] | None = None
        for t in range(sequence.shape[1]):
            state = self.cell(sequence[:, t], state)
        assert state is not None
        out: Tensor = self.leave(state[0])
        return out


class Routed(nn.Module):
    """Top-k routing over experts: gather, scatter, sort-like operators."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        gates = torch.zeros(x.shape[0], 3, dtype=x.dtype).scatter(1, chosen, weights)
        parts = [gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class GaussianProcess(nn.Module):
    """Distances, Cholesky factorization, triangular solves; scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.noise = nn.Parameter(torch.rand(3)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        distance = torch.cdist(x * self.scale, x * self.scale)
        kernel = torch.exp(-(distance**2)) + (self.noise**2 + 0.1) * torch.eye(len(x), dtype=x.dtype)
        factor = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y.unsqueeze(1), factor)
        return 0.5 * (y @ solved).sum() + factor.diagonal().log().sum()


class Shuffled(nn.Module):
    """Sorting, cumulative sums, in-place writes to slices, statistics, a reassigned buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 5)
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x).cumsum(1)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean((0, 1))
        z = y.sort(1).values.flip(1).roll(1, 1) + y.std(1, keepdim=True) + y.median(1, keepdim=True).values
        z = z.clone()
        z[:, 0] = z[:, 1] * 2
        z[:, ::2] += 1
        out: Tensor = torch.where(z > 0, z, z * 0.1).amax(1) + torch.clamp(y, -1, 1).prod(1)
        return out


class Spectrum(nn.Module):
    """Fourier transforms and complex values between real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gains, self.enter = nn.Parameter(torch.randn(9)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfft(torch.fft.rfft(self.enter(x)) * self.gains, n=16)
        return out


def _sequential_pool() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)),
        nn.InstanceNorm2d(8, affine=True),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def _temporal() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, dilation=2)),
        nn.BatchNorm1d(8),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 5))


def _critic() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def _regress(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _likelihood(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = model(*batch)
    return result


def _gradient_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    result: Tensor = model(x).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
    return result


def _labelled(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(shape, dtype=F64), torch.randint(0, 5, shape[:1]))


def _targets(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(shape, dtype=F64), torch.randn(shape, dtype=F64))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[], Any]


def _eigenvalues(model: nn.Module, x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eig(model(x))
    return values.abs().sum() + vectors.abs().sum()


def _resized(model: nn.Module, x: Tensor) -> Tensor:
    """Torch's kernels copy along an axis whose size a scale of 1.1 leaves as it is."""
    y = model(x)
    modes = ("nearest", "nearest-exact", "bilinear", "bicubic")
    resized = [F.interpolate(y, scale_factor=(2.5, 1.1), mode=mode) for mode in modes]
    resized.append(F.interpolate(y[:, 0], scale_factor=1.1, mode="linear"))
    return torch.stack([(each**2).mean() for each in resized]).sum()


class Checkpointed(nn.Module):
    """Attention that the backward pass computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                *self.enter(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
            )

        mixed = checkpoint(attend, x, use_reentrant=False)
        out: Tensor = self.leave(mixed.transpose(1, 2).flatten(2).mean(1))
        return out


class Bag(nn.Module):
    """Maxima of bags, one of them empty; two rows of the table are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 4, mode="max")
        with torch.no_grad():
            self.bag.weight[1] = self.bag.weight[0]

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.bag(indices, offsets)
        return out


CASES = {
    "unet": Case(UNet, _regress, _targets(2, 3, 8, 8)),
    "recurrent": Case(Recurrent, _classify, _labelled(4, 3, 8)),
    "routed": Case(Routed, _classify, _labelled(6, 8)),
    "gaussian_process": Case(
        GaussianProcess, _likelihood, lambda: (torch.randn(6, 3, dtype=F64), torch.randn(6, dtype=F64))
    ),
    "shuffled": Case(Shuffled, _classify, _labelled(4, 6, 8)),
    "spectrum": Case(Spectrum, _regress, _targets(4, 16)),
    "spectral_instance_norm": Case(_sequential_pool, _classify, _labelled(4, 3, 8, 8)),
    "weight_norm": Case(_temporal, _classify, _labelled(4, 8, 6)),
    "encoder_layer": Case(_attention, _classify, _labelled(4, 6, 8)),
    "gradient_penalty": Case(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        _gradient_penalty,
        _targets(4, 8),
    ),
    "binary_cross_entropy": Case(
        lambda: nn.Sequential(nn.Linear(8, 3), nn.Sigmoid()),
        lambda model, batch: F.binary_cross_entropy(model(batch[0]), batch[1].sigmoid()),
        lambda: (torch.randn(4, 8, dtype=F64), torch.randn(4, 3, dtype=F64)),
    ),
    "checkpointed_attention": Case(Checkpointed, _classify, _labelled(4, 6, 8)),
    "eigenvalues": Case(lambda: nn.Linear(5, 5), _eigenvalues, lambda: torch.randn(5, 5, dtype=F64)),
    "labels_up_to_minus_one": Case(
        lambda: nn.Linear(8, 5),
        lambda model, batch: F.multilabel_margin_loss(model(batch[0]), batch[1]),
        lambda: (torch.randn(3, 8, dtype=F64), torch.tensor([[0, 2, -1, 1, 3], [-1] * 5, [4, 3, 2, 1, 0]])),
    ),
    "sizes_kept_in_spite_of_a_scale": Case(
        lambda: nn.Linear(6, 6), _resized, lambda: torch.randn(2, 3, 4, 6, dtype=F64)
    ),
    "bags_with_equal_rows": Case(
        Bag,
        lambda model, batch: (model(batch[0], batch[1]) * batch[2]).sum(),
        lambda: (torch.tensor([0, 1, 2, 1, 0, 3]), torch.tensor([0, 3, 3]), torch.randn(3, 4, dtype=F64)),
    ),
}


def _optimizer(model: nn.Module, position: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01 * (position + 1), momentum=0.9)


@pytest.mark.parametrize("name", CASES)
def test_trains_fused_as_alone(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    batches = [case.batch() for _ in range(4)]
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(case.build().double())
    alone = copy.deepcopy(models)
    members = [tm.Member(model, _optimizer(model, i)) for i, model in enumerate(models)]
    fleet = tm.Fleet(members, loss=case.loss, example_batch=batches[0], precision="fp64")
    assert len(fleet.summary()) == 1
    for batch in batches:
        fleet.step(batch)
    fleet.sync()
    for position, (fused, reference) in enumerate(zip(models, alone, strict=True)):
        optimizer = _optimizer(reference, position)
        for batch in batches:
            optimizer.zero_grad()
            case.loss(reference, batch).backward()
            optimizer.step()
        expected, got = reference.state_dict(), fused.state_dict()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")


def test_operators_without_a_batching_rule_are_looped_over_and_said() -> None:
    case = CASES["weight_norm"]
    members = [tm.Member(model, _optimizer(model, 0)) for model in (case.build().double() for _ in range(2))]
    text = tm.Fleet(members, loss=case.loss, example_batch=case.batch(), precision="fp64").explain()
    assert "fell back" in text
    assert "_weight_norm_interface" in text
    assert "loop" in text


class Diagonal(nn.Module):
    """Factorizes a diagonal matrix, which fails where an entry is negative."""

    def __init__(self, entry: float) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.tensor([1.0, entry], dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.linalg.cholesky(torch.diag(self.entries)) ** 2).sum() + x.sum() * 0


def test_a_factorization_that_fails_freezes_only_its_member() -> None:
    models = [Diagonal(1.0), Diagonal(-1.0), Diagonal(2.0)]
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    batch = torch.zeros(2, dtype=F64)
    fleet = tm.Fleet(members, loss=lambda model, x: model(x), example_batch=batch)
    losses = fleet.step(batch)
    assert torch.isnan(losses).tolist() == [False, True, False]
    assert list(fleet.stopped()) == ["member-1"]
    fleet.sync()
    assert models[1].entries.tolist() == [1.0, -1.0]
    torch.testing.assert_close(models[2].entries, torch.tensor([0.9, 1.9], dtype=F64))


class _Solved(torch.autograd.Function):
    """Hands its argument on; its gradient is the solution of a system with it on the diagonal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.linalg.solve(torch.diag(x), gradient)


def test_a_factorization_that_fails_in_the_backward_pass_freezes_only_its_member() -> None:
    models = [nn.Linear(2, 1, bias=False).double() for _ in range(3)]
    for model, entry in zip(models, (1.0, 0.0, 2.0), strict=True):
        nn.init.constant_(model.weight, 1.0)
        with torch.no_grad():
            model.weight[0, 1] = entry
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.5)) for model in models]
    batch = torch.zeros(2, dtype=F64)

    def loss(model: nn.Linear, x: Tensor) -> Tensor:
        return _Solved.apply(model.weight[0]).sum() + x.sum()

    fleet = tm.Fleet(members, loss=loss, example_batch=batch)
    assert fleet.step(batch).tolist() == [2.0, 1.0, 3.0]
    assert list(fleet.stopped()) == ["member-1"]
    fleet.sync()
    assert [model.weight.tolist() for model in models] == [[[0.5, 0.5]], [[1.0, 0.0]], [[0.5, 1.75]]]


def test_a_loss_with_a_data_dependent_check_is_refused_with_its_line() -> None:
    model = nn.Linear(4, 2)
    batch = torch.randn(3, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return F.gaussian_nll_loss(y[:, 0], y[:, 1], y[:, 1] ** 2)

    with pytest.raises(TraceError, match="depends on the values") as caught:
        tm.Fleet([tm.Member(model, _optimizer(model, 0))], loss=loss, example_batch=batch)
    assert caught.value.location is not None
    assert "test_models_without_rules.py" in caught.value.location
