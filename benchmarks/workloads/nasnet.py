"""NASNet-A for images (Zoph et al., 2018): the cells that a search found, stacked as for ImageNet.

Written from the paper's Figure 4 and Appendix A.4. Left out: the auxiliary classifier, which the published
number of parameters does not count, dropout and ScheduledDropPath.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NUM_CELL_OUTPUTS = 6
_EPS, _MOMENTUM = 1e-3, 3e-4
"""Of every batch norm; the published code keeps 0.9997 of a running value."""


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_EPS, momentum=_MOMENTUM)


def _padding(kernel_size: int) -> int:
    return kernel_size // 2


class _Separable(nn.Sequential):
    """ReLU, depthwise and pointwise convolution, batch norm; all of it twice, the stride in the first."""

    def __init__(self, channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for before, step in ((channels, stride), (out_channels, 1)):
            layers += [
                nn.ReLU(),
                nn.Conv2d(
                    before, before, kernel_size, step, _padding(kernel_size), groups=before, bias=False
                ),
                nn.Conv2d(before, out_channels, 1, bias=False),
                _norm(out_channels),
            ]
        super().__init__(*layers)


class _Squeeze(nn.Sequential):
    """ReLU, 1×1 convolution to a cell's width, batch norm."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(channels, out_channels, 1, bias=False), _norm(out_channels))


class _Halve(nn.Module):
    """Half the height and width without losing every other pixel: two 1×1 paths, one shifted by a pixel."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.straight = nn.Conv2d(channels, out_channels // 2, 1, stride=2, bias=False)
        self.shifted = nn.Conv2d(channels, out_channels - out_channels // 2, 1, stride=2, bias=False)
        self.norm = _norm(out_channels)

    def forward(self, images: Tensor) -> Tensor:
        active = images.relu()
        moved = nn.functional.pad(active[:, :, 1:, 1:], (0, 1, 0, 1))
        out: Tensor = self.norm(torch.cat([self.straight(active), self.shifted(moved)], dim=1))
        return out


def _fit(channels: int, out_channels: int, halves: bool) -> nn.Module:
    """What brings the cell before the last one to this cell's size; nothing where it has it already."""
    if halves:
        return _Halve(channels, out_channels)
    return nn.Identity() if channels == out_channels else _Squeeze(channels, out_channels)


def _average() -> nn.AvgPool2d:
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)


class NormalCell(nn.Module):
    """A cell that keeps the size: outputs ``6 × width`` channels of the last two cells' outputs."""

    def __init__(self, channels: int, channels_before: int, width: int, *, halves: bool) -> None:
        super().__init__()
        self.squeeze = _Squeeze(channels, width)
        self.fit = _fit(channels_before, width, halves)
        self.h_5x5 = _Separable(width, width, 5)
        self.p_3x3 = _Separable(width, width, 3)
        self.p_5x5 = _Separable(width, width, 5)
        self.p_3x3_again = _Separable(width, width, 3)
        self.h_3x3 = _Separable(width, width, 3)
        self.average = _average()

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        h, p = self.squeeze(last), self.fit(before)
        around = self.average(p)
        parts = [
            p,
            self.h_5x5(h) + self.p_3x3(p),
            self.p_5x5(p) + self.p_3x3_again(p),
            self.average(h) + p,
            around + around,
            self.h_3x3(h) + h,
        ]
        return torch.cat(parts, dim=1)


class ReductionCell(nn.Module):
    """A cell that halves height and width: outputs ``4 × width`` channels.

    The first of all has nothing before it: its input then counts as both, as it is.
    """

    def __init__(
        self, channels: int, channels_before: int, width: int, *, halves: bool = False, is_first: bool = False
    ) -> None:
        super().__init__()
        self.squeeze = _Squeeze(channels, width)
        self.fit = nn.Identity() if is_first else _fit(channels_before, width, halves)
        from_before = channels_before if is_first else width
        self.h_5x5 = _Separable(width, width, 5, stride=2)
        self.p_7x7 = _Separable(from_before, width, 7, stride=2)
        self.p_7x7_again = _Separable(from_before, width, 7, stride=2)
        self.p_5x5 = _Separable(from_before, width, 5, stride=2)
        self.sum_3x3 = _Separable(width, width, 3)
        self.highest = nn.MaxPool2d(3, stride=2, padding=1)
        self.average_half = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)
        self.average = _average()

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        h, p = self.squeeze(last), self.fit(before)
        highest = self.highest(h)
        first = self.h_5x5(h) + self.p_7x7(p)
        second = highest + self.p_7x7_again(p)
        third = self.average_half(h) + self.p_5x5(p)
        fourth = second + self.average(first)
        fifth = self.sum_3x3(first) + highest
        return torch.cat([second, third, fourth, fifth], dim=1)


class NASNetA(nn.Module):
    """NASNet-A (``num_blocks`` @ ``penultimate_channels``): images ``[B, 3, H, W]`` → logits.

    There are ``num_blocks`` normal cells in each of ``num_stages``. The defaults are the "mobile" network,
    4 @ 1056, which has 5.3 million parameters.
    """

    def __init__(
        self,
        num_blocks: int = 4,
        penultimate_channels: int = 1056,
        stem_channels: int = 32,
        num_classes: int = 1000,
        num_stages: int = 3,
    ) -> None:
        super().__init__()
        width = penultimate_channels // (_NUM_CELL_OUTPUTS << (num_stages - 1))
        self.stem = nn.Sequential(nn.Conv2d(3, stem_channels, 3, stride=2, bias=False), _norm(stem_channels))
        cells: list[nn.Module] = [ReductionCell(stem_channels, stem_channels, width // 4, is_first=True)]
        before, last = stem_channels, 4 * (width // 4)
        cells.append(ReductionCell(last, before, width // 2, halves=True))
        before, last = last, 4 * (width // 2)
        for stage in range(num_stages):
            if stage:
                cells.append(ReductionCell(last, before, width << stage))
                before, last = last, 4 * (width << stage)
            for number in range(num_blocks):
                # The cell before the last is larger where the last one has halved the size.
                cells.append(NormalCell(last, before, width << stage, halves=number == 0))
                before, last = last, _NUM_CELL_OUTPUTS * (width << stage)
        self.cells = nn.ModuleList(cells)
        self.classifier = nn.Linear(last, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        last = self.stem(images)
        before = last
        for cell in self.cells:
            before, last = last, cell(last, before)
        logits: Tensor = self.classifier(last.relu().mean(dim=(2, 3)))
        return logits
