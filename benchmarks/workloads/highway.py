"""A recurrent highway network (Zilly et al., 2017) as a language model, unrolled in Python.

One step of time is a row of highway layers over one state: ``s ← h · t + s · (1 − t)``, the carry gate
coupled to the transform gate ``t``. The input enters the first layer alone. Written from the paper's
equations 6-9; without its variational dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .paper_batches import skewed_ranks
from .seeding import seeded_generator

PENN_VOCAB_SIZE = 10_000
"""Words of the Penn Treebank, on which the paper trains."""
PENN_LENGTH = 35
"""Steps of time that it unrolls."""

_TRANSFORM_BIAS = -2.0
"""At first a layer passes its state on."""


class HighwayLanguageModel(nn.Module):
    """Tokens ``[B, T]`` → logits ``[B, T, vocab_size]``; the output's weight is the embedding's (``tied``).

    The defaults are the published network of depth 10: 23 million parameters, 32 million if not tied.
    """

    def __init__(
        self,
        vocab_size: int = PENN_VOCAB_SIZE,
        hidden_size: int = 830,
        depth: int = 10,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.enter = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.layers = nn.ModuleList(nn.Linear(hidden_size, 2 * hidden_size) for _ in range(depth))
        self.projection = nn.Linear(hidden_size, vocab_size)
        if tied:
            self.projection.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.04, 0.04)  # the paper's range
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.constant_(layer.bias[hidden_size:], _TRANSFORM_BIAS)

    def forward(self, tokens: Tensor) -> Tensor:
        entering = self.enter(self.embedding(tokens)).unbind(1)
        state = torch.zeros_like(entering[0][:, : self.embedding.embedding_dim])
        states = []
        for inputs in entering:
            for number, layer in enumerate(self.layers):
                both = layer(state)
                if number == 0:
                    both = both + inputs
                candidate, gate = both.chunk(2, dim=-1)
                transform = gate.sigmoid()
                state = candidate.tanh() * transform + state * (1 - transform)
            states.append(state)
        logits: Tensor = self.projection(torch.stack(states, dim=1))
        return logits


def highway_batch(
    seed: int, batch_size: int, length: int = PENN_LENGTH, vocab_size: int = PENN_VOCAB_SIZE
) -> tuple[Tensor, Tensor]:
    """Tokens ``[B, length]``, skewed as words are, and at each position the token that follows."""
    tokens = skewed_ranks(seeded_generator(seed), (batch_size, length + 1), vocab_size)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
