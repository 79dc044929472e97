"""Ordinary PyTorch models that tests, demo and benchmarks train. See docs/layout.md."""

from .dense import mlp
from .huggingface import tiny_bert_mlm, tiny_bert_nsp, tiny_gpt2, tiny_vit
from .language import LSTMLanguageModel, TransformerClassifier
from .recommend import DLRM
from .registry import SMALL, ClickBatch, TokenBatch, Workload
from .vision import ResidualNet, SmallCNN

__all__ = [
    "DLRM",
    "SMALL",
    "ClickBatch",
    "LSTMLanguageModel",
    "ResidualNet",
    "SmallCNN",
    "TokenBatch",
    "TransformerClassifier",
    "Workload",
    "mlp",
    "tiny_bert_mlm",
    "tiny_bert_nsp",
    "tiny_gpt2",
    "tiny_vit",
]
