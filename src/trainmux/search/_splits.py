"""Rows to train on and rows held out: folds, bags, and what scikit-learn's splitters say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainmux.errors import BatchError, ConfigError
from trainmux.fleet import rows_of, whole_number

Rows = npt.NDArray[np.int64]


@runtime_checkable
class Splitter(Protocol):
    """The interface of scikit-learn's splitters."""

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterable[tuple[Any, Any]]:  # noqa: N803
        """Yield rows to train on and rows held out."""
        ...


@dataclass(frozen=True)
class Bootstrap:
    """Splits rows into ``num_bags`` bags: as many rows as there are, drawn with replacement.

    Held out of each bag are the rows that are not in it. To be used as ``cv=``, or by ``split``, which takes
    anything with a length. ``seed`` decides the draws.
    """

    num_bags: int
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("num_bags", self.num_bags)

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[Rows, Rows]]:  # noqa: N803
        """Yield the rows of each bag, and those held out of it."""
        generator = np.random.default_rng(self.seed)
        num_rows = len(X)
        for _ in range(self.num_bags):
            bag = generator.integers(num_rows, size=num_rows)
            yield bag, np.setdiff1d(np.arange(num_rows), bag)

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:  # noqa: N803
        """The number of bags, for those who ask as scikit-learn does."""
        return self.num_bags


@dataclass(frozen=True)
class RowSplit:
    """Rows to train on and rows held out."""

    train: Tensor
    test: Tensor


def splits_of(cv: Any, num_rows: int, y: Any, groups: Any, seed: int) -> list[RowSplit]:
    """Rows of each fold.

    ``cv`` is a number of folds of rows shuffled by ``seed``, an object with scikit-learn's ``split(X, y,
    groups)``, or pairs of rows to train on and rows held out. Refuses folds without rows for either.
    """
    if isinstance(cv, Splitter):
        pairs = list(cv.split(np.zeros((num_rows, 1)), y, groups))
    elif isinstance(cv, (int, np.integer)):
        if isinstance(cv, bool) or not 2 <= cv <= num_rows:
            raise ConfigError(f"cv: expected from 2 to {num_rows} folds of {num_rows} rows, got {cv!r}")
        order = np.random.default_rng(seed).permutation(num_rows)
        pairs = [(np.setdiff1d(order, held), np.sort(held)) for held in np.array_split(order, cv)]
    else:
        try:
            pairs = [(train, test) for train, test in cv]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "cv: expected a number of folds, an object with split(X, y, groups), or pairs of rows to "
                f"train on and rows held out, got {type(cv).__name__}"
            ) from error
    found = [
        RowSplit(
            rows_of(train, num_rows, f"fold {i}, training"), rows_of(test, num_rows, f"fold {i}, held out")
        )
        for i, (train, test) in enumerate(pairs)
    ]
    if not found:
        raise ConfigError("cv: expected at least one fold, got none")
    for number, split in enumerate(found):
        if not len(split.train) or not len(split.test):
            raise BatchError(
                f"fold {number}: expected rows to train on and rows held out, got {len(split.train)} and "
                f"{len(split.test)}; leave the fold out, or take fewer"
            )
    return found
