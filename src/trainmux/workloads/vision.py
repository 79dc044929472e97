"""Convolutional image classifiers: a small CNN and a small residual net."""

from __future__ import annotations

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


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm beside a shortcut; 1×1 shortcut where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        activated: Tensor = self.relu(out)
        return activated


class ResidualNet(nn.Module):
    """A stem and two residual blocks, the second at half the resolution; logits ``[B, num_classes]``."""

    def __init__(self, in_channels: int = 3, channels: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        self.blocks = nn.Sequential(
            ResidualBlock(channels, channels),
            ResidualBlock(channels, 2 * channels, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(2 * channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        logits: Tensor = self.classifier(torch.flatten(self.pool(features), 1))
        return logits
