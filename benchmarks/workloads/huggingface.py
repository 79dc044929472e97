"""Hugging Face models at tiny and at published sizes, built from scratch: no download, no pretrained weights.

Models of the published sizes come in training mode, whatever mode the library hands its models out in.
"""

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
            "install it with: pip install 'trainmux[bench]'"
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


def _bert_base_config(dropout: float) -> Any:
    return _transformers().BertConfig(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def bert_base_mlm(dropout: float = 0.1) -> nn.Module:
    """``BertForMaskedLM`` of the size of BERT-base, 109.5M parameters."""
    config = _bert_base_config(dropout)
    return cast(nn.Module, _transformers().BertForMaskedLM(config)).train()


def bert_base_nsp(dropout: float = 0.1) -> nn.Module:
    """``BertForNextSentencePrediction`` of the size of BERT-base, 109.5M parameters."""
    config = _bert_base_config(dropout)
    return cast(nn.Module, _transformers().BertForNextSentencePrediction(config)).train()


def gpt2(dropout: float = 0.1) -> nn.Module:
    """``GPT2LMHeadModel`` of the smallest published size, 124.4M parameters, without a key-value cache."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    # What it takes anyway. Left open, since the class's name does not tell, it logs a warning.
    model.loss_type = "ForCausalLM"
    return cast(nn.Module, model).train()


def vit(hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12) -> nn.Module:
    """``ViTForImageClassification`` on 224×224 images in 16×16 patches, 1000 classes; ViT-B/16 by default."""
    transformers = _transformers()
    config = transformers.ViTConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=4 * hidden_size,
        num_labels=1000,
        problem_type="single_label_classification",
    )
    return cast(nn.Module, transformers.ViTForImageClassification(config)).train()
