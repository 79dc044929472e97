"""Batches of one data set that lies once on the device, each member's own rows of it: folds, bags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from trainmux.errors import BatchError, ConfigError, first_line
from trainmux.fleet._config import checked_device, whole_number
from trainmux.tracing import FlatBatch, flatten_batch


@dataclass(frozen=True)
class PartialBatch:
    """A batch that only some members take part in; the others stay as they are, and their loss is NaN.

    ``batch`` is as for all of them with ``data="per_member"``: rows of those that take no part are filled
    with anything that the model can compute. ``members`` has the positions in ``fleet.names`` of those that
    do.
    """

    batch: Any
    members: tuple[int, ...]


class IndexBatches:
    """Loads batches for a fleet with ``data="per_member"``: each member's are of its own rows of a data set.

    ``dataset`` is a tensor, an array, a tuple, dict or `TensorDataset` of them, or anything else with
    ``len()`` and samples that torch's ``default_collate`` can stack; it is put on ``device`` once. ``views``
    has one sequence of row numbers (or a mask over the rows) for each member, in the order of
    ``fleet.names``; a row may be in several of them, or several times in one.

    Every member sees its rows in batches of ``batch_size`` as a ``DataLoader`` over them would give, the last
    one shorter unless ``drop_last``. Where views differ in length, some batches are for some members only
    (`PartialBatch`). With ``shuffle``, the order in each pass depends on ``seeds`` (one for each member, or
    one for all) and the number of the pass alone: see ``order``.

    Refuses parts of the data set that differ in length, and views that are empty or name rows that are not
    there (``BatchError``).
    """

    def __init__(
        self,
        dataset: Any,
        views: Sequence[Any],
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        seeds: int | Sequence[int] = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self._data = whole_data(dataset)
        place = checked_device(device)
        self._leaves = [tensor.to(place) for tensor in self._data.tensors]
        self.num_rows = self._leaves[0].shape[0]
        self._views = [rows_of(view, self.num_rows, f"view {number}") for number, view in enumerate(views)]
        if not self._views:
            raise BatchError("views: expected one for each member, got none; pass a list of row numbers")
        for number, view in enumerate(self._views):
            if not len(view):
                raise BatchError(f"view {number}: expected at least one row, got none; leave the member out")
        self.batch_size = whole_number("batch_size", batch_size)
        self.shuffle, self.drop_last = shuffle, drop_last
        self._seeds = [seeds] * len(self._views) if isinstance(seeds, int) else list(seeds)
        if len(self._seeds) != len(self._views):
            raise ConfigError(
                f"seeds: expected one for each of {len(self._views)} views, got {len(self._seeds)}; give as "
                "many, or one for all"
            )
        if drop_last and max(map(len, self._views)) < self.batch_size:
            raise BatchError(
                f"expected a view of at least batch_size={self.batch_size} rows with drop_last=True, got "
                f"{max(map(len, self._views))}; make batch_size smaller"
            )
        self._pass = 0

    def set_epoch(self, number: int) -> None:
        """Choose the pass that the next iteration is, from 0; ``fit`` does so itself."""
        self._pass = number

    def order(self, member: int, number: int) -> Tensor:
        """Rows of the member at this position in the order of pass ``number``.

        With ``shuffle`` they are permuted by ``torch.randperm`` with a generator seeded by
        ``1_000_003 * seed + number``.
        """
        rows = self._views[member]
        if not self.shuffle:
            return rows
        seed = 1_000_003 * self._seeds[member] + number
        return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed % 2**63))]

    def __len__(self) -> int:
        return max(map(len, self._views)) // self.batch_size + (0 if self.drop_last else len(self._tails()))

    def __iter__(self) -> Iterator[Any]:
        """Whole batches, then the short last ones, by length."""
        size, lengths = self.batch_size, [len(view) for view in self._views]
        order = self._orders(self._pass)
        self._pass += 1
        everyone = range(len(lengths))
        for begin in range(0, max(lengths) - size + 1, size):
            there = tuple(i for i in everyone if lengths[i] >= begin + size)
            yield self._batch(order[:, begin : begin + size], there)
        if self.drop_last:
            return
        for tail in self._tails():
            there = tuple(i for i in everyone if lengths[i] % size == tail)
            begins = torch.tensor([lengths[i] - tail if i in there else 0 for i in everyone])
            places = begins[:, None] + torch.arange(tail)
            yield self._batch(order.gather(1, places.to(order.device)), there)

    def rows(self, rows: Tensor) -> Any:
        """These rows of the data set as one batch, on its device."""
        index = rows.to(self.device)
        return self._data.rebuild([leaf[index] for leaf in self._leaves])

    @property
    def dataset(self) -> Any:
        """The data set where it lies."""
        return self._data.rebuild(self._leaves)

    @property
    def device(self) -> torch.device:
        """The device on which the data set lies."""
        return self._leaves[0].device

    def _orders(self, number: int) -> Tensor:
        """One line of rows for each member, on the device; shorter ones are repeated, as filling."""
        longest = max(map(len, self._views))
        lines = [self.order(i, number) for i in range(len(self._views))]
        table = torch.stack([line.repeat(-(-longest // len(line)))[:longest] for line in lines])
        return table.to(self.device)

    def _tails(self) -> list[int]:
        return sorted({len(view) % self.batch_size for view in self._views} - {0}, reverse=True)

    def _batch(self, places: Tensor, there: tuple[int, ...]) -> Any:
        batch = self.rows(places)
        return batch if len(there) == len(self._views) else PartialBatch(batch, there)


def whole_data(dataset: Any) -> FlatBatch:
    """Take a data set apart into tensors with one row per sample; refuses one where rows are missing."""
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    elif hasattr(dataset, "__getitem__") and not isinstance(dataset, (Tensor, np.ndarray, Mapping, tuple)):
        try:
            dataset = default_collate([dataset[number] for number in range(len(dataset))])
        except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
            raise BatchError(
                f"dataset: expected samples that can be stacked, got {type(dataset).__name__}: "
                f"{first_line(error)}; pass a tuple or dict of tensors"
            ) from error
        # Of samples that are tuples it makes a list, which would be taken for samples.
        dataset = tuple(dataset) if isinstance(dataset, list) else dataset
    elif not isinstance(dataset, (Tensor, np.ndarray, Mapping, tuple)):
        raise BatchError(
            f"dataset: expected tensors, or a data set with len() and samples by number, got "
            f"{type(dataset).__name__}; load it first"
        )
    flat = flatten_batch(dataset)
    lengths = {leaf.path: (leaf.shape or (None,))[0] for leaf in flat.spec.leaves}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise BatchError(
            f"dataset: expected parts with one row per sample, got {lengths}; pass tensors of one length"
        )
    if not flat.tensors[0].shape[0]:
        raise BatchError("dataset: expected at least one row, got none; load the data first")
    return flat


def rows_of(view: Any, num_rows: int, what: str) -> Tensor:
    """Row numbers as a tensor; refuses others than whole numbers below ``num_rows``."""
    try:
        rows = torch.as_tensor(np.asarray(view) if not isinstance(view, Tensor) else view).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"{what}: expected row numbers, got {type(view).__name__}: {error}") from error
    if rows.dtype == torch.bool and rows.shape == (num_rows,):
        rows = rows.nonzero()[:, 0]
    if rows.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if rows.dim() != 1 or rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex():
        raise BatchError(
            f"{what}: expected a list of row numbers, or a mask over {num_rows} rows, got {rows.dtype} of "
            f"shape {tuple(rows.shape)}"
        )
    if int(rows.min()) < 0 or int(rows.max()) >= num_rows:
        raise BatchError(
            f"{what}: expected rows from 0 to {num_rows - 1}, got {int(rows.min())} to {int(rows.max())}; "
            "count them from the beginning of the data set"
        )
    return rows.to(torch.int64)
