"""ResNet-101 and MobileNetV3-Large as published, for where torchvision does not import.

Layer by layer the same shapes as torchvision's, so the same parameters, kernels and memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .vision import BottleneckBlock, SqueezeExcitation

_NUM_CLASSES = 1000

_RESNET_101 = ((64, 3, 1), (128, 4, 2), (256, 23, 2), (512, 3, 2))
"""Of each stage: width, blocks, stride of the first block (He et al., 2016, Table 1)."""

_MOBILENET_V3_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
"""Of each block: kernel, wide channels, channels, squeezes, hardswish, stride (Howard et al., 2019)."""


class ResNet101(nn.Module):
    """Takes images ``[B, 3, H, W]`` and gives logits ``[B, 1000]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = 64
        for width, num_blocks, stride in _RESNET_101:
            for number in range(num_blocks):
                blocks.append(BottleneckBlock(channels, width, stride if number == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, _NUM_CLASSES)
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.blocks(self.stem(images)))
        logits: Tensor = self.classifier(torch.flatten(features, 1))
        return logits


class MobileNetV3Large(nn.Module):
    """Takes images ``[B, 3, H, W]`` and gives logits ``[B, 1000]``; dropout 0.2 before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 16, 3, stride=2, activation=nn.Hardswish)]
        channels = 16
        for kernel_size, wide, out, squeezes, is_hard, stride in _MOBILENET_V3_LARGE:
            activation = nn.Hardswish if is_hard else nn.ReLU
            layers.append(_MobileBlock(channels, wide, out, kernel_size, stride, squeezes, activation))
            channels = out
        last = 6 * channels
        layers.append(_convolution(channels, last, 1, activation=nn.Hardswish))
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


class _MobileBlock(nn.Module):
    """Widen, depthwise convolution, squeeze-and-excite where told, narrow; a shortcut where it fits."""

    def __init__(
        self,
        channels: int,
        wide: int,
        out: int,
        kernel_size: int,
        stride: int,
        squeezes: bool,
        activation: type[nn.Module],
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if wide != channels:
            layers.append(_convolution(channels, wide, 1, activation=activation))
        layers.append(
            _convolution(wide, wide, kernel_size, stride=stride, groups=wide, activation=activation)
        )
        if squeezes:
            layers.append(SqueezeExcitation(wide, _multiple_of_8(wide / 4)))
        layers.append(_convolution(wide, out, 1))
        self.block = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        if self.has_shortcut:
            out += x
        return out


def _convolution(
    channels: int,
    out: int,
    kernel_size: int,
    *,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = None,
) -> nn.Sequential:
    """Convolution, BatchNorm with MobileNetV3's settings, and an activation if there is one."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, out, kernel_size, stride, kernel_size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out, eps=1e-3, momentum=0.01),
    ]
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)


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
