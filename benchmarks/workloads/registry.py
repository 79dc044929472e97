"""Every workload at a tiny size, with its loss and batches: what tests and benchmarks loop over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dense import mlp
from .huggingface import MAX_LENGTH, VOCAB_SIZE, tiny_bert_mlm, tiny_bert_nsp, tiny_gpt2, tiny_vit
from .language import LSTMLanguageModel, LSTMTranslation, TransformerClassifier
from .recommend import DLRM, JointDLRM
from .seeding import seeded, seeded_generator
from .vision import BottleneckNet, InvertedResidualNet, ResidualNet, SmallCNN

BATCH_SIZE = 4
NUM_CLASSES = 4

Loss = Tensor | tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Workload:
    """One model to train.

    ``build(seed)`` makes the model in fp32, always with the same weights for the same seed.
    ``batch(seed, dtype)`` makes a batch whose floating tensors have that dtype.
    ``loss(model, batch)`` gives a scalar, or a scalar and named metrics.
    """

    name: str
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Loss]
    batch: Callable[[int, torch.dtype], Any]


@dataclass(frozen=True)
class TokenBatch:
    """Tokens ``[B, T]`` and, at each position, the token that follows."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class ClickBatch:
    """What a user did (``dense``, ``categories``, bags) and whether they clicked."""

    dense: Tensor
    categories: Tensor
    bag_values: Tensor
    bag_offsets: Tensor
    history: Tensor
    clicked: Tensor


# Batches.


def _tokens(generator: torch.Generator, low: int = 1) -> Tensor:
    return torch.randint(low, VOCAB_SIZE, (BATCH_SIZE, MAX_LENGTH), generator=generator)


def _labels(generator: torch.Generator, num_classes: int = NUM_CLASSES) -> Tensor:
    return torch.randint(num_classes, (BATCH_SIZE,), generator=generator)


def _padding_mask(generator: torch.Generator) -> Tensor:
    """``[B, T]``, true at real tokens; at least half of each row is real."""
    lengths = torch.randint(MAX_LENGTH // 2, MAX_LENGTH + 1, (BATCH_SIZE, 1), generator=generator)
    return torch.arange(MAX_LENGTH) < lengths


def _pair_batch(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = seeded_generator(seed)
    return torch.randn(BATCH_SIZE, *shape, generator=generator, dtype=dtype), _labels(generator)


_vector_batch = partial(_pair_batch, shape=(16,))
_gray_batch = partial(_pair_batch, shape=(1, 8, 8))


def _color_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = seeded_generator(seed)
    images = torch.randn(BATCH_SIZE, 3, 8, 8, generator=generator, dtype=dtype)
    return {"image": images, "label": _labels(generator)}


def _language_batch(seed: int, dtype: torch.dtype) -> TokenBatch:
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, MAX_LENGTH + 1), generator=seeded_generator(seed))
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _translation_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = seeded_generator(seed)
    source = torch.randint(VOCAB_SIZE, (BATCH_SIZE, 5), generator=generator)
    return {"source": source, "target": torch.randint(VOCAB_SIZE, (BATCH_SIZE, 5), generator=generator)}


def _text_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = seeded_generator(seed)
    tokens, mask = _tokens(generator), _padding_mask(generator)
    return {"tokens": tokens * mask, "mask": mask, "label": _labels(generator)}


def _click_batch(seed: int, dtype: torch.dtype) -> ClickBatch:
    generator = seeded_generator(seed)
    num_values = 3 * BATCH_SIZE
    # Every bag holds at least one value, and the number of values is the same for every seed.
    cuts = torch.randperm(num_values - 1, generator=generator)[: BATCH_SIZE - 1] + 1
    return ClickBatch(
        dense=torch.randn(BATCH_SIZE, 8, generator=generator, dtype=dtype),
        categories=torch.randint(12, (BATCH_SIZE, 2), generator=generator),
        bag_values=torch.randint(20, (num_values,), generator=generator),
        bag_offsets=torch.cat([torch.zeros(1, dtype=torch.long), cuts.sort().values]),
        history=torch.randint(20, (BATCH_SIZE, 3), generator=generator),
        clicked=torch.randint(2, (BATCH_SIZE,), generator=generator).to(dtype),
    )


def _joint_click_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = seeded_generator(seed)
    return {
        "dense": torch.randn(BATCH_SIZE, 6, generator=generator, dtype=dtype),
        "categories": torch.randint(5, (BATCH_SIZE, 3), generator=generator),
        "clicked": torch.randint(2, (BATCH_SIZE,), generator=generator).to(dtype),
    }


def _bert_mlm_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = seeded_generator(seed)
    tokens, mask = _tokens(generator, low=2), _padding_mask(generator)
    hidden = (torch.rand(tokens.shape, generator=generator) < 0.3) & mask
    hidden[:, 0] = True  # a batch without one masked token would have no loss
    return {
        "input_ids": torch.where(hidden, 1, tokens * mask),
        "attention_mask": mask.long(),
        "labels": torch.where(hidden, tokens, -100),
    }


def _bert_nsp_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = seeded_generator(seed)
    tokens, mask = _tokens(generator), _padding_mask(generator)
    second = (torch.arange(MAX_LENGTH) >= MAX_LENGTH // 2).expand(BATCH_SIZE, MAX_LENGTH)
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask.long(),
        "token_type_ids": second.long(),
        "labels": _labels(generator, 2),
    }


def _gpt2_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"input_ids": _tokens(seeded_generator(seed), low=0)}


def _vit_batch(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = seeded_generator(seed)
    pixels = torch.randn(BATCH_SIZE, 3, 8, 8, generator=generator, dtype=dtype)
    return {"pixel_values": pixels, "labels": _labels(generator)}


# Losses.


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def _pair_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def _pair_loss_with_metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    inputs, labels = batch
    logits = model(inputs)
    return F.cross_entropy(logits, labels), {"accuracy": _accuracy(logits, labels)}


def _smoothed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)


def _language_loss(model: nn.Module, batch: TokenBatch) -> Loss:
    return F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())


def _text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    logits = model(batch["tokens"], batch["mask"])
    loss = F.cross_entropy(logits, batch["label"])
    confidence = logits.detach().softmax(-1).amax(-1).mean()
    return loss, {"accuracy": _accuracy(logits, batch["label"]), "confidence": confidence}


def _click_loss(model: nn.Module, batch: ClickBatch) -> Loss:
    logits = model(batch.dense, batch.categories, batch.bag_values, batch.bag_offsets, batch.history)
    return F.binary_cross_entropy_with_logits(logits, batch.clicked)


def translation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Each token of the target is predicted from the source and the target's tokens before it."""
    target = batch["target"]
    logits = model(batch["source"], target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def joint_click_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Whether the user clicked, of ``JointDLRM``."""
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["categories"]), batch["clicked"])


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """The loss that the model computes by itself when it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    # GPT-2's own loss casts the logits to fp32, whatever the model's dtype; this one keeps fp64.
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


_SMALL_CNN = {"channels": 16, "num_classes": NUM_CLASSES}
_TRANSLATION = {"vocab_size": VOCAB_SIZE, "hidden_size": 8}
_JOINT_SIZES = {"num_dense": 6, "num_categories": (5, 8, 6), "embedding_size": 8}
_JOINT_LAYERS = {"bottom_sizes": (16, 8), "top_sizes": (16, 16, 1)}
_WORKLOADS: tuple[tuple[str, Any, Any, Any], ...] = (
    ("mlp", seeded(partial(mlp, 16, 32, NUM_CLASSES)), _pair_loss, _vector_batch),
    ("cnn", seeded(SmallCNN, **_SMALL_CNN), _pair_loss_with_metrics, _gray_batch),
    ("cnn_with_dropout", seeded(SmallCNN, dropout=0.2, **_SMALL_CNN), _pair_loss_with_metrics, _gray_batch),
    ("residual", seeded(ResidualNet, num_classes=NUM_CLASSES), _smoothed_loss, _color_batch),
    ("bottleneck", seeded(BottleneckNet, num_classes=NUM_CLASSES), _smoothed_loss, _color_batch),
    ("mobilenet", seeded(InvertedResidualNet, num_classes=NUM_CLASSES), _smoothed_loss, _color_batch),
    ("lstm", seeded(LSTMLanguageModel), _language_loss, _language_batch),
    ("lstm_untied", seeded(LSTMLanguageModel, tied=False), _language_loss, _language_batch),
    ("lstm_with_dropout", seeded(LSTMLanguageModel, dropout=0.2), _language_loss, _language_batch),
    ("lstm_translation", seeded(LSTMTranslation, **_TRANSLATION), translation_loss, _translation_batch),
    ("transformer", seeded(TransformerClassifier), _text_loss, _text_batch),
    ("transformer_with_dropout", seeded(TransformerClassifier, dropout=0.2), _text_loss, _text_batch),
    ("dlrm", seeded(DLRM), _click_loss, _click_batch),
    ("dlrm_joint", seeded(JointDLRM, **_JOINT_SIZES, **_JOINT_LAYERS), joint_click_loss, _joint_click_batch),
    ("bert_mlm", seeded(tiny_bert_mlm), own_loss, _bert_mlm_batch),
    ("bert_mlm_with_dropout", seeded(tiny_bert_mlm, dropout=0.2), own_loss, _bert_mlm_batch),
    ("bert_nsp", seeded(tiny_bert_nsp), own_loss, _bert_nsp_batch),
    ("gpt2", seeded(tiny_gpt2), _next_token_loss, _gpt2_batch),
    ("vit", seeded(tiny_vit), own_loss, _vit_batch),
)
SMALL: dict[str, Workload] = {row[0]: Workload(*row) for row in _WORKLOADS}
"""All workloads by name, at sizes that train a step in milliseconds; dropout is 0 unless the name says so."""
