"""The registry's deeper workloads with one layer or a short sequence: every operator, few of each."""

from __future__ import annotations

from dataclasses import replace

import torch

from trainmux.workloads import SMALL, TokenBatch, TransformerClassifier, Workload, tiny_gpt2
from trainmux.workloads.seeding import seeded


def _short_language_batch(seed: int, dtype: torch.dtype) -> TokenBatch:
    batch = SMALL["lstm"].batch(seed, dtype)
    return TokenBatch(batch.tokens[:, :3].contiguous(), batch.targets[:, :3].contiguous())


SHORT: dict[str, Workload] = {
    "lstm": replace(SMALL["lstm"], batch=_short_language_batch),
    "lstm_with_dropout": replace(SMALL["lstm_with_dropout"], batch=_short_language_batch),
    "gpt2": replace(SMALL["gpt2"], build=seeded(tiny_gpt2, num_layers=1)),
    "transformer": replace(SMALL["transformer"], build=seeded(TransformerClassifier, num_layers=1)),
    "transformer_with_dropout": replace(
        SMALL["transformer_with_dropout"], build=seeded(TransformerClassifier, dropout=0.2, num_layers=1)
    ),
}
"""By the registry's names."""
