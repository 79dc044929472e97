"""Classic networks and losses that no library ships, at small sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

Loss = Callable[[Any, Any], Any]

BATCH_SIZE = 8


def _images(num_channels: int = 3, side: int = 16) -> Tensor:
    return torch.randn(BATCH_SIZE, num_channels, side, side)


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, after in itertools.pairwise(sizes):
        layers += [nn.Linear(size, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# ---- images ----------------------------------------------------------------------------------------------


def _double_convolution(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(num_outputs, num_outputs, 3, padding=1),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels down and up again, with connections across."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.middle = _double_convolution(3, 8), _double_convolution(8, 16)
        self.bottom = _double_convolution(16, 32)
        self.up_middle, self.up_top = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join_middle, self.join_top = _double_convolution(32, 16), _double_convolution(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        middle = self.middle(F.max_pool2d(top, 2))
        bottom = self.bottom(F.max_pool2d(middle, 2))
        middle = self.join_middle(torch.cat([self.up_middle(bottom), middle], 1))
        top = self.join_top(torch.cat([self.up_top(middle), top], 1))
        scores: Tensor = self.head(top)
        return scores


def unet() -> tuple[nn.Module, Loss, Any]:
    batch = _images(), torch.randint(4, (BATCH_SIZE, 16, 16))
    return UNet(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch


class VariationalAutoencoder(nn.Module):
    """Encoder and decoder; the noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(64, 32, 16), _mlp(8, 32, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + noise * torch.exp(log_variance / 2)), mean, log_variance


def vae() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        restored, mean, log_variance = model(*batch)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(restored, batch[0]) + 0.1 * divergence

    return VariationalAutoencoder(), loss, (torch.rand(BATCH_SIZE, 64), torch.randn(BATCH_SIZE, 8))


class GanPair(nn.Module):
    """Generator and discriminator as one model, so that one step trains both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = _mlp(8, 32, 64), _mlp(64, 32, 1)


def gan() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        real, noise = batch
        made = model.generator(noise)
        judge = model.discriminator
        fixed = {name: parameter.detach() for name, parameter in judge.named_parameters()}
        generator_loss = F.softplus(-functional_call(judge, fixed, (made,))).mean()
        judge_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        return generator_loss + judge_loss

    return GanPair(), loss, (torch.randn(BATCH_SIZE, 64), torch.randn(BATCH_SIZE, 8))


class Denoiser(nn.Module):
    """A convolutional net that is told the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 16)
        self.into, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 10))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.norm(self.into(x)) + self.time(time)[:, :, None, None]
        noise: Tensor = self.out(F.silu(hidden))
        return noise


def diffusion() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
        images, noise, time = batch
        kept = model.kept[time][:, None, None, None]
        return F.mse_loss(model(kept.sqrt() * images + (1 - kept).sqrt() * noise, time), noise)

    return Denoiser(), loss, (_images(), _images(), torch.randint(10, (BATCH_SIZE,)))


# ---- sequences -------------------------------------------------------------------------------------------


class WaveNet(nn.Module):
    """Gated causal convolutions with growing dilation, residual and skip connections."""

    def __init__(self, num_channels: int = 16, num_layers: int = 4) -> None:
        super().__init__()
        self.into = nn.Conv1d(1, num_channels, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(num_channels, 2 * num_channels, 2, dilation=2**number) for number in range(num_layers)
        )
        self.mixes = nn.ModuleList(nn.Conv1d(num_channels, num_channels, 1) for _ in range(num_layers))
        self.head = nn.Conv1d(num_channels, 32, 1)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.into(wave)
        skipped = torch.zeros_like(x)
        for number, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            filtered, opened = gate(F.pad(x, (2**number, 0))).chunk(2, 1)
            mixed = mix(torch.tanh(filtered) * torch.sigmoid(opened))
            skipped, x = skipped + mixed, x + mixed
        scores: Tensor = self.head(F.relu(skipped))
        return scores


def wavenet() -> tuple[nn.Module, Loss, Any]:
    batch = torch.randn(BATCH_SIZE, 1, 64), torch.randint(32, (BATCH_SIZE, 64))
    return WaveNet(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch


class LanguageModel(nn.Module):
    """Two layers of LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.LSTM(32, 32, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return scores


def lstm() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, tokens: Tensor) -> Any:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return LanguageModel(), loss, torch.randint(64, (BATCH_SIZE, 17))


class Translator(nn.Module):
    """A GRU encoder and a decoder of cells that attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(64, 32), nn.GRU(32, 32, batch_first=True)
        self.cell, self.head = nn.GRUCell(64, 32), nn.Linear(32, 64)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, last = self.encoder(self.embedding(source))
        hidden, scores = last[0], []
        for token in self.embedding(target).unbind(1):
            weights = torch.softmax((states @ hidden[:, :, None]) / 32**0.5, 1)
            hidden = self.cell(torch.cat([token, (weights * states).sum(1)], 1), hidden)
            scores.append(self.head(hidden))
        return torch.stack(scores, 2)


def seq2seq() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        source, target = batch
        return F.cross_entropy(model(source, target[:, :-1]), target[:, 1:])

    return Translator(), loss, (torch.randint(64, (BATCH_SIZE, 12)), torch.randint(64, (BATCH_SIZE, 9)))


# ---- graphs, points, dynamics ----------------------------------------------------------------------------


class GraphConvolution(nn.Module):
    """Two layers that add up neighbours by ``index_add`` and divide by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        num_neighbours = torch.zeros_like(x[:, 0]).scatter_add(
            0, target, torch.ones_like(target, dtype=x.dtype)
        )
        for layer in (self.first, self.second):
            h = layer(x)
            x = torch.zeros_like(h).index_add(0, target, h[source]) / (num_neighbours[:, None] + 1)
            x = F.relu(x) if layer is self.first else x
        return x


def graph() -> tuple[nn.Module, Loss, Any]:
    batch = torch.randn(32, 16), torch.randint(32, (2, 128)), torch.randint(4, (32,))
    return GraphConvolution(), lambda model, b: F.cross_entropy(model(b[0], b[1]), b[2]), batch


class PointNet(nn.Module):
    """A net for each point and the maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.head = _mlp(64, 32, 4)

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.head(self.each(points).amax(2))
        return scores


def points() -> tuple[nn.Module, Loss, Any]:
    batch = torch.randn(BATCH_SIZE, 3, 32), torch.randint(4, (BATCH_SIZE,))
    return PointNet(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch


class NeuralOde(nn.Module):
    """A flow that is followed by four steps of Runge and Kutta's method."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = _mlp(5, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        step = 0.25
        for number in range(4):

            def slope(x: Tensor, time: float) -> Tensor:
                found: Tensor = self.slope(torch.cat([x, torch.full_like(x[:, :1], time)], 1))
                return found

            time = number * step
            first = slope(x, time)
            second = slope(x + first * step / 2, time + step / 2)
            third = slope(x + second * step / 2, time + step / 2)
            fourth = slope(x + third * step, time + step)
            x = x + step / 6 * (first + 2 * second + 2 * third + fourth)
        return x


def ode() -> tuple[nn.Module, Loss, Any]:
    batch = torch.randn(BATCH_SIZE, 4), torch.randn(BATCH_SIZE, 4)
    return NeuralOde(), lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), batch


def physics() -> tuple[nn.Module, Loss, Any]:
    """A net that is to solve u'' = -u: its loss has derivatives of the net."""

    def loss(model: Any, x: Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second + u).square().mean() + (model(torch.zeros_like(x[:1])) - 1).square().mean()

    return _mlp(1, 32, 32, 1), loss, torch.rand(32, 1)


# ---- representations, decisions, tables ------------------------------------------------------------------


class SparseAutoencoder(nn.Module):
    """One wide layer of which the largest activations are kept, and a dictionary."""

    def __init__(self, num_kept: int = 8) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(32, 128), nn.Linear(128, 32)
        self.num_kept = num_kept

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.encoder(x - self.decoder.bias))
        values, places = active.topk(self.num_kept, dim=1)
        restored: Tensor = self.decoder(torch.zeros_like(active).scatter(1, places, values))
        return restored


def sae() -> tuple[nn.Module, Loss, Any]:
    return SparseAutoencoder(), lambda model, x: F.mse_loss(model(x), x), torch.randn(BATCH_SIZE, 32)


class QNetwork(nn.Module):
    """A net of values and its frozen copy."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = _mlp(8, 32, 4), _mlp(8, 32, 4).requires_grad_(False)


def dqn() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, batch: tuple[Tensor, ...]) -> Any:
        state, action, reward, after, ended = batch
        value = model.online(state).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            best = model.online(after).argmax(1, keepdim=True)
            expected = reward + 0.99 * (1 - ended) * model.target(after).gather(1, best)[:, 0]
        return F.smooth_l1_loss(value, expected)

    ended = torch.randint(2, (BATCH_SIZE,)).float()
    states = torch.randn(2, BATCH_SIZE, 8)
    batch = states[0], torch.randint(4, (BATCH_SIZE,)), torch.randn(BATCH_SIZE), states[1], ended
    return QNetwork(), loss, batch


def contrast() -> tuple[nn.Module, Loss, Any]:
    """Two views of each item, to be told from all others (InfoNCE)."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        first, second = (F.normalize(model(view), dim=1) for view in batch)
        scores = first @ second.T / 0.1
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    return _mlp(32, 64, 16), loss, (torch.randn(BATCH_SIZE, 32), torch.randn(BATCH_SIZE, 32))


class CouplingFlow(nn.Module):
    """Affine couplings of alternating halves (RealNVP)."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_mlp(4, 32, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        volume = torch.zeros_like(x[:, 0])
        for layer in self.layers:
            scale, shift = layer(kept).chunk(2, 1)
            scale = torch.tanh(scale)
            kept, moved = moved * scale.exp() + shift, kept
            volume = volume + scale.sum(1)
        return torch.cat([kept, moved], 1), volume


def flow() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, x: Tensor) -> Any:
        latent, volume = model(x)
        return (latent.square().sum(1) / 2 - volume).mean()

    return CouplingFlow(), loss, torch.randn(BATCH_SIZE, 8)


class Recommender(nn.Module):
    """Bags of embedded categories with numbers, by a factorization machine and a net (DeepFM)."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(20, 8) for _ in range(5))
        self.linear, self.deep = nn.Linear(4, 8), _mlp(48, 32, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        fields = [self.linear(numbers)]
        fields += [table(categories[:, place]) for place, table in enumerate(self.embeddings)]
        stacked = torch.stack(fields, 1)
        crossed = (stacked.sum(1).square() - stacked.square().sum(1)).sum(1) / 2
        score: Tensor = crossed + self.deep(stacked.flatten(1))[:, 0]
        return score


def recommender() -> tuple[nn.Module, Loss, Any]:
    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
        return F.binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2])

    numbers, categories = torch.randn(BATCH_SIZE, 4), torch.randint(20, (BATCH_SIZE, 5))
    return Recommender(), loss, (numbers, categories, torch.rand(BATCH_SIZE).round())


CLASSIC: dict[str, Callable[[], tuple[nn.Module, Loss, Any]]] = {
    "unet": unet,
    "vae": vae,
    "gan_pair": gan,
    "diffusion": diffusion,
    "wavenet": wavenet,
    "lstm": lstm,
    "seq2seq_attention": seq2seq,
    "graph_convolution": graph,
    "pointnet": points,
    "neural_ode": ode,
    "physics_informed": physics,
    "sparse_autoencoder": sae,
    "dqn": dqn,
    "contrastive": contrast,
    "real_nvp": flow,
    "deepfm": recommender,
}
"""Model, loss and batch by name."""
