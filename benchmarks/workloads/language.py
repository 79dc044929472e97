"""Text models: an LSTM language model, LSTM translation with attention, and a Transformer classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM, projection to the vocabulary; tokens ``[B, T]`` → logits ``[B, T, vocab_size]``.

    With ``tied`` the projection uses the embedding's weight. ``dropout`` acts on the embeddings, on
    the output, and between the LSTM's layers.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        hidden_size: int = 16,
        num_layers: int = 2,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.lstm = nn.LSTM(
            hidden_size,
            hidden_size,
            num_layers=num_layers,
            batch_first=True,
            dropout=dropout if num_layers > 1 else 0.0,
        )
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(hidden_size, vocab_size)
        if tied:
            self.projection.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.projection(self.dropout(hidden))
        return logits


class LSTMTranslation(nn.Module):
    """Two LSTMs with dot-product attention between them, in the manner of Luong et al. (2015).

    ``source [B, S]`` and the target's tokens so far, ``target [B, T]`` → logits
    ``[B, T, vocab_size]``. The decoder starts from the encoder's last state; every position of it
    attends to all positions of the source, which has no padding.
    """

    def __init__(self, vocab_size: int = 8000, hidden_size: int = 512, num_layers: int = 2) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocab_size, hidden_size)
        self.target_embedding = nn.Embedding(vocab_size, hidden_size)
        self.encoder = nn.LSTM(hidden_size, hidden_size, num_layers=num_layers, batch_first=True)
        self.decoder = nn.LSTM(hidden_size, hidden_size, num_layers=num_layers, batch_first=True)
        self.combine = nn.Linear(2 * hidden_size, hidden_size)
        self.projection = nn.Linear(hidden_size, vocab_size)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded, state = self.encoder(self.source_embedding(source))
        decoded, _ = self.decoder(self.target_embedding(target), state)
        weights = (decoded @ encoded.transpose(1, 2)).softmax(-1)
        combined = torch.tanh(self.combine(torch.cat([weights @ encoded, decoded], dim=-1)))
        logits: Tensor = self.projection(combined)
        return logits


class SelfAttention(nn.Module):
    """Multi-head attention over ``[B, T, hidden_size]`` with one projection for query, key and value."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, hidden_size = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, hidden_size // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        merged: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, hidden_size))
        return merged


class TransformerBlock(nn.Module):
    """Attention and a feed-forward part, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attention = SelfAttention(hidden_size, num_heads, dropout)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        out: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return out


class TransformerClassifier(nn.Module):
    """Tokens ``[B, T]`` and a mask ``[B, T]`` (true = real token) → logits ``[B, num_classes]``.

    The average over the real tokens is classified; padding takes no part in attention.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        hidden_size: int = 16,
        num_layers: int = 2,
        num_heads: int = 2,
        num_classes: int = 4,
        max_length: int = 8,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, hidden_size, padding_idx=0)
        self.position_embedding = nn.Embedding(max_length, hidden_size)
        self.blocks = nn.ModuleList(
            TransformerBlock(hidden_size, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.classifier = nn.Linear(hidden_size, num_classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.token_embedding(tokens) + self.position_embedding(positions)
        attention_mask = mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, attention_mask)
        weights = mask.to(x.dtype).unsqueeze(-1)
        pooled = (self.norm(x) * weights).sum(1) / weights.sum(1)
        logits: Tensor = self.classifier(pooled)
        return logits
