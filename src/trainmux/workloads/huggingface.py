"""Tiny configurations of Hugging Face models, built from scratch: no download, no pretrained weights."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

VOCAB_SIZE = 32
MAX_LENGTH = 8


def _transformers() -> Any:
    """The ``transformers`` package, imported when first needed.

    Raises ``ImportError`` naming the extra where it is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "the Hugging Face workloads need the package 'transformers', which is not installed; "
            "install it with: pip install 'trainmux[hf]'"
        ) from error
    return transformers


def _bert_config(hidden_size: int, num_layers: int, dropout: float) -> Any:
    return _transformers().BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=0,
    )


def tiny_bert_mlm(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``BertForMaskedLM`` (the decoder is tied to the word embedding)."""
    config = _bert_config(hidden_size, num_layers, dropout)
    return cast(nn.Module, _transformers().BertForMaskedLM(config))


def tiny_bert_nsp(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``BertForNextSentencePrediction``."""
    config = _bert_config(hidden_size, num_layers, dropout)
    return cast(nn.Module, _transformers().BertForNextSentencePrediction(config))


def tiny_gpt2(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``GPT2LMHeadModel`` (the head is tied to the word embedding), without a key-value cache."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=MAX_LENGTH,
        n_embd=hidden_size,
        n_layer=num_layers,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        # The default ids lie outside a small vocabulary, which transformers warns about.
        bos_token_id=VOCAB_SIZE - 1,
        eos_token_id=VOCAB_SIZE - 1,
        # A training step never reads the cache; building it would only add work.
        use_cache=False,
    )
    return cast(nn.Module, transformers.GPT2LMHeadModel(config))


def tiny_vit(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``ViTForImageClassification`` on 8×8 RGB images in 4×4 patches, four classes."""
    transformers = _transformers()
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=3,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=4,
        # Left open, the first forward pass would guess it and write it into the configuration.
        problem_type="single_label_classification",
    )
    return cast(nn.Module, transformers.ViTForImageClassification(config))
