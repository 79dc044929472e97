"""The smallest workload: a plain multi-layer perceptron."""

from __future__ import annotations

from torch import nn


def mlp(in_features: int, hidden_features: int, out_features: int, num_hidden: int = 1) -> nn.Sequential:
    """Linear layers with ReLU between them; ``num_hidden`` hidden layers of ``hidden_features`` each."""
    layers: list[nn.Module] = []
    width = in_features
    for _ in range(num_hidden):
        layers += [nn.Linear(width, hidden_features), nn.ReLU()]
        width = hidden_features
    layers.append(nn.Linear(width, out_features))
    return nn.Sequential(*layers)
