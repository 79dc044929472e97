"""What `bench zico` trains: Zico's six models, at sizes that keep an H200 busy for milliseconds.

The paper's text names the models and says that all use SGD. It has no table of them: neither data sets nor
image sizes nor sequence lengths, and the batch sizes stand on the axes of Figure 5 alone, which the text does
not repeat. So every batch size here is ours; ``NAME@SIZE`` takes another one. BERT is the published
BERT-base, ResNet-50 and ResNet-110 are the published networks, NASNet-A is the published "mobile" network
(4 @ 1056), RHN the published language model of depth 10 unrolled over 8 steps of time instead of 35, so that
its trace has 2,300 kernels and not 10,000. GNMT is a smaller relative of it, the LSTM translation workload.
An MLP stands for jobs that leave most of a device idle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.deep_vision import RESNET_50, ResNet
from benchmarks.workloads.highway import HighwayLanguageModel, highway_batch
from benchmarks.workloads.nasnet import NASNetA
from benchmarks.workloads.paper_batches import image_batch, vector_batch
from benchmarks.workloads.seeding import seeded
from benchmarks.workloads.vision import ResidualBlock

from .cases import SMALL_PREFIX, find_case

PAPER_NAMES = {
    "nasnet": "NASNet",
    "resnet110": "ResNet-110",
    "resnet50": "ResNet-50",
    "gnmt": "GNMT",
    "rhn": "RHN",
    "bert": "BERT",
}
"""The six, by our names, in the order of the paper's tables."""
BATCH_SEPARATOR = "@"

LARGE_MACHINE_BYTES = 32 << 30
SMALL_MACHINE_BYTES = 11 << 30
_ON_THE_LARGE_MACHINE = ("resnet50", "bert")
"""§7: a V100 of 32 GB for these, an RTX 2080 Ti of 11 GB for the others and for all unequal pairs."""

_RHN_LENGTH = 8


@dataclass(frozen=True)
class ZicoCase:
    """``build(seed)`` makes a model on the CPU in fp32, ``batch(seed)`` a batch of CPU tensors."""

    name: str
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    is_image: bool
    note: str


@dataclass(frozen=True)
class _Sized:
    """A case whose batches may be of any size; ``note`` has a place for it."""

    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int, int], Any]
    batch_size: int
    note: str
    is_image: bool = False

    def case(self, name: str, batch_size: int | None) -> ZicoCase:
        size = batch_size or self.batch_size
        note = self.note.format(size)
        return ZicoCase(name, self.build, self.loss, lambda seed: self.batch(seed, size), self.is_image, note)


class CifarResNet(nn.Module):
    """A ResNet for images of 32×32: three stages of residual blocks with 16, 32 and 64 channels.

    ``num_blocks`` per stage; 18 make ResNet-110.
    """

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


def _wide_mlp(width: int = 2048, num_hidden: int = 6) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(784, width), nn.ReLU()]
    for _ in range(num_hidden):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of images, and of every next word."""
    inputs, labels = batch
    logits = model(inputs)
    loss: Tensor = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return loss


def _shorter(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The last tokens of source and target, which end as before."""
    source, target = batch["source"], batch["target"]
    begin = target[:, :1]
    return {"source": source[:, -length:], "target": torch.cat([begin, target[:, -length:]], dim=1)}


@functools.cache
def _full_size() -> dict[str, _Sized]:
    translation, bert = find_case("lstm_translation"), find_case("bert_base_mlm_no_dropout")
    return {
        "nasnet": _Sized(
            seeded(NASNetA),
            _classify,
            image_batch,
            128,
            "NASNet-A (4 @ 1056), {} images of 224×224, without auxiliary classifier and drop path",
            is_image=True,
        ),
        "resnet110": _Sized(
            seeded(CifarResNet),
            _classify,
            partial(image_batch, image_size=32, num_classes=10),
            512,
            "ResNet-110, {} images of 32×32",
            is_image=True,
        ),
        "resnet50": _Sized(
            seeded(ResNet, num_blocks=RESNET_50),
            _classify,
            image_batch,
            96,
            "ResNet-50, {} images of 224×224",
            is_image=True,
        ),
        "gnmt": _Sized(
            translation.build,
            translation.loss,
            lambda seed, size: _shorter(translation.batch(seed, size), 16),
            256,
            "two LSTMs of two layers with attention (GNMT has two of eight), {} pairs of 16 tokens",
        ),
        "rhn": _Sized(
            seeded(HighwayLanguageModel),
            _classify,
            partial(highway_batch, length=_RHN_LENGTH),
            256,
            f"RHN of depth 10 with 830 units, {{}} rows of {_RHN_LENGTH} tokens (published: 20 of 35)",
        ),
        "bert": _Sized(bert.build, bert.loss, bert.batch, 64, "BERT-base, {} rows of 128 tokens, no dropout"),
        "mlp": _Sized(
            seeded(_wide_mlp),
            _classify,
            partial(vector_batch, num_features=784, num_classes=10),
            8192,
            "an MLP of seven hidden layers of 2048, {} rows",
        ),
    }


@functools.cache
def _small() -> dict[str, ZicoCase]:
    """Relatives of those of the six that the small workloads do not have, for tests on a CPU."""
    images = partial(image_batch, batch_size=4, image_size=32, num_classes=4)
    words = partial(highway_batch, batch_size=4, length=3, vocab_size=20)
    cases = (
        (
            "nasnet",
            seeded(
                NASNetA,
                num_blocks=1,
                penultimate_channels=24,
                stem_channels=8,
                num_classes=4,
                num_stages=1,
            ),
            images,
        ),
        ("resnet110", seeded(CifarResNet, num_blocks=1, num_classes=4), images),
        ("rhn", seeded(HighwayLanguageModel, vocab_size=20, hidden_size=8, depth=2), words),
    )
    return {
        name: ZicoCase(f"{SMALL_PREFIX}{name}", build, _classify, batch, batch is images, "small")
        for name, build, batch in cases
    }


def zico_case(name: str) -> ZicoCase:
    """The case of that name, ``NAME@SIZE`` with batches of another size, or ``small:NAME`` of the small ones.

    ``KeyError`` where there is none, ``ValueError`` for a size that is no whole number above 0.
    """
    if name.startswith(SMALL_PREFIX):
        short = name.removeprefix(SMALL_PREFIX)
        if short in _small():
            return _small()[short]
        case = find_case(name)
        return ZicoCase(
            name, case.build, case.loss, lambda seed: case.batch(seed, 0), is_image=False, note="small"
        )
    base, separator, size = name.partition(BATCH_SEPARATOR)
    if separator and not (size.isdecimal() and int(size) > 0):
        raise ValueError(f"expected NAME@SIZE with a whole number above 0; got {name!r}")
    return _full_size()[base].case(name, int(size) if separator else None)


def zico_case_names() -> list[str]:
    """The full-size ones."""
    return list(_full_size())


def base_name(name: str) -> str:
    """Without size and prefix: of which model a case is."""
    return name.removeprefix(SMALL_PREFIX).partition(BATCH_SEPARATOR)[0]


def machine_bytes(names: Iterable[str]) -> int:
    """The memory of the paper's machine that such jobs ran on."""
    is_large = all(base_name(name) in _ON_THE_LARGE_MACHINE for name in names)
    return LARGE_MACHINE_BYTES if is_large else SMALL_MACHINE_BYTES


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The paper's: plain SGD; fused on a CUDA device, for the sake of the eager baselines."""
    is_cuda = next(model.parameters()).is_cuda
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=is_cuda)
