"""The registry's workloads, deep ones with one layer or a short sequence: every operator, few of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from benchmarks.workloads import (
    SMALL,
    TokenBatch,
    TransformerClassifier,
    Workload,
    tiny_bert_mlm,
    tiny_bert_nsp,
    tiny_gpt2,
    tiny_vit,
)
from benchmarks.workloads.seeding import seeded

import trainmux as tm


def _short_language_batch(seed: int, dtype: torch.dtype) -> TokenBatch:
    batch = SMALL["lstm"].batch(seed, dtype)
    return TokenBatch(batch.tokens[:, :3].contiguous(), batch.targets[:, :3].contiguous())


_ONE_LAYER = {
    "transformer": seeded(TransformerClassifier, num_layers=1),
    "transformer_with_dropout": seeded(TransformerClassifier, dropout=0.2, num_layers=1),
    "bert_mlm": seeded(tiny_bert_mlm, num_layers=1),
    "bert_mlm_with_dropout": seeded(tiny_bert_mlm, dropout=0.2, num_layers=1),
    "bert_nsp": seeded(tiny_bert_nsp, num_layers=1),
    "gpt2": seeded(tiny_gpt2, num_layers=1),
    "vit": seeded(tiny_vit, num_layers=1),
}
_THREE_TOKENS = ("lstm", "lstm_untied", "lstm_with_dropout")

SHORT: dict[str, Workload] = {
    **SMALL,
    **{name: replace(SMALL[name], build=build) for name, build in _ONE_LAYER.items()},
    **{name: replace(SMALL[name], batch=_short_language_batch) for name in _THREE_TOKENS},
}
"""By the registry's names."""


def member_of(
    workload: Workload, number: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> tm.Member:
    """A member whose weights, name and seed go by its number, with AdamW of these settings."""
    model = workload.build(number).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    return tm.Member(model, optimizer, name=f"m{number}", seed=number)
