"""A deep learning recommendation model in the manner of Naumov et al. (2019), small."""

from __future__ import annotations

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
