"""Batches of sequences of uneven length, in few shapes: each shape is traced, compiled and captured once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from trainmux.errors import BatchError, ConfigError
from trainmux.fleet._config import whole_number

_IGNORED = -100
"""The target that ``cross_entropy`` leaves out."""

Key = str | int
"""A name in samples that are dicts, a position in samples that are tuples."""


class BucketCollate:
    """A ``collate_fn`` for a ``DataLoader`` that pads sequences to the smallest of a few ``lengths``.

    Samples are dicts, tuples or lists of sequences: tensors whose first axis is padded, or lists of numbers.
    All sequences of a batch get the same length. They are padded with 0, those named "labels" with -100,
    which ``cross_entropy`` ignores, and others as ``pad`` says by key. With ``keys``, only those are
    sequences, and anything else is collated as by default. With ``cut=True`` sequences end at the largest
    length; otherwise a longer one is refused (``BatchError``).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        pad: Mapping[Any, float] | None = None,
        keys: Sequence[Key] | None = None,
        cut: bool = False,
    ) -> None:
        self.lengths = tuple(sorted({whole_number("lengths", length) for length in lengths}))
        if not self.lengths:
            raise ConfigError(
                "lengths: expected at least one length, got none; pass some, as in (64, 128, 256)"
            )
        self._pad: dict[Key, float] = {"labels": _IGNORED, **(pad or {})}
        self._keys = None if keys is None else frozenset(keys)
        self._cut = cut

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples; a dict of dicts, a tuple of tuples or lists, of a tensor each."""
        if not samples:
            raise BatchError("expected at least one sample, got none; leave empty batches out")
        columns = _columns(samples)
        found = {key: self._sequences(key, column) for key, column in columns.items()}
        longest = max((len(one) for column in found.values() for one in column or ()), default=0)
        length = self._bucket(longest)
        batch = {
            key: default_collate(columns[key]) if column is None else self._padded(key, column, length)
            for key, column in found.items()
        }
        return batch if isinstance(samples[0], Mapping) else tuple(batch.values())

    def _sequences(self, key: Key, column: Sequence[Any]) -> list[Tensor] | None:
        """The sequences of a column; ``None`` where it has none."""
        if self._keys is not None and key not in self._keys:
            return None
        try:
            found = [torch.as_tensor(item) for item in column]
        except (TypeError, ValueError, RuntimeError):
            found = []
        is_sequence = [item.dim() > 0 for item in found]
        if all(is_sequence) and found:
            dtype = next((item.dtype for item in found if item.numel()), found[0].dtype)
            return [item.to(dtype) for item in found]  # an empty list has a type of its own
        if any(is_sequence) or self._keys is not None:
            raise BatchError(
                f"{key!r}: expected a tensor or a list of numbers in every sample, got "
                f"{type(column[0]).__name__} in the first; name what is to be padded in keys"
            )
        return None

    def _bucket(self, longest: int) -> int:
        for length in self.lengths:
            if longest <= length:
                return length
        if not self._cut:
            raise BatchError(
                f"expected sequences of at most {self.lengths[-1]}, got one of {longest}; add a length, or "
                "pass cut=True"
            )
        return self.lengths[-1]

    def _padded(self, key: Key, column: Sequence[Tensor], length: int) -> Tensor:
        """One tensor of ``[samples, length, ...]``."""
        value = self._pad.get(key, 0)
        joined = pad_sequence([item[:length] for item in column], batch_first=True, padding_value=value)
        whole = joined.new_full((joined.shape[0], length, *joined.shape[2:]), value)
        whole[:, : joined.shape[1]] = joined
        return whole


def _columns(samples: Sequence[Any]) -> dict[Key, list[Any]]:
    """Collect what samples have under each key; refuses samples of several kinds."""
    rows = [dict(one) if isinstance(one, Mapping) else dict(enumerate(_items(one))) for one in samples]
    if any(row.keys() != rows[0].keys() for row in rows):
        first, other = (
            sorted(map(str, row)) for row in (rows[0], next(r for r in rows if r.keys() != rows[0].keys()))
        )
        raise BatchError(
            f"expected samples with the same parts, got {first} and {other}; give every sample all of them"
        )
    return {key: [row[key] for row in rows] for key in rows[0]}


def _items(sample: Any) -> Sequence[Any]:
    if not isinstance(sample, (tuple, list)):
        raise BatchError(
            f"expected samples that are dicts, tuples or lists, got {type(sample).__name__}; put a single "
            "sequence into a tuple"
        )
    return sample
