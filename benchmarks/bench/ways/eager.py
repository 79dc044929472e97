"""One model after another, as most people train: eager torch, no CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batches import channels_last, to_device
from ._base import WEIGHT_DECAY, Prepared, Setup, autocast, is_convolutional, place


def prepare(setup: Setup) -> Prepared:
    """An optimizer for each model, and one step of each after another."""
    device = setup.device
    has_images = is_convolutional(setup.models[0])
    models = [place(model, device) for model in setup.models]
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda")
        for model, lr in zip(models, setup.learning_rates, strict=True)
    ]

    def step(batch: Any) -> Tensor:
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            data = to_device(batch, device)
            if has_images:
                data = channels_last(data)
            optimizer.zero_grad(set_to_none=True)
            with autocast(device):
                loss = setup.loss(model, data)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return Prepared(step, len(models))
