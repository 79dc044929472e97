"""Records of each member, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

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
        for record in sorted(self._all(), key=lambda record: record.epoch):
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

    def _all(self) -> Iterator[EpochRecord]:
        for records in self._records.values():
            yield from records


def check_mode(mode: str) -> None:
    """Refuse anything but ``"min"`` and ``"max"``."""
    if mode not in ("min", "max"):
        raise ConfigError(f"mode must be 'min' or 'max', but got {mode!r}")
