"""Random batches at the sizes of Table 1, drawn to look like the data such models are trained on.

Words and categories are skewed as in text and click logs: a few values make up most of a batch, which
decides how much the gradients of an embedding's rows collide. Each function takes a seed and a batch size and
gives tensors on the CPU that depend on nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .seeding import seeded_generator

IMAGE_SIZE = 224
NUM_CLASSES = 1000

BERT_LENGTH = 128
BERT_VOCAB_SIZE = 30522
# Of BERT's own vocabulary: what opens a text, ends a sentence and hides a word; words start behind.
BERT_CLS, BERT_SEP, BERT_MASK, BERT_FIRST_WORD = 101, 102, 103, 999
MASKED_SHARE = 0.15

GPT2_LENGTH = 512
GPT2_VOCAB_SIZE = 50257

TRANSLATION_LENGTH = 32
TRANSLATION_VOCAB_SIZE = 8000
TRANSLATION_BEGIN, TRANSLATION_END, TRANSLATION_FIRST_WORD = 1, 2, 3

NUM_DENSE = 13
# Criteo's click logs of 24 days, values seen at least 15 times: NVIDIA's default data set.
# fmt: off
_CRITEO_SIZES = (
    7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11,
    2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35,
)
# fmt: on
MAX_TABLE_SIZE = 24_000
TABLE_SIZES = tuple(min(size, MAX_TABLE_SIZE) for size in _CRITEO_SIZES)
CLICKED_SHARE = 0.25


def skewed_ranks(generator: torch.Generator, shape: tuple[int, ...], num_values: Tensor | int) -> Tensor:
    """Numbers from 0 to below ``num_values``, number k drawn about as often as 1 / (k + 1) says.

    ``num_values`` may differ along the last dimension.
    """
    sizes = torch.as_tensor(num_values)
    draws = torch.rand(shape, generator=generator, dtype=torch.float64)
    ranks = torch.exp(draws * torch.log1p(sizes.double())).long() - 1
    return torch.minimum(ranks, sizes - 1)  # the largest draw may be rounded up


def image_batch(
    seed: int, batch_size: int, image_size: int = IMAGE_SIZE, num_classes: int = NUM_CLASSES
) -> tuple[Tensor, Tensor]:
    """Normalized RGB images ``[B, 3, image_size, image_size]`` and labels ``[B]``."""
    generator = seeded_generator(seed)
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    return images, torch.randint(num_classes, (batch_size,), generator=generator)


def vector_batch(seed: int, batch_size: int, num_features: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Normalized features ``[B, num_features]`` and labels ``[B]``."""
    generator = seeded_generator(seed)
    features = torch.randn(batch_size, num_features, generator=generator)
    return features, torch.randint(num_classes, (batch_size,), generator=generator)


def _bert_words(generator: torch.Generator, batch_size: int) -> Tensor:
    ranks = skewed_ranks(generator, (batch_size, BERT_LENGTH), BERT_VOCAB_SIZE - BERT_FIRST_WORD)
    return BERT_FIRST_WORD + ranks


def _bert_text(generator: torch.Generator, batch_size: int) -> Tensor:
    """Full rows of words between the marks for begin and end."""
    tokens = _bert_words(generator, batch_size)
    tokens[:, 0] = BERT_CLS
    tokens[:, -1] = BERT_SEP
    return tokens


def bert_mlm_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    """Text with 15% of each row to be predicted: of these 80% are masked, 10% replaced, 10% as they were."""
    generator = seeded_generator(seed)
    tokens = _bert_text(generator, batch_size)
    # A row of argsort is a random order, so every row has the same number of chosen positions.
    order = torch.rand(batch_size, BERT_LENGTH - 2, generator=generator).argsort(dim=1)
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    chosen[:, 1:-1] = order < round(MASKED_SHARE * BERT_LENGTH)
    fate = torch.rand(tokens.shape, generator=generator)
    shown = torch.where(fate < 0.9, _bert_words(generator, batch_size), tokens)
    shown = torch.where(fate < 0.8, BERT_MASK, shown)
    return {"input_ids": torch.where(chosen, shown, tokens), "labels": torch.where(chosen, tokens, -100)}


def bert_nsp_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    """Two sentences of equal length in each row, and whether the second follows the first (0) or not (1)."""
    generator = seeded_generator(seed)
    tokens = _bert_text(generator, batch_size)
    tokens[:, BERT_LENGTH // 2 - 1] = BERT_SEP
    second = (torch.arange(BERT_LENGTH) >= BERT_LENGTH // 2).long()
    return {
        "input_ids": tokens,
        "token_type_ids": second.repeat(batch_size, 1),
        "labels": torch.randint(2, (batch_size,), generator=generator),
    }


def gpt2_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    """Full rows of tokens ``[B, 512]``."""
    return {"input_ids": skewed_ranks(seeded_generator(seed), (batch_size, GPT2_LENGTH), GPT2_VOCAB_SIZE)}


def click_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    """Logarithms of 13 counts, one category of each of 26 tables, and whether the user clicked."""
    generator = seeded_generator(seed)
    counts = torch.randn(batch_size, NUM_DENSE, generator=generator).mul(1.5).exp()
    sizes = torch.tensor(TABLE_SIZES)
    return {
        "dense": counts.log1p(),
        "categories": skewed_ranks(generator, (batch_size, len(TABLE_SIZES)), sizes),
        "clicked": (torch.rand(batch_size, generator=generator) < CLICKED_SHARE).float(),
    }


def translation_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    """Source ``[B, 32]`` and target ``[B, 33]``: one token more, since the last is only predicted."""
    generator = seeded_generator(seed)
    num_words = TRANSLATION_VOCAB_SIZE - TRANSLATION_FIRST_WORD
    shape = (batch_size, TRANSLATION_LENGTH)
    source = TRANSLATION_FIRST_WORD + skewed_ranks(generator, shape, num_words)
    target = TRANSLATION_FIRST_WORD + skewed_ranks(generator, shape, num_words)
    source[:, -1] = target[:, -1] = TRANSLATION_END
    begin = torch.full((batch_size, 1), TRANSLATION_BEGIN)
    return {"source": source, "target": torch.cat([begin, target], dim=1)}
