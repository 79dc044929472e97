"""Convolutional image classifiers: plain CNNs, and small relatives of ResNet and MobileNetV3."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Two convolution blocks (BatchNorm, in-place ReLU), average pooling, one linear layer.

    Takes images ``[B, in_channels, H, W]`` and gives logits ``[B, num_classes]``. ``dropout`` acts
    on the pooled features.
    """

    def __init__(
        self, in_channels: int = 1, channels: int = 16, num_classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        pooled = torch.flatten(self.features(images), 1)
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


class PlainCNN(nn.Module):
    """Convolutions with BatchNorm and ReLU, max-pooling after every second one, one linear layer.

    Takes square images ``[B, in_channels, image_size, image_size]`` and gives logits
    ``[B, num_classes]``.
    """

    def __init__(
        self,
        in_channels: int = 3,
        channels: tuple[int, ...] = (32, 32, 64, 64),
        image_size: int = 32,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise((in_channels, *channels)), start=1):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
            layers.append(nn.ReLU(inplace=True))
            if number % 2 == 0:
                layers.append(nn.MaxPool2d(2))
                image_size //= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels[-1] * image_size**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Past a block: the input itself, or a 1×1 convolution with BatchNorm where the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm beside a shortcut; 1×1 shortcut where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        activated: Tensor = self.relu(out)
        return activated


class StackedNet(nn.Module):
    """A stem, blocks, average pooling and one linear layer, from images to logits ``[B, num_classes]``."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        logits: Tensor = self.classifier(torch.flatten(self.pool(features), 1))
        return logits


def plain_stem(in_channels: int, channels: int) -> nn.Sequential:
    """A 3×3 convolution with BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


class ResidualNet(StackedNet):
    """A stem and two residual blocks, the second at half the resolution; logits ``[B, num_classes]``."""

    def __init__(self, in_channels: int = 3, channels: int = 16, num_classes: int = 10) -> None:
        stem = plain_stem(in_channels, channels)
        blocks = [ResidualBlock(channels, channels), ResidualBlock(channels, 2 * channels, stride=2)]
        super().__init__(stem, blocks, 2 * channels, num_classes)


class BottleneckBlock(nn.Module):
    """1×1, 3×3 and 1×1 convolution with BatchNorm beside a shortcut, as in ResNet-50 and deeper.

    The 3×3 convolution has ``width`` channels and the stride, the output ``4 * width`` channels.
    """

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = 4 * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += self.shortcut(x)
        activated: Tensor = self.relu(out)
        return activated


class BottleneckNet(StackedNet):
    """A stem and two bottleneck blocks, the second at half the resolution.

    Takes images ``[B, in_channels, H, W]`` and gives logits ``[B, num_classes]``. The stem has no
    max-pooling: on small images it leaves no zeros behind the ReLU, and as in ``InvertedResidualNet``
    the bias of the stem's BatchNorm would have a true gradient of zero.
    """

    def __init__(self, in_channels: int = 3, width: int = 8, num_classes: int = 10) -> None:
        stem = plain_stem(in_channels, 4 * width)
        blocks = [BottleneckBlock(4 * width, width), BottleneckBlock(4 * width, 2 * width, stride=2)]
        super().__init__(stem, blocks, 8 * width, num_classes)


def mobile_convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: int = 1,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.Hardswish,
) -> nn.Sequential:
    """Convolution and BatchNorm with MobileNetV3's settings, and an activation if there is one."""
    padding = kernel_size // 2
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.01),
    ]
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)


class SqueezeExcitation(nn.Module):
    """Scales every channel by a factor between 0 and 1 that depends on all channels' averages."""

    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed_channels, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed_channels, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.scale(x) * x
        return scaled


class InvertedResidual(nn.Module):
    """Widen, depthwise convolution, squeeze-and-excite, narrow; a shortcut where the shape stays.

    Where ``wide_channels`` equals ``in_channels``, the first step is left out, and with no
    ``squeezed_channels`` the third.
    """

    def __init__(
        self,
        in_channels: int,
        wide_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        *,
        squeezed_channels: int,
        activation: type[nn.Module] = nn.Hardswish,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if wide_channels != in_channels:
            layers.append(mobile_convolution(in_channels, wide_channels, activation=activation))
        layers.append(
            mobile_convolution(
                wide_channels, wide_channels, kernel_size, stride, groups=wide_channels, activation=activation
            )
        )
        if squeezed_channels:
            layers.append(SqueezeExcitation(wide_channels, squeezed_channels))
        layers.append(mobile_convolution(wide_channels, out_channels, activation=None))
        self.block = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        if self.has_shortcut:
            out += x
        return out


class InvertedResidualNet(nn.Module):
    """A small net in the manner of MobileNetV3 (Howard et al., 2019): stem, two inverted residuals, head.

    Takes images ``[B, in_channels, H, W]`` and gives logits ``[B, num_classes]``. No 1×1 convolution
    with BatchNorm follows the end of a block: the bias of the block's last BatchNorm would have a
    true gradient of zero, and rounding errors alone would move it.
    """

    def __init__(self, in_channels: int = 3, channels: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            mobile_convolution(in_channels, channels, kernel_size=3),
            InvertedResidual(channels, 2 * channels, channels, 3, squeezed_channels=channels // 2),
            InvertedResidual(channels, channels, 2 * channels, 5, stride=2, squeezed_channels=channels // 4),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(
            nn.Linear(2 * channels, 4 * channels),
            nn.Hardswish(inplace=True),
            nn.Linear(4 * channels, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits
