"""The models that Zico trains, at batch sizes that keep an H200 busy for milliseconds.

The paper names six models and says that all of them use SGD. It lists neither data sets nor image sizes nor
sequence lengths, and batch sizes appear only on the axes of its Figure 5, so every size here is our choice;
``NAME@SIZE`` takes another batch size, ``NAME/2`` updates with every second batch. BERT is the published
BERT-base, ResNet-50 and ResNet-110 are the published networks, NASNet-A is the published mobile network
(4 @ 1056). RHN is the published language model of depth 10, unrolled over 8 time steps instead of 35, so that
its trace has 2,300 kernels instead of 10,000; ``rhn35`` is unrolled over all. GNMT is represented by a
relative, an LSTM translation model of two layers, or of GNMT's eight in ``gnmt8``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import SMALL_PREFIX, Case, find_case
from benchmarks.workloads import FULL_SIZE
from benchmarks.workloads.deep_vision import RESNET_50, ResNet
from benchmarks.workloads.highway import PENN_LENGTH, HighwayLanguageModel, highway_batch
from benchmarks.workloads.language import LSTMTranslation
from benchmarks.workloads.nasnet import NASNetA
from benchmarks.workloads.paper_batches import image_batch
from benchmarks.workloads.seeding import seeded
from benchmarks.workloads.vision import ResidualBlock, plain_stem

MODELS = ("nasnet", "resnet110", "resnet50", "gnmt", "rhn", "bert")
"""The six, in the order of the paper's tables."""
_RHN_LENGTH = 8


class CifarResNet(nn.Module):
    """A ResNet for images of 32×32: three stages of ``num_blocks`` residual blocks; 18 make ResNet-110."""

    def __init__(self, num_blocks: int = 18, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = plain_stem(3, 16)
        blocks: list[nn.Module] = []
        before = 16
        for channels in (16, 32, 64):
            for number in range(num_blocks):
                stride = 2 if number == 0 and channels > 16 else 1
                blocks.append(ResidualBlock(before, channels, stride))
                before = channels
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.classifier(pooled)
        return logits


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of images' classes, or of every next token."""
    inputs, labels = batch
    loss: Tensor = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    return loss


def _sentences(seed: int, batch_size: int, length: int = 16) -> dict[str, Tensor]:
    """Sentence pairs of the translation workload, cut to their last tokens."""
    batch = FULL_SIZE["lstm_translation"].batch(seed, batch_size)
    source, target = batch["source"], batch["target"]
    return {"source": source[:, -length:], "target": torch.cat([target[:, :1], target[:, -length:]], dim=1)}


_GNMT, _BERT = FULL_SIZE["lstm_translation"], FULL_SIZE["bert_base_mlm_no_dropout"]
_CASES: dict[str, tuple[int, Any, Any, Any, str]] = {
    "nasnet": (
        *(128, seeded(NASNetA), image_batch, _classify),
        "NASNet-A (4 @ 1056), {} images of 224×224, no auxiliary classifier, no drop path",
    ),
    "resnet110": (
        *(512, seeded(CifarResNet), partial(image_batch, image_size=32, num_classes=10), _classify),
        "ResNet-110, {} images of 32×32",
    ),
    "resnet50": (
        *(96, seeded(ResNet, num_blocks=RESNET_50), image_batch, _classify),
        "ResNet-50, {} images of 224×224",
    ),
    "gnmt": (
        *(256, _GNMT.build, _sentences, _GNMT.loss),
        "two LSTMs of two layers with attention (GNMT has two of eight), {} pairs of 16 tokens",
    ),
    "rhn": (
        *(256, seeded(HighwayLanguageModel), partial(highway_batch, length=_RHN_LENGTH), _classify),
        f"RHN of depth 10 with 830 units, {{}} rows of {_RHN_LENGTH} tokens (published: 20 of 35)",
    ),
    "gnmt8": (
        *(256, seeded(LSTMTranslation, num_layers=8), _sentences, _GNMT.loss),
        "two LSTMs of eight layers with attention, {} pairs of 16 tokens",
    ),
    "rhn35": (
        *(64, seeded(HighwayLanguageModel), partial(highway_batch, length=PENN_LENGTH), _classify),
        f"RHN of depth 10 with 830 units, {{}} rows of {PENN_LENGTH} tokens",
    ),
    "bert": (64, _BERT.build, _BERT.batch, _BERT.loss, "BERT-base, {} rows of 128 tokens, no dropout"),
    "small:resnet110": (
        *(4, seeded(CifarResNet, num_blocks=1, num_classes=4)),
        *(partial(image_batch, image_size=32, num_classes=4), _classify, "small"),
    ),
    "small:rhn": (
        *(4, seeded(HighwayLanguageModel, vocab_size=20, hidden_size=8, depth=2)),
        *(partial(highway_batch, length=3, vocab_size=20), _classify, "small"),
    ),
}
"""Batch size, model by seed, batch by seed and size, loss, and a description."""


def find_zico_case(name: str) -> Case:
    """Look up ``NAME``, ``NAME@SIZE`` or ``small:NAME``; `ValueError` where there is none."""
    base, at, size_text = name.partition("/")[0].partition("@")
    if at and not (size_text.isdecimal() and int(size_text) > 0):
        raise ValueError(f"expected NAME@SIZE with a whole number above 0; got {name!r}")
    if base not in _CASES and base.startswith(SMALL_PREFIX):
        return find_case(base)
    if base not in _CASES:
        raise ValueError(f"expected names among {', '.join(MODELS)} and small:NAME; got {name!r}")
    usual, build, batch, loss, note = _CASES[base]
    size = int(size_text) if at else usual
    return Case(name, size, build, loss, lambda seed: batch(seed, size), note.format(size))


def batches_per_update(name: str) -> int:
    """The batches between two updates: 2 for ``NAME/2``."""
    return int(name.partition("/")[2] or 1)
