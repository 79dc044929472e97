"""Twelve public models at their published sizes that nothing here was tuned for.

Eight were chosen before trainmux had run them. Four were drawn: of the zoo's names in the order of
``random.Random(30).sample``, the first whose published size is at most 150 million parameters, and which are
not among the eight. Dropout and stochastic depth are as published. Rows of text are full.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .huggingface import bert_base_mlm, of_transformers
from .language import LSTMLanguageModel
from .paper import SizedWorkload, classification_loss, torchvision_models
from .paper_batches import bert_mlm_batch, image_batch, skewed_ranks
from .registry import own_loss
from .seeding import seeded, seeded_generator

DRAWN = ("efficientnet_v2_s", "roberta_prelayernorm", "plbart", "dpn68")
TEXT_LENGTH = 128
LSTM_LENGTH, LSTM_WORDS = 35, 10_000
"""Of the Penn Treebank, as language models are usually trained on it."""
T5_WORDS, ROBERTA_WORDS, PLBART_WORDS = 32_128, 50_265, 50_005
_FIRST_WORD = 4
"""Smaller numbers are padding, begin, end and unknown."""


def _of_torchvision(name: str) -> nn.Module:
    model: nn.Module = torchvision_models(name).get_model(name, weights=None)
    return model.train()


def _of_timm(name: str) -> nn.Module:
    model: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False)
    return model.train()


def _pairs_of(num_words: int, seed: int, batch_size: int) -> dict[str, Tensor]:
    """Rows of words, and the rows to make of them."""
    generator, shape = seeded_generator(seed), (batch_size, TEXT_LENGTH)
    names = ("input_ids", "labels")
    return {name: _FIRST_WORD + skewed_ranks(generator, shape, num_words - _FIRST_WORD) for name in names}


def _text_to_continue(seed: int, batch_size: int) -> Tensor:
    return skewed_ranks(seeded_generator(seed), (batch_size, LSTM_LENGTH + 1), LSTM_WORDS)


def _next_word_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _images(name: str, batch_size: int, said: str) -> SizedWorkload:
    build = seeded(_of_timm if name == "dpn68" else _of_torchvision, name=name)
    return SizedWorkload(name, (batch_size,), build, classification_loss, image_batch, said)


def _text(name: str, build: Any, batch: Any, said: str) -> SizedWorkload:
    return SizedWorkload(name, (16,), seeded(build), own_loss, batch, said)


def _transformer(name: str, config: str, **fields: Any) -> Any:
    """Make a function that builds a model of transformers with the configuration's own sizes."""
    return lambda: of_transformers(name, config, **fields).train()


_MODELS = (
    _images("densenet121", 32, "8.0M parameters, 224×224 images."),
    _images("efficientnet_b0", 32, "5.3M parameters, 224×224 images."),
    _images("convnext_tiny", 32, "28.6M parameters, 224×224 images."),
    _images("swin_t", 32, "28.3M parameters, 224×224 images."),
    _text("bert_base", bert_base_mlm, bert_mlm_batch, "109.5M parameters, 128 tokens, dropout 0.1."),
    _text(
        "distilbert",
        _transformer("DistilBertForMaskedLM", "DistilBertConfig"),
        bert_mlm_batch,
        "67.0M parameters, 128 tokens, dropout 0.1.",
    ),
    SizedWorkload(
        "lstm_language",
        (20,),
        seeded(LSTMLanguageModel, vocab_size=LSTM_WORDS, hidden_size=650, dropout=0.5),
        _next_word_loss,
        _text_to_continue,
        "13.3M parameters, two layers of 650 units, 35 tokens, dropout 0.5.",
    ),
    _text(
        "t5_small",
        _transformer("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0),
        partial(_pairs_of, T5_WORDS),
        "60.5M parameters, 128 tokens on either side, dropout 0.1.",
    ),
    _images("efficientnet_v2_s", 32, "21.5M parameters, 224×224 images. Drawn."),
    _text(
        "roberta_prelayernorm",
        _transformer("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig"),
        partial(_pairs_of, ROBERTA_WORDS),
        "124.7M parameters, 128 tokens, dropout 0.1. Drawn.",
    ),
    _text(
        "plbart",
        _transformer("PLBartForConditionalGeneration", "PLBartConfig"),
        partial(_pairs_of, PLBART_WORDS),
        "139.2M parameters, 128 tokens on either side, dropout 0.1. Drawn.",
    ),
    _images("dpn68", 32, "12.6M parameters, 224×224 images. Drawn."),
)
SAMPLE: dict[str, SizedWorkload] = {workload.name: workload for workload in _MODELS}
"""All twelve by name."""
