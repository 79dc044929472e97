"""Models and losses that each show one thing torch allows: all must train fused as they train alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.workloads import Workload
from benchmarks.workloads.seeding import seeded, seeded_generator
from fleet_cases import Made
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = Callable[[int, torch.dtype], Any]

# ---- parameters and buffers --------------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix used three times: twice as it is, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(F.linear(x, self.first.weight.t()))


class PartlyFrozen(nn.Module):
    """A frozen layer between two that learn; unused layers and buffers; a parameter without dimensions."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 6), nn.Linear(6, 5)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused, self.unused_frozen = nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False)
        self.temperature = nn.Parameter(torch.rand(()) + 0.5)
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("unused_buffer", torch.rand(3))
        if shared:  # by all members
            for tensor in (*self.frozen.parameters(), self.scale):
                tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.frozen(self.first(x).relu())) * self.scale) * self.temperature


def _in_place(model: Any, x: Tensor) -> Any:
    hidden = model.second(model.leaky(model.first(x)) + F.silu(model.first(x), inplace=True))
    hidden.mul_(0.5).clamp_(-2.0, 2.0)
    hidden[:, ::2] = hidden[:, ::2] * 2.0
    model.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
    model.num_calls += 1
    return model.head(F.elu_(hidden))


def in_place() -> nn.Module:
    """Activations and arithmetic that overwrite their input, and a buffer that counts."""
    layers = {"first": nn.Linear(8, 6), "second": nn.Linear(6, 6), "head": nn.Linear(6, 5)}
    buffers = {"average": torch.zeros(6), "num_calls": torch.zeros((), dtype=torch.long)}
    return Made(_in_place, **layers, **buffers, leaky=nn.LeakyReLU(0.1, inplace=True))


class Aliases(nn.Module):
    """Keeps tensors that share memory with parameters and buffers: views, in containers, in closures."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer = nn.Linear(8, 8).double()  # another dtype later would break the views
        self.register_buffer("rows", torch.zeros(4, 8, dtype=torch.float64))
        self.data, self.transposed = layer.weight.data, layer.weight.t()
        self.part = {"rows": (layer.weight.detach()[2:4, 1:], 1)}
        self.row = self.rows[1]
        self.scaled = functools.partial(torch.mul, layer.bias)
        self.penalty = lambda: layer.weight.square().mean()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        with torch.no_grad():
            self.rows[1] += y.mean(0)
        y = y @ self.transposed + F.linear(x, self.data) + self.part["rows"][0].sum()
        return y + self.row + self.scaled(2.0) + self.penalty()


def shares_gradient() -> nn.Module:
    """Two parameters with one and the same gradient, a third with a view of it."""
    first, second, flat = (nn.Parameter(torch.randn(shape)) for shape in ((8, 5), (8, 5), (40,)))
    code = lambda model, x: x @ (model.first + model.second + model.flat.view(8, 5))  # noqa: E731
    return Made(code, first=first, second=second, flat=flat)


def one_element() -> nn.Module:
    """A parameter of a single element, which is updated by itself, beside a large one."""
    code = lambda model, x: model.layer(x)[:, :5] * model.scale  # noqa: E731
    return Made(code, layer=nn.Linear(8, 3000, bias=False), scale=nn.Parameter(torch.ones(1)))


def _with_constants(model: Any, x: Tensor) -> Any:
    return (model.layer(x) * model.held[0]).sin() + torch.tensor([1.0, 2.0], dtype=x.dtype).sum()


def with_constants() -> nn.Module:
    """Constants that are no buffers, used forward and backward."""
    return Made(_with_constants, layer=nn.Linear(8, 5), held=[torch.arange(1.0, 6.0)])


def _returned(model: Any, x: Tensor) -> Any:
    total = x.sum(0)
    model.seen.copy_(total)
    return (model.weight * total).sum(), {"total": total}


def returned() -> nn.Module:
    """A gradient, a metric and a buffer that are one and the same value."""
    return Made(_returned, weight=nn.Parameter(torch.ones(8)), seen=torch.zeros(8))


# ---- operators ---------------------------------------------------------------------------------------


def convolutions_2d() -> nn.Module:
    """3×3, 1×1, depthwise, grouped, strided, dilated (and frozen), uneven, transposed; with and without bias.

    Between them the norms of images, activations with and without parameters, pooling and upsampling.
    """
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 4, 3, padding=1)),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 8, 1),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),  # depthwise
        nn.Conv2d(8, 4, 1, bias=False),
        nn.InstanceNorm2d(4, affine=True),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2).requires_grad_(False),
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        nn.Hardswish(),
        nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1, bias=False),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.ConvTranspose2d(4, 8, 2, stride=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(8, 4, (1, 3), padding="same"),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _recurrent(model: Any, x: Tensor) -> Any:
    sequence = torch.cat([layer(x[:, :2])[0] for layer in model.layers], -1)
    state = None
    for t in range(sequence.shape[1]):
        state = model.cell(sequence[:, t], state)
    assert state is not None
    return model.leave(state[0])


def recurrent() -> nn.Module:
    """Recurrent layers straight over the batch, then a loop over cells written by hand."""
    layers = [kind(8, 2, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN)]
    return Made(_recurrent, layers=nn.ModuleList(layers), cell=nn.LSTMCell(6, 6), leave=nn.Linear(6, 5))


class ManyOperators(nn.Module):
    """Top-k routing, sorting, statistics, Fourier transforms, distances, Cholesky; a reassigned buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 5) for _ in range(3))
        self.enter, self.gains = nn.Linear(8, 16), nn.Parameter(torch.randn(9))
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        gates = torch.zeros(len(x), 3, dtype=x.dtype).scatter(1, chosen, weights)
        y = torch.stack([gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]).sum(0)
        y = y.cumsum(1)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        z = y.sort(1).values.flip(1).roll(1, 1) + y.std(1, keepdim=True) + y.median(1, keepdim=True).values
        z = z.clone()
        z[:, 0] = z[:, 1] * 2
        z[:, ::2] += 1
        spectrum = torch.fft.irfft(torch.fft.rfft(self.enter(x)) * self.gains, n=16)[:, :5]
        distance = torch.cdist(x * self.scale, x * self.scale)
        factor = torch.linalg.cholesky(torch.exp(-(distance**2)) + 0.1 * torch.eye(len(x), dtype=x.dtype))
        solved = torch.cholesky_solve(y, factor) + factor.diagonal().log().sum()
        return (
            torch.where(z > 0, z, z * 0.1) + torch.clamp(y, -1, 1).prod(1, keepdim=True) + spectrum + solved
        )


def _largest(model: Any, x: Tensor) -> Any:
    found = model.bag(torch.tensor([0, 1, 2, 1, 0, 3]), torch.tensor([0, 3, 3]))
    return (found * x[:3, :4]).sum()


def bag() -> nn.Module:
    """Maxima of bags, one of them empty; two rows of the table are equal."""
    table = torch.randn(4, 4)[[0, 0, 1, 2, 3]]
    return Made(_largest, bag=nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="max"))


class Checkpointed(nn.Module):
    """Attention computed again in the backward pass, twice; ``reentrant=None`` keeps its activations."""

    def __init__(self, reentrant: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.qkv, self.dropout, self.reentrant = nn.Linear(8, 24), nn.Dropout(dropout), reentrant

    def block(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return self.inner(self.dropout(mixed.tanh()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.reentrant is None:
                x = x + self.block(x)
            else:
                x = x + checkpoint(self.block, x, use_reentrant=self.reentrant)
            x = self.dropout(x)
        return self.head(x.mean(1))


def encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 5))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5))


# ---- losses ------------------------------------------------------------------------------------------


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def itself(model: nn.Module, batch: Any) -> Tensor:
    """What the model returns is the loss."""
    return model(batch[0])


def many_terms(model: nn.Module, batch: Any) -> Tensor:
    """Class 0 does not count, others count differently; labels of a sample end at the first negative one."""
    found = model(batch[0])
    weight = torch.tensor([0.5, 1.0, 2.0, 1.5, 1.0], dtype=found.dtype)
    loss = F.cross_entropy(found, batch[1], weight=weight, ignore_index=0, label_smoothing=0.2)
    wanted = F.one_hot(batch[1], 5).to(found.dtype)
    loss = loss + F.cross_entropy(found, batch[1], reduction="sum") + F.smooth_l1_loss(found, wanted)
    loss = loss + F.binary_cross_entropy(found.sigmoid(), wanted) + F.mse_loss(found.softmax(-1), wanted)
    labels = torch.tensor([[0, 2, -1, 1, 3], [-1] * 5, [4, 3, 2, 1, 0], [1, -1, -1, -1, -1]])
    return loss + F.multilabel_margin_loss(found, labels)


def with_metrics(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch[0])
    hits = (logits.argmax(-1) == batch[1]).double()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    return F.cross_entropy(logits, batch[1]), {
        "accuracy": hits.mean(),
        "num_hits": hits.sum().long(),
        "logits": logits,
        "entropy": entropy.detach(),
    }


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def eigenvalues(model: nn.Module, batch: Any) -> Tensor:
    values, vectors = torch.linalg.eig(model(batch[0]))
    return values.abs().sum() + vectors.abs().sum()


def resized(model: nn.Module, batch: Any) -> Tensor:
    """Torch's kernels copy along an axis whose size a scale of 1.1 leaves as it is."""
    y = model(batch[0])
    modes = ("nearest", "nearest-exact", "bilinear", "bicubic")
    found = [F.interpolate(y, scale_factor=(2.5, 1.1), mode=mode) for mode in modes]
    found.append(F.interpolate(y[:, 0], scale_factor=1.1, mode="linear"))
    return torch.stack([(each**2).mean() for each in found]).sum()


# ---- all of them -------------------------------------------------------------------------------------


def labelled(*shape: int) -> Batch:
    """Random numbers of this shape, with a label of five for each sample."""

    def batch(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = seeded_generator(seed)
        inputs = torch.randn(shape, generator=generator, dtype=dtype)
        return inputs, torch.randint(5, shape[:1], generator=generator)

    return batch


def odd(name: str, make: Callable[[], nn.Module], loss: Callable[..., Any], batch: Batch) -> Workload:
    """One of these models as a workload."""
    return Workload(name, seeded(make), loss, batch)


VECTORS, SERIES, IMAGES = labelled(4, 8), labelled(4, 6, 8), labelled(3, 2, 6, 8)

ODD: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        odd("tied", Tied, classify, VECTORS),
        odd("partly_frozen", PartlyFrozen, classify, VECTORS),
        odd("frozen_and_shared", lambda: PartlyFrozen(shared=True), classify, VECTORS),
        odd("in_place", in_place, classify, VECTORS),
        odd("aliases", Aliases, classify, VECTORS),
        odd("shares_gradient", shares_gradient, classify, VECTORS),
        odd("one_element", one_element, with_metrics, VECTORS),
        odd("with_constants", with_constants, classify, VECTORS),
        odd("one_value_returned_thrice", returned, itself, VECTORS),
        odd("convolutions_2d", convolutions_2d, classify, IMAGES),
        odd("recurrent", recurrent, classify, labelled(4, 3, 8)),
        odd("many_operators", ManyOperators, classify, VECTORS),
        odd("bags_with_equal_rows", bag, itself, VECTORS),
        odd("checkpointed", lambda: Checkpointed(False), classify, SERIES),
        odd("checkpointed_reentrant", lambda: Checkpointed(True), classify, SERIES),
        odd("encoder_layer", encoder_layer, classify, SERIES),
        odd("many_terms", mlp, many_terms, VECTORS),
        odd("with_metrics", mlp, with_metrics, VECTORS),
        odd("gradient_penalty", mlp, gradient_penalty, VECTORS),
        odd("eigenvalues", lambda: nn.Linear(8, 8), eigenvalues, labelled(8, 8)),
        odd("sizes_kept_in_spite_of_a_scale", lambda: nn.Linear(6, 6), resized, labelled(2, 3, 4, 6)),
    )
}
