"""Every way to fuse a convolution gives what plain torch gives, for every kind of convolution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from equivalence import check_fp64
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("traced_once")

NUM_MEMBERS = 3
NUM_STEPS = 10
CHANNELS = 4


class Everything2d(nn.Module):
    """3×3, 1×1, depthwise, grouped, strided, dilated, uneven and transposed, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        c = CHANNELS
        self.layers = nn.Sequential(
            nn.Conv2d(2, c, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(c, 2 * c, 1),
            nn.Tanh(),
            nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c, bias=False),  # depthwise
            nn.Conv2d(2 * c, c, 1, bias=False),
            nn.Tanh(),
            nn.Conv2d(c, c, 3, padding=2, dilation=2),
            nn.Conv2d(c, 2 * c, 3, stride=2, padding=1, groups=2),
            nn.Tanh(),
            nn.ConvTranspose2d(2 * c, c, 3, stride=2, padding=1, output_padding=1, bias=False),
            nn.Conv2d(c, c, 1, stride=2),
            nn.ConvTranspose2d(c, 2 * c, 2, stride=2, groups=2),
            nn.Tanh(),
            nn.Conv2d(2 * c, c, (1, 3), padding="same"),
            nn.Conv2d(c, c, 3, padding=1, padding_mode="circular"),
        )
        self.head = nn.Linear(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x).mean((2, 3)))
        return out


class Everything1d(nn.Module):
    """The same in one dimension, and a convolution whose weights do not learn."""

    def __init__(self) -> None:
        super().__init__()
        c = CHANNELS
        self.layers = nn.Sequential(
            nn.Conv1d(2, c, 1),
            nn.Conv1d(c, c, 3, padding=2, dilation=2, groups=c),
            nn.Tanh(),
            nn.Conv1d(c, c, 3, padding=1).requires_grad_(False),
            nn.ConvTranspose1d(c, 2 * c, 4, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv1d(2 * c, c, 3, stride=3),
        )
        self.head = nn.Linear(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x.flatten(2)).mean(2))
        return out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(3, 2, 6, 8, generator=generator, dtype=torch.float64),
            torch.randint(3, (3,), generator=generator),
        )
        for _ in range(NUM_STEPS)
    ]


def models(make: Callable[[], nn.Module]) -> list[nn.Module]:
    made = []
    for number in range(NUM_MEMBERS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            made.append(make().double())
    return made


def test_convolutions_over_a_shared_batch_equal_plain_torch() -> None:
    check_fp64(models(Everything2d), loss, batches())


def test_convolutions_over_a_batch_per_member_equal_plain_torch() -> None:
    own = [batches(seed) for seed in range(NUM_MEMBERS)]
    check_fp64(models(Everything2d), loss, own, data="per_member")


def test_convolutions_in_one_dimension_equal_plain_torch() -> None:
    check_fp64(models(Everything1d), loss, batches())
