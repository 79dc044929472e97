"""The fused update: its per-member scalars on the host, and its operations on stacked tensors.

Users and schedules write into param groups whenever they like, so every setting of every member is read for
every step. ``SettingColumns`` does that for many members at the cost of a few array operations, and leaves
what it cannot do to ``scalar_values``, one member at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainmux.errors import OptimizerError
from trainmux.fusion.optimizers._describe import GroupStructure, rule_of
from trainmux.fusion.optimizers._rule import Number, NumericSetting, Settings
from trainmux.fusion.optimizers._traced import TracedUpdate

_SETTINGS_THAT_IDLE = ("maximize", "weight_decay", "dampening")
"""Settings whose part of an update can be left out where no member makes use of them."""
_MAXIMIZE = NumericSetting("maximize")
# Values of these types cannot change in place, so that a column that compares equal is the same.
_PLAIN = frozenset({float, int, bool, np.float64})


def scalar_values(
    group: GroupStructure, torch_group: Mapping[str, Any], steps_done: int
) -> tuple[float, ...]:
    """One member's scalars for the update number ``steps_done + 1``, in the order of the rule's ``scalars``.

    ``torch_group`` is the member's torch param group as it stands now. Computed in double precision.
    Refuses a momentum that was switched on or off since the optimizer was described, and values for which
    the update is undefined, such as a beta of 1.
    """
    rule = rule_of(group)
    try:
        numbers = {setting.label: float(setting.read(torch_group)) for setting in rule.settings}
        if group.traced is None:
            numbers["sign"] = -1.0 if torch_group["maximize"] else 1.0
        return rule.formula(numbers, steps_done)
    except (ArithmeticError, ValueError, TypeError) as error:
        if isinstance(error, OptimizerError):
            raise
        found = {name: value for name, value in torch_group.items() if name != "params"}
        raise OptimizerError(
            f"expected settings for which the {group.kind} update is defined, got {found} ({error}). Check "
            "what the schedule writes into the param group."
        ) from error


def idle_settings(torch_group: Mapping[str, Any]) -> frozenset[str]:
    """Settings that are without effect in this torch param group and cost a pass over memory otherwise.

    ``apply_update`` may leave out the settings that are idle for all members of a group. Whoever does so
    has to build the update anew once a member starts to use one of them.
    """
    return frozenset(name for name in _SETTINGS_THAT_IDLE if float(torch_group.get(name, 0.0)) == 0.0)


def apply_update(
    group: GroupStructure,
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Tensor],
    *,
    idle: frozenset[str] = frozenset(),
    shape: tuple[int, ...] | None = None,
) -> None:
    """One optimizer step on a stacked parameter: ``param`` and ``state`` change in place, ``grad`` does not.

    ``param``, ``grad`` and each state tensor have shape ``[k, *shape]``, rows may be strided. ``scalars``
    have shape ``[k]``, or are views ``[k, 1, ...]`` that many parameters share, and the dtype
    ``scalar_dtype(param.dtype)``. ``idle`` is the intersection of ``idle_settings`` over the members, or
    empty; for a traced update what ``idle_decisions`` gives. ``shape`` is that of one member's parameter,
    where ``param`` was flattened or holds some of its rows.

    A row with neutral scalars and a gradient of +0.0 keeps its bits, provided that its values are finite.
    """

    def at(name: str) -> Tensor:
        scalar = scalars[name]
        return scalar if scalar.ndim == param.ndim else scalar.view(-1, *(1,) * (param.ndim - 1))

    with torch.no_grad():
        rule = rule_of(group)
        if isinstance(rule, TracedUpdate):
            rule.update(tuple(param.shape[1:]) if shape is None else shape, param, grad, state, at, idle)
        else:
            rule.update(param, grad, state, at, idle)


def is_elementwise(group: GroupStructure, param: Tensor) -> bool:
    """Whether each element of a member's parameter is updated without a look at others.

    A traced update of such parameters is traced here, if it was not yet: no other trace may be under way.
    """
    return group.traced is None or group.traced.of(param).is_elementwise


def idle_decisions(group: GroupStructure, table: np.ndarray[Any, Any]) -> frozenset[str]:
    """The outcomes of a traced update's decisions that no member has, by its scalars ``[num_scalars, k]``."""
    return frozenset() if group.traced is None else group.traced.idle(table)


class SettingColumns:
    """One param group of every member. Keeps what it read, to compare with the next time."""

    def __init__(self, group: GroupStructure) -> None:
        self._rule = rule_of(group)
        signs = (_MAXIMIZE,) if group.traced is None else ()
        self._settings = [
            (setting.label, setting.name, setting.index) for setting in (*self._rule.settings, *signs)
        ]
        names = tuple(dict.fromkeys(name for _, name, _ in self._settings))
        # For one name itemgetter returns no tuple, and there is none for no names.
        self._values: Callable[[Settings], tuple[Any, ...]] = (
            itemgetter(*names) if len(names) > 1 else lambda group: tuple(map(group.get, names))
        )
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
            maximize = self._columns.get("maximize", ())
            self._numbers["sign"] = (
                _number([-1.0 if value else 1.0 for value in maximize]) if maximize else 1.0
            )
            self.idle = frozenset(
                name
                for name in _SETTINGS_THAT_IDLE
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
