"""Deep learning recommendation models in the manner of Naumov et al. (2019)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from .dense import mlp


class DLRM(nn.Module):
    """Dense features, single categories and bags of categories meet in pairwise dot products.

    ``num_categories`` gives the size of each single-valued feature's table; two more features are
    bags: one ragged (values and offsets, summed), one of fixed length (averaged). Gives one logit
    per example, ``[B]``.
    """

    def __init__(
        self,
        num_dense: int = 8,
        num_categories: tuple[int, ...] = (16, 12),
        num_bag_values: int = 20,
        embedding_size: int = 16,
        hidden_size: int = 32,
    ) -> None:
        super().__init__()
        self.bottom = mlp(num_dense, hidden_size, embedding_size)
        self.tables = nn.ModuleList(nn.Embedding(size, embedding_size) for size in num_categories)
        self.sum_bag = nn.EmbeddingBag(num_bag_values, embedding_size, mode="sum")
        self.mean_bag = nn.EmbeddingBag(num_bag_values, embedding_size, mode="mean")
        num_features = 1 + len(num_categories) + 2
        self.num_features = num_features
        num_pairs = num_features * (num_features - 1) // 2
        self.top = mlp(embedding_size + num_pairs, hidden_size, 1)

    def forward(
        self, dense: Tensor, categories: Tensor, bag_values: Tensor, bag_offsets: Tensor, history: Tensor
    ) -> Tensor:
        """``dense [B, num_dense]``, ``categories [B, tables]``, ``bag_values [N]`` cut at
        ``bag_offsets [B]``, ``history [B, length]``."""
        bottom: Tensor = self.bottom(dense)
        features = [bottom]
        features += [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features.append(self.sum_bag(bag_values, bag_offsets))
        features.append(self.mean_bag(history))
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        row, column = torch.tril_indices(
            self.num_features, self.num_features, offset=-1, device=products.device
        )
        interactions = products[:, row, column]
        logits: Tensor = self.top(torch.cat([bottom, interactions], dim=1))
        return logits.squeeze(1)


def _relu_layers(sizes: tuple[int, ...]) -> nn.Sequential:
    """Linear layers of these sizes, each followed by a ReLU, with the initial weights of NVIDIA's DLRM."""
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(sizes):
        linear = nn.Linear(in_features, out_features)
        nn.init.normal_(linear.weight, 0.0, math.sqrt(2.0 / (in_features + out_features)))
        nn.init.normal_(linear.bias, 0.0, math.sqrt(1.0 / out_features))
        layers += [linear, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class JointDLRM(nn.Module):
    """DLRM as in NVIDIA's DeepLearningExamples: every feature has one category, all tables are one.

    ``dense [B, num_dense]`` and ``categories [B, len(num_categories)]`` → one logit per example,
    ``[B]``. The rows of a feature start at its entry of ``offsets``. The pairwise dot products follow
    the dense vector, and zeros fill the row to a multiple of 8, for the GPU's sake. ``bottom_sizes``
    must end in ``embedding_size``, ``top_sizes`` in 1. What differs from NVIDIA's: the table's
    gradient is dense, and no kernel is written by hand.
    """

    offsets: Tensor

    def __init__(
        self,
        num_categories: tuple[int, ...],
        num_dense: int = 13,
        embedding_size: int = 128,
        bottom_sizes: tuple[int, ...] = (512, 256, 128),
        top_sizes: tuple[int, ...] = (1024, 1024, 512, 256, 1),
    ) -> None:
        super().__init__()
        self.bottom = _relu_layers((num_dense, *bottom_sizes))
        self.table = nn.Embedding(sum(num_categories), embedding_size)
        for rows in self.table.weight.detach().split(num_categories):
            nn.init.uniform_(rows, -math.sqrt(1.0 / len(rows)), math.sqrt(1.0 / len(rows)))
        starts = [sum(num_categories[:index]) for index in range(len(num_categories))]
        self.register_buffer("offsets", torch.tensor(starts))
        self.num_features = 1 + len(num_categories)
        num_inputs = embedding_size + self.num_features * (self.num_features - 1) // 2
        self.num_padding = -num_inputs % 8
        self.top = _relu_layers((num_inputs + self.num_padding, *top_sizes[:-1]))
        # The padding is all zeros, so these weights would never change; NVIDIA starts them at zero.
        nn.init.zeros_(next(self.top.parameters()).detach()[:, num_inputs:])
        self.out = nn.Linear(top_sizes[-2], top_sizes[-1])

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        bottom: Tensor = self.bottom(dense)
        features = torch.cat([bottom.unsqueeze(1), self.table(categories + self.offsets)], dim=1)
        products = features @ features.transpose(1, 2)
        row, column = torch.tril_indices(
            self.num_features, self.num_features, offset=-1, device=products.device
        )
        padding = products.new_zeros(products.shape[0], self.num_padding)
        interactions = torch.cat([bottom, products[:, row, column], padding], dim=1)
        logits: Tensor = self.out(self.top(interactions))
        return logits.squeeze(1)
