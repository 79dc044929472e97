"""Deep ResNets and MobileNetV3-Large as published, for where torchvision does not import.

Layer by layer the same shapes as torchvision's, so the same parameters, kernels and memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .vision import BottleneckBlock, InvertedResidual, StackedNet, mobile_convolution

_NUM_CLASSES = 1000

RESNET_50 = (3, 4, 6, 3)
RESNET_101 = (3, 4, 23, 3)
"""Blocks of each stage (He et al., 2016, Table 1)."""

_MOBILENET_V3_LARGE = (
    *((3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1)),
    *((5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1)),
    *((3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1)),
    *((3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1)),
    *((5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1)),
)
"""Of each block: kernel, wide channels, channels, squeezes, hardswish, stride (Howard et al., 2019)."""


class ResNet(StackedNet):
    """A ResNet of bottleneck blocks, so many in each stage.

    Takes images ``[B, 3, H, W]`` and gives logits ``[B, 1000]``.
    """

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(num_blocks):
            width = 64 << stage
            for number in range(count):
                blocks.append(BottleneckBlock(channels, width, stride=2 if stage and number == 0 else 1))
                channels = 4 * width
        super().__init__(stem, blocks, channels, _NUM_CLASSES)
        _initialize(self)


class MobileNetV3Large(nn.Module):
    """Takes images ``[B, 3, H, W]`` and gives logits ``[B, 1000]``; dropout 0.2 before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [mobile_convolution(3, 16, 3, stride=2)]
        channels = 16
        for kernel_size, wide, out, squeezes, is_hard, stride in _MOBILENET_V3_LARGE:
            block = InvertedResidual(
                channels,
                wide,
                out,
                kernel_size,
                stride,
                squeezed_channels=_multiple_of_8(wide / 4) if squeezes else 0,
                activation=nn.Hardswish if is_hard else nn.ReLU,
            )
            layers.append(block)
            channels = out
        last = 6 * channels
        layers.append(mobile_convolution(channels, last))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Sequential(
            nn.Linear(last, 1280),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2, inplace=True),
            nn.Linear(1280, _NUM_CLASSES),
        )
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits


def _multiple_of_8(value: float) -> int:
    """The nearest multiple of 8, but never more than a tenth below ``value``."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
