"""The models that Zico trains, at batch sizes that keep an H200 busy for milliseconds.

The paper names six models and says that all of them use SGD. It lists neither data sets nor image sizes nor
sequence lengths, and batch sizes appear only on the axes of its Figure 5, so every size here is our choice;
``NAME@SIZE`` takes another batch size. BERT is the published BERT-base, ResNet-50 and ResNet-110 are the
published networks, NASNet-A is the published mobile network (4 @ 1056). RHN is the published language model
of depth 10, unrolled over 8 time steps instead of 35, so that its trace has 2,300 kernels instead of 10,000.
GNMT is represented by a smaller relative, an LSTM translation model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import FULL_SIZE, SMALL
from benchmarks.workloads.deep_vision import RESNET_50, ResNet
from benchmarks.workloads.highway import HighwayLanguageModel, highway_batch
from benchmarks.workloads.nasnet import NASNetA
from benchmarks.workloads.paper_batches import image_batch
from benchmarks.workloads.seeding import seeded
from benchmarks.workloads.vision import ResidualBlock

MODELS = ("nasnet", "resnet110", "resnet50", "gnmt", "rhn", "bert")
"""The six, in the order of the paper's tables."""
FIGURE_8 = (("rhn", "gnmt"), ("nasnet", "gnmt"), ("bert", "gnmt"), ("nasnet", "resnet110"))
SAMPLED = (("nasnet", "resnet110"), ("resnet110", "resnet110"), ("bert", "bert"))
"""Pairs whose memory Figures 7 and 9 show over time."""
CHANGING = (("nasnet", "nasnet"), ("nasnet", "resnet110"))
"""Pairs whose budget changes while they run, as in Figure 10."""
SMALL_PREFIX = "small:"
_RHN_LENGTH = 8

PairNames = tuple[str, str]


@dataclass(frozen=True)
class ZicoCase:
    """A model to train: ``build(seed)`` makes it on the CPU in fp32, ``batch(seed, batch_size)`` CPU tensors.

    ``note`` describes it, with ``{}`` in place of the batch size.
    """

    name: str
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    batch: Callable[[int, int], Any]
    batch_size: int
    note: str
    is_image: bool = False

    @property
    def description(self) -> str:
        return self.note.format(self.batch_size)


class CifarResNet(nn.Module):
    """A ResNet for images of 32×32: three stages of ``num_blocks`` residual blocks; 18 make ResNet-110."""

    def __init__(self, num_blocks: int = 18, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
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


@functools.cache
def _full_size() -> dict[str, ZicoCase]:
    gnmt, bert = FULL_SIZE["lstm_translation"], FULL_SIZE["bert_base_mlm_no_dropout"]
    small_images = partial(image_batch, image_size=32, num_classes=10)
    words = partial(highway_batch, length=_RHN_LENGTH)
    rhn_note = f"RHN of depth 10 with 830 units, {{}} rows of {_RHN_LENGTH} tokens (published: 20 of 35)"
    gnmt_note = "two LSTMs of two layers with attention (GNMT has two of eight), {} pairs of 16 tokens"
    nasnet_note = "NASNet-A (4 @ 1056), {} images of 224×224, no auxiliary classifier, no drop path"
    resnet110_note = "ResNet-110, {} images of 32×32"
    bert_note = "BERT-base, {} rows of 128 tokens, no dropout"
    resnet50 = seeded(ResNet, num_blocks=RESNET_50)
    cases = (
        ZicoCase("nasnet", seeded(NASNetA), _classify, image_batch, 128, nasnet_note, True),
        ZicoCase("resnet110", seeded(CifarResNet), _classify, small_images, 512, resnet110_note, True),
        ZicoCase("resnet50", resnet50, _classify, image_batch, 96, "ResNet-50, {} images of 224×224", True),
        ZicoCase("gnmt", gnmt.build, gnmt.loss, _sentences, 256, gnmt_note),
        ZicoCase("rhn", seeded(HighwayLanguageModel), _classify, words, 256, rhn_note),
        ZicoCase("bert", bert.build, bert.loss, bert.batch, 64, bert_note),
    )
    return {case.name: case for case in cases}


def _small(name: str) -> ZicoCase:
    """A tiny relative of one of the six, or one of the small workloads, for tests on a CPU."""
    images = partial(image_batch, image_size=32, num_classes=4)
    words = partial(highway_batch, length=3, vocab_size=20)
    own = {
        "resnet110": (seeded(CifarResNet, num_blocks=1, num_classes=4), images),
        "rhn": (seeded(HighwayLanguageModel, vocab_size=20, hidden_size=8, depth=2), words),
    }
    full_name = f"{SMALL_PREFIX}{name}"
    if name in own:
        build, batch = own[name]
        return ZicoCase(full_name, build, _classify, batch, 4, "small", batch is images)
    small = SMALL[name]

    def small_batch(seed: int, batch_size: int) -> Any:
        return small.batch(seed, torch.float32)

    return ZicoCase(full_name, small.build, small.loss, small_batch, 4, "small")


def find_zico_case(name: str) -> ZicoCase:
    """Look up ``NAME``, ``NAME@SIZE`` or ``small:NAME``; `ValueError` where there is none."""
    base, at, size = name.partition("@")
    if at and not (size.isdecimal() and int(size) > 0):
        raise ValueError(f"expected NAME@SIZE with a whole number above 0; got {name!r}")
    try:
        if base.startswith(SMALL_PREFIX):
            return _small(name.removeprefix(SMALL_PREFIX))
        case = _full_size()[base]
    except KeyError:
        raise ValueError(f"expected names among {', '.join(MODELS)} and small:NAME; got {name!r}") from None
    return replace(case, name=name, batch_size=int(size) if at else case.batch_size)


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
