"""The settings of many members, one column per setting: their scalars at the cost of a few array operations.

Users and schedules write into param groups whenever they like, so every setting is looked at for every
step; what did not change is not converted again. Settings that are anything but plain numbers, and numbers
for which an update may be undefined, are left to ``scalar_values``, member by member: it knows what to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from trainmux.errors import OptimizerError
from trainmux.optim._registry import rule_for
from trainmux.optim._settings import Number, Setting, Settings
from trainmux.optim._structure import GroupStructure
from trainmux.optim._update import SETTINGS_THAT_IDLE

_MAXIMIZE = Setting("maximize")
# Values of these types cannot change in place, so that a column that compares equal is the same.
_PLAIN = frozenset({float, int, bool, np.float64})


class SettingColumns:
    """One param group of every member. Keeps what it read, to compare with the next time."""

    def __init__(self, group: GroupStructure) -> None:
        self._rule = rule_for(group.kind, group.flags)
        self._settings = [
            (setting.label, setting.name, setting.index) for setting in (*self._rule.settings, _MAXIMIZE)
        ]
        self._values = itemgetter(*dict.fromkeys(name for _, name, _ in self._settings))
        self._rows: list[Any] | None = None
        self._columns: dict[str, list[Any]] = {}
        self._numbers: dict[str, Number] = {}
        self.idle: frozenset[str] = frozenset()
        """After ``read``: the settings that are idle for all members, as by ``idle_settings``."""

    def read(self, torch_groups: Sequence[Settings]) -> bool:
        """Take over the members' torch param groups; false where they hold more than plain numbers."""
        try:
            rows = [self._values(torch_group) for torch_group in torch_groups]
            if self._rows is not None and rows == self._rows:
                return True
            changed = [self._read(*setting, torch_groups) for setting in self._settings]
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            self._columns.clear()
            self._rows = None
            return False
        self._rows = rows if _hold_no_lists(rows) else None
        if any(changed):
            maximize = self._columns["maximize"]
            self._numbers["sign"] = _number([-1.0 if value else 1.0 for value in maximize])
            self.idle = frozenset(
                name
                for name in SETTINGS_THAT_IDLE
                if name not in self._columns or not any(self._columns[name])
            )
        return True

    def scalars(self, steps_done: list[int]) -> tuple[Number, ...] | None:
        """An array, or one number for all members, per scalar; ``None`` where the update may be undefined."""
        try:
            with np.errstate(divide="raise", invalid="raise", over="raise"):
                return self._rule.formula(self._numbers, _number(steps_done))
        except (ArithmeticError, ValueError, OptimizerError):
            return None

    def _read(self, label: str, name: str, index: int | None, torch_groups: Sequence[Settings]) -> bool:
        """Whether a column changed; a ``TypeError`` where it is not plain."""
        if index is None:
            column = [torch_group[name] for torch_group in torch_groups]
        else:
            column = [torch_group[name][index] for torch_group in torch_groups]
        if column == self._columns.get(label):
            return False
        if not _PLAIN.issuperset(map(type, column)):
            raise TypeError
        self._numbers[label] = _number(column)
        self._columns[label] = column
        return True


def _hold_no_lists(rows: Sequence[tuple[Any, ...]]) -> bool:
    """Whether no setting can change in place, such as betas in a list: equal rows are then unchanged ones."""
    return all(type(value) in _PLAIN or type(value) is tuple for row in rows for value in row)


def _number(column: list[Any]) -> Number:
    """A float where all entries are equal, else an array."""
    if column.count(column[0]) == len(column):
        return float(column[0])
    return np.array(column, dtype=np.float64)
