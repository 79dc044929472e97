"""Per-step losses and metrics → means per epoch, without a host sync per step.

Rows stay on the device in a block of fixed size; a flush moves a block to the host in one copy. Sums are
taken row after row, so that the means do not depend on when the blocks were moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainmux.fleet._history import RESERVED_METRICS

STOPPED_ON_REQUEST = "stopped"
"""The reason that ``Fleet.stopped`` gives for a member that was stopped on request. Any other one means that
training could not go on, and is reported as a warning."""

_LOSS = "loss"
_FINITE = "finite"
_BLOCK_ROWS = 512

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
# What makes two steps' rows fit into one block: key → dtype and device.
Signature = dict[str, tuple[torch.dtype, torch.device]]


class Recorder:
    """Gathers what ``step`` returned. ``stopped`` tells which members are stopped; it is asked at flushes."""

    def __init__(self, names: tuple[str, ...], stopped: Callable[[], dict[str, str]]) -> None:
        self._ask_stopped = stopped
        self.names = names
        self.stopped: dict[str, str] = stopped()
        self.current_losses: dict[str, float] = {}
        self._block: dict[str, torch.Tensor] = {}
        self._signature: Signature = {}
        self._num_rows = 0
        self._sums: dict[str, FloatArray] = {}
        self._counts: dict[str, FloatArray] = {}
        self._was_active: set[str] = set()
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget the sums. Members that are not stopped now count as active in this epoch."""
        self._sums = {}
        self._counts = {}
        self._was_active = {name for name in self.names if name not in self.stopped}

    def add(self, names: tuple[str, ...], losses: torch.Tensor, metrics: Mapping[str, Any]) -> None:
        """Keep one step's values. Copies on the device only, unless the block is full or its form changes."""
        row = {_LOSS: losses.detach()}
        for key, value in metrics.items():
            # A scalar over all members, or a text, has no mean per member.
            if isinstance(value, torch.Tensor) and value.shape == losses.shape and not value.is_complex():
                name = f"train_{key}" if key in RESERVED_METRICS else key
                row[name] = value.detach()
        signature = {key: (value.dtype, value.device) for key, value in row.items()}
        if names != self.names:
            self._rename(names)
        if signature != self._signature or self._num_rows == _BLOCK_ROWS:
            self.flush()
        if signature != self._signature or not self._block:
            self._signature = signature
            self._block = {
                key: torch.empty((_BLOCK_ROWS, len(names)), dtype=value.dtype, device=value.device)
                for key, value in row.items()
            }
        for key, value in row.items():
            self._block[key][self._num_rows].copy_(value)
        self._num_rows += 1

    def flush(self) -> None:
        """Move what is on the device to the host and into the sums, and ask which members are stopped."""
        num_rows, self._num_rows = self._num_rows, 0
        stopped = self._ask_stopped()
        if num_rows:
            rows = {
                key: block[:num_rows].to("cpu").to(torch.float64).numpy()
                for key, block in self._block.items()
            }
            finite = rows.pop(_FINITE, None)
            losses = rows[_LOSS]
            counted = self._counted(losses, None if finite is None else finite != 0, stopped)
            for key, values in rows.items():
                self._accumulate(key, values, counted & np.isfinite(values))
            self.current_losses = dict(zip(self.names, losses[-1].tolist(), strict=True))
        self.stopped = stopped
        self._was_active.update(name for name in self.names if name not in stopped)

    def means(self) -> dict[str, dict[str, float]]:
        """Member → ``loss`` and metrics, for the members active in this epoch. Flush first."""
        result: dict[str, dict[str, float]] = {}
        for index, name in enumerate(self.names):
            if name not in self._was_active:
                continue
            values = {_LOSS: math.nan}
            for key, sums in self._sums.items():
                count = float(self._counts[key][index])
                values[key] = float(sums[index]) / count if count else math.nan
            result[name] = values
        return result

    def _counted(self, losses: FloatArray, finite: BoolArray | None, stopped: Mapping[str, str]) -> BoolArray:
        """Mark the (row, member) values of active members in finite steps."""
        good = np.isfinite(losses)
        if finite is not None:
            good &= finite
        for index, name in enumerate(self.names):
            if name in self.stopped:
                good[:, index] = False
            elif stopped.get(name, STOPPED_ON_REQUEST) != STOPPED_ON_REQUEST:
                # Frozen within this block, at its first bad step; later losses are of frozen weights.
                good[:, index] = np.logical_and.accumulate(good[:, index])
        return good

    def _accumulate(self, key: str, values: FloatArray, counted: BoolArray) -> None:
        width = len(self.names)
        sums = self._sums.get(key, np.zeros(width))
        # accumulate adds in order by definition; sum() may pair rows up, differently for each block size.
        ordered = np.add.accumulate(np.vstack([sums, np.where(counted, values, 0.0)]), axis=0)
        self._sums[key] = ordered[-1]
        self._counts[key] = self._counts.get(key, np.zeros(width)) + counted.sum(axis=0)

    def _rename(self, names: tuple[str, ...]) -> None:
        """Members came, left or changed places: keep the sums of those that stay."""
        self.flush()
        old = {name: index for index, name in enumerate(self.names)}
        for table in (self._sums, self._counts):
            for key, values in table.items():
                table[key] = np.array([values[old[name]] if name in old else 0.0 for name in names])
        self._block = {}
        self.names = names
        self.stopped = self._ask_stopped()
        self._was_active.update(name for name in names if name not in self.stopped)
