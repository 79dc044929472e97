"""The demo's data: scikit-learn's handwritten digits, which come with the package itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

NUM_VALIDATION = 360
MAX_PIXEL = 16.0


@dataclass(frozen=True)
class Digits:
    """Images ``[N, 1, 8, 8]`` between 0 and 1 with labels ``[N]``, split once and for all."""

    train: TensorDataset
    validation: TensorDataset


def load(split_seed: int = 0) -> Digits:
    """The 1,797 digits, shuffled by ``split_seed``: 1,437 to train on, 360 to validate."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / MAX_PIXEL
    targets = torch.tensor(labels, dtype=torch.long)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(split_seed))
    held_out, kept = order[:NUM_VALIDATION], order[NUM_VALIDATION:]
    return Digits(
        train=TensorDataset(images[kept], targets[kept]),
        validation=TensorDataset(images[held_out], targets[held_out]),
    )


def train_loader(data: Digits, batch_size: int, seed: int) -> DataLoader[Any]:
    """Shuffled batches; two loaders made with the same seed give the same batches in the same order.

    The sampler hands whole index lists to the data set, so that loading costs next to nothing and
    the comparison of the demo is one of training, not of loading.
    """
    sampler = RandomSampler(data.train, generator=torch.Generator().manual_seed(seed))
    return DataLoader(data.train, sampler=BatchSampler(sampler, batch_size, drop_last=False), batch_size=None)


def validation_loader(data: Digits) -> DataLoader[Any]:
    """All validation images as one batch, so that a mean over the batch is the mean over the set."""
    sampler = BatchSampler(SequentialSampler(data.validation), NUM_VALIDATION, drop_last=False)
    return DataLoader(data.validation, sampler=sampler, batch_size=None)


class ClockedLoader:
    """A loader that notes how long its consumer held each batch before asking for the next.

    ``first_use_seconds`` is what the first batch of each size took beyond the median one: the time
    that building for that size added.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.held_seconds: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in self.loader:
            begin = perf_counter()
            yield batch
            self.held_seconds.append((len(batch[1]), perf_counter() - begin))

    @property
    def first_use_seconds(self) -> float:
        first: dict[int, float] = {}
        later: list[float] = []
        for size, seconds in self.held_seconds:
            if size in first:
                later.append(seconds)
            else:
                first[size] = seconds
        usual = sorted(later)[len(later) // 2] if later else 0.0
        return sum(max(0.0, seconds - usual) for seconds in first.values())
