"""One model after another, each as fast as torch makes it: compiled, and its step one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import StaticBatch, channels_last
from ._base import WEIGHT_DECAY, Prepared, Setup, autocast, is_convolutional, place
from ._capture import capture

NUM_MODELS = 2
"""Models whose graphs take turns, so that no model finds its weights in a cache from its own last step."""


def prepare(setup: Setup) -> Prepared:
    """Forward and backward by ``torch.compile``, a fused AdamW; all of it captured, for each model apart."""
    has_images = is_convolutional(setup.models[0])

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return setup.loss(model, channels_last(batch) if has_images else batch)

    compiled: Callable[[nn.Module, Any], Tensor] = torch.compile(loss_of, dynamic=False)
    members = [
        _Member(place(model, setup.device), lr, compiled, setup)
        for model, lr in zip(setup.models, setup.learning_rates, strict=True)
    ]

    def step(batch: Any) -> Tensor:
        return torch.stack([member.step(batch) for member in members])

    return Prepared(step, len(members))


class _Member:
    """One model with its optimizer, its input buffers and its graph."""

    def __init__(
        self, model: nn.Module, lr: float, compiled: Callable[[nn.Module, Any], Tensor], setup: Setup
    ) -> None:
        self._batch = StaticBatch(setup.example, setup.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, fused=True, capturable=True
        )

        def train() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with autocast(setup.device):
                loss = compiled(model, self._batch.tree)
            loss.backward()
            optimizer.step()
            return loss.detach()

        # The graph holds addresses, not tensors: model and optimizer live on in this object's function.
        self._train = train
        self._graph, self._loss = capture(train, setup.device)

    def step(self, batch: Any) -> Tensor:
        self._batch.load(batch)
        self._graph.replay()
        return self._loss
