"""Records of each member, epoch by epoch, and the means per epoch, without a host sync per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trainmux.errors import ConfigError

# The fixed columns of a row; a metric of the same name is recorded with ``train_`` before it.
ROW_COLUMNS = ("epoch", "step", "member", "loss")
RESERVED_METRICS = frozenset({*ROW_COLUMNS, "stopped"})

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class EpochRecord:
    """One member's epoch.

    ``epoch`` and ``step`` count from 1; ``step`` is the last of the epoch. ``loss`` is the mean of the finite
    training losses while the member was active, NaN when there were none. ``metrics`` are the means of the
    training metrics, and ``val_<name>`` for each validation metric. ``stopped`` says why the member takes no
    part in later epochs, None when it does.
    """

    epoch: int
    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    stopped: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy can be neither pickled nor copied.
        return EpochRecord, (self.epoch, self.step, self.loss, dict(self.metrics), self.stopped)

    def values(self) -> dict[str, float]:
        """``loss`` and the metrics, under the names that may be monitored."""
        return {"loss": self.loss, **self.metrics}


class History(Mapping[str, Sequence[EpochRecord]]):
    """Member name → its ``EpochRecord``s, oldest first. A member without one is not in it."""

    def __init__(self) -> None:
        self._records: dict[str, list[EpochRecord]] = {}

    def __getitem__(self, name: str) -> list[EpochRecord]:
        return list(self._records[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"History({len(self)} members, {max(map(len, self._records.values()), default=0)} epochs)"

    def append(self, name: str, record: EpochRecord) -> None:
        """Add the next epoch of ``name``."""
        self._records.setdefault(name, []).append(record)

    def mark_stopped(self, reasons: Mapping[str, str]) -> None:
        """Write into the last record of each member in ``reasons`` why it was stopped, unless it has one."""
        for name, reason in reasons.items():
            records = self._records.get(name)
            if records and records[-1].stopped is None:
                records[-1] = replace(records[-1], stopped=reason)

    def best(self, metric: str = "loss", mode: Mode = "min", *, at: Literal["last", "any"] = "last") -> str:
        """The member with the smallest (``mode="max"``: largest) value of ``metric``.

        ``at="last"`` compares the values at each member's last epoch, which belong to the weights it has now;
        ``"any"`` the best value of any epoch. NaN never wins. Refuses a metric that no member has.
        """
        check_mode(mode)
        if at not in ("last", "any"):
            raise ConfigError(f"at must be 'last' or 'any', but got {at!r}")
        sign = 1.0 if mode == "min" else -1.0
        scores: dict[str, float] = {}
        for name, records in self._records.items():
            values = [
                record.values().get(metric, math.nan)
                for record in (records[-1:] if at == "last" else records)
            ]
            comparable = [sign * value for value in values if not math.isnan(value)]
            if comparable:
                scores[name] = min(comparable)
        if not scores:
            known = sorted({key for records in self._records.values() for r in records for key in r.values()})
            raise ConfigError(
                f"no member has a value of {metric!r} to compare; recorded are {known or 'no epochs at all'}"
            )
        return min(scores, key=scores.__getitem__)

    def metric_names(self) -> list[str]:
        """All metrics of all records, in the order in which they first came up by epoch."""
        names: dict[str, None] = {}
        for record in sorted(chain.from_iterable(self._records.values()), key=lambda record: record.epoch):
            names.update(dict.fromkeys(record.metrics))
        return list(names)

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dict per member and epoch: ``epoch, step, member, loss``, the metrics, ``stopped``.

        Sorted by epoch, members in order; ready for ``pandas.DataFrame`` or ``csv.DictWriter``.
        """
        rows = [
            {
                "epoch": record.epoch,
                "step": record.step,
                "member": name,
                "loss": record.loss,
                **record.metrics,
                "stopped": record.stopped,
            }
            for name, records in self._records.items()
            for record in records
        ]
        return sorted(rows, key=lambda row: int(row["epoch"]))

    def to_document(self) -> dict[str, Any]:
        """Plain lists and dicts, for a checkpoint; ``from_document`` reads it."""
        return {
            name: [[r.epoch, r.step, r.loss, dict(r.metrics), r.stopped] for r in records]
            for name, records in self._records.items()
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Iterable[Sequence[Any]]]) -> History:
        """The history that ``to_document`` described."""
        history = cls()
        for name, records in document.items():
            history._records[name] = [EpochRecord(*fields) for fields in records]
        return history


def check_mode(mode: str) -> None:
    """Refuse anything but ``"min"`` and ``"max"``."""
    if mode not in ("min", "max"):
        raise ConfigError(f"mode must be 'min' or 'max', but got {mode!r}")


# ---- from steps to epochs ----------------------------------------------------------------------------------

STOPPED_ON_REQUEST = "stopped"
"""The reason that ``Fleet.stopped`` gives for a member that was stopped on request. Any other one means that
training could not go on, and is reported as a warning."""

_LOSS = "loss"
_FINITE = "finite"
_MAX_ROWS = 512

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Recorder:
    """Gathers what ``step`` returned. ``stopped`` tells which members are stopped; it is asked at flushes.

    Rows stay on the device until there are many; a flush moves them to the host in one copy for each metric.
    Sums are taken row after row, so that the means do not depend on when the rows were moved.
    """

    def __init__(self, names: tuple[str, ...], stopped: Callable[[], dict[str, str]]) -> None:
        self._ask_stopped = stopped
        self.names = names
        self.stopped: dict[str, str] = stopped()
        self.current_losses: dict[str, float] = {}
        self._rows: list[dict[str, torch.Tensor]] = []
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget the sums. Members that are not stopped now count as active in this epoch."""
        self._sums: dict[str, FloatArray] = {}
        self._counts: dict[str, FloatArray] = {}
        self._was_active = {name for name in self.names if name not in self.stopped}

    def add(self, names: tuple[str, ...], losses: torch.Tensor, metrics: Mapping[str, Any]) -> None:
        """Keep one step's values. Copies on the device only, unless there are many rows or other metrics."""
        row = {_LOSS: losses.detach().clone()}
        for key, value in metrics.items():
            # A scalar over all members, or a text, has no mean per member.
            if isinstance(value, torch.Tensor) and value.shape == losses.shape and not value.is_complex():
                name = f"train_{key}" if key in RESERVED_METRICS else key
                row[name] = value.detach().clone()
        if names != self.names:
            self._rename(names)
        if self._rows and (len(self._rows) == _MAX_ROWS or self._rows[-1].keys() != row.keys()):
            self.flush()
        self._rows.append(row)

    def flush(self) -> None:
        """Move what is on the device to the host and into the sums, and ask which members are stopped."""
        found, self._rows = self._rows, []
        stopped = self._ask_stopped()
        if found:
            rows = {
                key: torch.stack([row[key] for row in found]).to("cpu").to(torch.float64).numpy()
                for key in found[0]
            }
            finite = rows.pop(_FINITE, None)
            losses = rows[_LOSS]
            counted = self._counted(losses, None if finite is None else finite != 0, stopped)
            for key, values in rows.items():
                self._accumulate(key, values, counted & np.isfinite(values))
            self.current_losses = {
                name: self._latest(name, losses[:, index], stopped) for index, name in enumerate(self.names)
            }
        self.stopped = stopped
        self._was_active.update(name for name in self.names if name not in stopped)

    def _latest(self, name: str, losses: FloatArray, stopped: Mapping[str, str]) -> float:
        """A member's loss in the last step that it took part in: that of others is NaN."""
        known = losses[~np.isnan(losses)]
        if name in stopped or not (len(known) or name in self.current_losses):
            return float(losses[-1])
        return float(known[-1]) if len(known) else self.current_losses[name]

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
        unhurt = good.copy() if finite is None else finite  # the loss of a step without them is NaN
        good &= unhurt
        for index, name in enumerate(self.names):
            if name in self.stopped:
                good[:, index] = False
            elif stopped.get(name, STOPPED_ON_REQUEST) != STOPPED_ON_REQUEST:
                # Frozen within this block, at its first bad step; later losses are of frozen weights.
                good[:, index] &= np.logical_and.accumulate(unhurt[:, index])
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
        self.names = names
        self.stopped = self._ask_stopped()
        self._was_active.update(name for name in names if name not in self.stopped)
