"""What `bench zico` trains: relatives of Zico's six models, at sizes that keep an H200 busy for milliseconds.

BERT is the published one; GNMT is the LSTM translation workload; ResNet-50 is the published one, ResNet-110
the CIFAR network. NASNet-A and the recurrent highway network are left out: of the first there is no
implementation in the packages used here, the second is a loop in Python of which a trace is thousands of
nodes long. An MLP stands for jobs that leave most of a device idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainmux.workloads.deep_vision import RESNET_50, ResNet
from trainmux.workloads.paper_batches import image_batch, vector_batch
from trainmux.workloads.seeding import seeded
from trainmux.workloads.vision import ResidualBlock

from .cases import find_case


@dataclass(frozen=True)
class ZicoCase:
    """``build(seed)`` makes a model on the CPU in fp32, ``batch(seed)`` a batch of CPU tensors."""

    name: str
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    is_image: bool
    note: str


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
    inputs, labels = batch
    loss: Tensor = F.cross_entropy(model(inputs), labels)
    return loss


def _known(name: str, workload: str, batch_size: int, note: str) -> ZicoCase:
    case = find_case(workload)
    return ZicoCase(
        name, case.build, case.loss, lambda seed: case.batch(seed, batch_size), is_image=False, note=note
    )


def _shorter(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The last tokens of source and target, which end as before."""
    source, target = batch["source"], batch["target"]
    begin = target[:, :1]
    return {"source": source[:, -length:], "target": torch.cat([begin, target[:, -length:]], dim=1)}


def _full_size() -> dict[str, ZicoCase]:
    translation = find_case("lstm_translation")
    cases = [
        _known("bert", "bert_base_mlm_no_dropout", 64, "BERT-base, 64 rows of 128 tokens, no dropout"),
        ZicoCase(
            "gnmt",
            translation.build,
            translation.loss,
            lambda seed: _shorter(translation.batch(seed, 256), 16),
            is_image=False,
            note="two LSTMs of two layers with attention, 256 pairs of 16 tokens",
        ),
        ZicoCase(
            "resnet50",
            seeded(ResNet, num_blocks=RESNET_50),
            _classify,
            lambda seed: image_batch(seed, 96),
            is_image=True,
            note="ResNet-50, 96 images of 224×224",
        ),
        ZicoCase(
            "resnet110",
            seeded(CifarResNet),
            _classify,
            partial(image_batch, batch_size=512, image_size=32, num_classes=10),
            is_image=True,
            note="ResNet-110, 512 images of 32×32",
        ),
        ZicoCase(
            "mlp",
            seeded(_wide_mlp),
            _classify,
            partial(vector_batch, batch_size=8192, num_features=784, num_classes=10),
            is_image=False,
            note="an MLP of seven hidden layers of 2048, 8192 rows",
        ),
    ]
    return {case.name: case for case in cases}


def zico_case(name: str) -> ZicoCase:
    """The case of that name, or ``small:NAME`` of the small workloads; ``KeyError`` where there is none."""
    if name.startswith("small:"):
        case = find_case(name)
        return ZicoCase(
            name, case.build, case.loss, lambda seed: case.batch(seed, 0), is_image=False, note="small"
        )
    return _full_size()[name]


def zico_case_names() -> list[str]:
    """The full-size ones."""
    return list(_full_size())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The paper's: plain SGD; fused on a CUDA device, for the sake of the eager baselines."""
    is_cuda = next(model.parameters()).is_cuda
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=is_cuda)
