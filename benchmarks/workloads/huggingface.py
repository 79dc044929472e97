"""Hugging Face models at tiny and at published sizes, built from scratch: no download, no pretrained weights.

Models of the published sizes come in training mode, whatever mode the library hands its models out in.
"""

from __future__ import annotations

from typing import Any

from torch import nn

VOCAB_SIZE = 32
MAX_LENGTH = 8


def of_transformers(name: str, config: str, **fields: Any) -> nn.Module:
    """Make a model of the ``transformers`` package, which is imported when first needed.

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
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**fields))
    return model


def _tiny(hidden_size: int, num_layers: int, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "intermediate_size": 2 * hidden_size,
        **_encoder_dropout(dropout),
    }


def _encoder_dropout(dropout: float) -> dict[str, Any]:
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def _tiny_bert(name: str, *sizes: Any) -> nn.Module:
    words = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LENGTH, "pad_token_id": 0}
    return of_transformers(name, "BertConfig", **words, **_tiny(*sizes))


def tiny_bert_mlm(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``BertForMaskedLM`` (the decoder is tied to the word embedding)."""
    return _tiny_bert("BertForMaskedLM", hidden_size, num_layers, dropout)


def tiny_bert_nsp(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``BertForNextSentencePrediction``."""
    return _tiny_bert("BertForNextSentencePrediction", hidden_size, num_layers, dropout)


def _gpt2(dropout: float, **sizes: Any) -> nn.Module:
    """``GPT2LMHeadModel`` without a key-value cache, which a training step never reads."""
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return of_transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False, **dropouts, **sizes)


def tiny_gpt2(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``GPT2LMHeadModel`` (the head is tied to the word embedding)."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "n_positions": MAX_LENGTH,
        "n_embd": hidden_size,
        "n_layer": num_layers,
    }
    # The default ids lie outside a small vocabulary, which transformers warns about.
    last = VOCAB_SIZE - 1
    return _gpt2(dropout, n_head=2, bos_token_id=last, eos_token_id=last, **sizes)


def _vit(**sizes: Any) -> nn.Module:
    # Left open, the first forward pass would guess the kind of problem and write it into the configuration.
    problem = "single_label_classification"
    return of_transformers("ViTForImageClassification", "ViTConfig", problem_type=problem, **sizes)


def tiny_vit(hidden_size: int = 16, num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """``ViTForImageClassification`` on 8×8 RGB images in 4×4 patches, four classes."""
    images = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 4}
    return _vit(**images, **_tiny(hidden_size, num_layers, dropout))


def bert_base_mlm(dropout: float = 0.1) -> nn.Module:
    """``BertForMaskedLM`` of the size of BERT-base, 109.5M parameters."""
    return of_transformers("BertForMaskedLM", "BertConfig", **_encoder_dropout(dropout)).train()


def bert_base_nsp(dropout: float = 0.1) -> nn.Module:
    """``BertForNextSentencePrediction`` of the size of BERT-base, 109.5M parameters."""
    return of_transformers("BertForNextSentencePrediction", "BertConfig", **_encoder_dropout(dropout)).train()


def gpt2(dropout: float = 0.1) -> nn.Module:
    """``GPT2LMHeadModel`` of the smallest published size, 124.4M parameters."""
    model = _gpt2(dropout)
    # What it takes anyway. Left open, since the class's name does not tell, it logs a warning.
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model.train()


def vit(hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12) -> nn.Module:
    """``ViTForImageClassification`` on 224×224 images in 16×16 patches, 1000 classes; ViT-B/16 by default."""
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    return _vit(intermediate_size=4 * hidden_size, num_labels=1000, **sizes).train()
