"""The demo's sweep: its settings, and the same members trained one by one in eager torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.workloads import SmallCNN
from torch import Tensor, nn

from . import _digits

BATCH_SIZE = 64
SHUFFLE_SEED = 1
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
WEIGHT_DECAYS = (1e-4, 1e-1)
SEEDS = (0, 1)


@dataclass(frozen=True)
class Setting:
    """What one member of the sweep is trained with."""

    lr: float
    weight_decay: float
    seed: int

    @property
    def name(self) -> str:
        return f"lr={self.lr:g} wd={self.weight_decay:g} seed={self.seed}"


@dataclass(frozen=True)
class Score:
    """How one member ended: mean loss of its last epoch, accuracy on the validation images."""

    loss: float
    accuracy: float


def settings() -> list[Setting]:
    """Learning rate × weight decay × seed: sixteen members."""
    return [Setting(*values) for values in product(LEARNING_RATES, WEIGHT_DECAYS, SEEDS)]


def build(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The member's model, its weights drawn from its seed, and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = SmallCNN(channels=16, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, weight_decay=setting.weight_decay)
    return model, optimizer


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metric_fn(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def train_alone(setting: Setting, data: _digits.Digits, device: torch.device, epochs: int) -> Score:
    """One member in a plain eager loop, with the batches that the fleet sees, validated every epoch."""
    model, optimizer = build(setting)
    model.to(device)
    loader = _digits.train_loader(data, BATCH_SIZE, SHUFFLE_SEED)
    mean_loss, accuracy = torch.zeros(()), torch.zeros(())
    for _ in range(epochs):
        model.train()
        losses = []
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, [leaf.to(device) for leaf in batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean_loss = torch.stack(losses).mean()
        accuracy = _validate(model, data, device)
    return Score(loss=mean_loss.item(), accuracy=accuracy.item())


@torch.no_grad()
def _validate(model: nn.Module, data: _digits.Digits, device: torch.device) -> Tensor:
    model.eval()
    batches: Iterable[list[Tensor]] = _digits.validation_loader(data)
    scores = [metric_fn(model, [leaf.to(device) for leaf in batch])["accuracy"] for batch in batches]
    return torch.stack(scores).mean()
