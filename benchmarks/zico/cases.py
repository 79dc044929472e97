"""The models that Zico trains, at batch sizes that keep an H200 busy for milliseconds.

The paper names six models and says that all of them use SGD. It lists neither data sets nor image sizes nor
sequence lengths, and batch sizes appear only on the axes of its Figure 5, so every size here is our choice;
``NAME@SIZE`` takes another batch size. BERT is the published BERT-base, ResNet-50 and ResNet-110 are the
published networks, NASNet-A is the published mobile network (4 @ 1056). RHN is the published language model
of depth 10, unrolled over 8 time steps instead of 35, so that its trace has 2,300 kernels instead of 10,000.
GNMT is represented by a smaller relative, an LSTM translation model.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import SMALL_PREFIX, Case, find_case
from benchmarks.workloads import FULL_SIZE
from benchmarks.workloads.deep_vision import RESNET_50, ResNet
from benchmarks.workloads.highway import HighwayLanguageModel, highway_batch
from benchmarks.workloads.nasnet import NASNetA
from benchmarks.workloads.paper_batches import image_batch
from benchmarks.workloads.seeding import seeded
from benchmarks.workloads.vision import ResidualBlock, plain_stem

MODELS = ("nasnet", "resnet110", "resnet50", "gnmt", "rhn", "bert")
"""The six, in the order of the paper's tables."""
FIGURE_8 = (("rhn", "gnmt"), ("nasnet", "gnmt"), ("bert", "gnmt"), ("nasnet", "resnet110"))
SAMPLED = (("nasnet", "resnet110"), ("resnet110", "resnet110"), ("bert", "bert"))
"""Pairs whose memory Figures 7 and 9 show over time."""
CHANGING = (("nasnet", "nasnet"), ("nasnet", "resnet110"))
"""Pairs whose budget changes while they run, as in Figure 10."""
_RHN_LENGTH = 8

PairNames = tuple[str, str]


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
    base, at, size_text = name.partition("@")
    if at and not (size_text.isdecimal() and int(size_text) > 0):
        raise ValueError(f"expected NAME@SIZE with a whole number above 0; got {name!r}")
    if base not in _CASES and base.startswith(SMALL_PREFIX):
        return find_case(name)
    if base not in _CASES:
        raise ValueError(f"expected names among {', '.join(MODELS)} and small:NAME; got {name!r}")
    usual, build, batch, loss, note = _CASES[base]
    size = int(size_text) if at else usual
    return Case(name, size, build, loss, lambda seed: batch(seed, size), note.format(size))


def parse_pairs(text: str) -> list[PairNames]:
    """Read pairs ``A+B`` with commas, or ``all`` 21 of them, the paper's first; `ValueError` otherwise."""
    if text == "all":
        first = [*FIGURE_8, *SAMPLED[1:], CHANGING[0]]
        known = [set(pair) for pair in first]
        return first + [pair for pair in combinations_with_replacement(MODELS, 2) if set(pair) not in known]
    found: list[PairNames] = []
    for pair in text.split(","):
        names = [name.strip() for name in pair.split("+")]
        if len(names) != 2:
            raise ValueError(f"expected pairs A+B, with commas; got {pair!r}")
        for name in names:
            find_zico_case(name)
        found.append((names[0], names[1]))
    return list(dict.fromkeys(found))


def model_of(name: str) -> str:
    """Strip prefix and batch size from a case's name."""
    return name.removeprefix(SMALL_PREFIX).partition("@")[0]
