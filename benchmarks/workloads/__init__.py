"""Ordinary PyTorch models that tests, demo and benchmarks train. See docs/layout.md."""

from .dense import mlp
from .huggingface import tiny_bert_mlm, tiny_bert_nsp, tiny_gpt2, tiny_vit
from .language import LSTMLanguageModel, LSTMTranslation, TransformerClassifier
from .paper import FULL_SIZE, SizedWorkload
from .recommend import DLRM, JointDLRM
from .registry import SMALL, ClickBatch, TokenBatch, Workload
from .sample import SAMPLE
from .vision import BottleneckNet, InvertedResidualNet, PlainCNN, ResidualNet, SmallCNN

__all__ = [
    "DLRM",
    "FULL_SIZE",
    "SAMPLE",
    "SMALL",
    "BottleneckNet",
    "ClickBatch",
    "InvertedResidualNet",
    "JointDLRM",
    "LSTMLanguageModel",
    "LSTMTranslation",
    "PlainCNN",
    "ResidualNet",
    "SizedWorkload",
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
