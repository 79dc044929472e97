"""Numbers that the host feeds to the device with every step.

They are counters, the optimizers' scalars, clipping limits and a mask of the members that train. Settings may
change at any time, so every member is looked at for every step: these loops are most of a step's host time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainmux.engine import HostFeed
from trainmux.errors import OptimizerError
from trainmux.fleet._member import Member
from trainmux.fleet._slots import Slot
from trainmux.fusion.optimizers import (
    OptimizerStructure,
    SettingColumns,
    check_hyperparameters,
    idle_decisions,
    idle_settings,
    rule_of,
    scalar_values,
)

Members = Sequence[tuple[int, Slot]]
"""Occupied rows."""


class GroupNumbers:
    """The numbers of one group of ``width`` slots, in tensors that are the same ones for ever.

    ``num_free`` of them are of the members' code, in which they differ.

    ``read`` looks at every member's settings as they are now, ``push`` sends all there is to tell. Rows
    without a member, and members that do not train, hold numbers that nobody reads.
    """

    def __init__(
        self, structure: OptimizerStructure, width: int, num_free: int, device: torch.device
    ) -> None:
        self._structure = structure
        self._num_scalars = [len(rule_of(group).scalars) for group in structure.groups]
        self._columns = [SettingColumns(group) for group in structure.groups]
        self._feed = HostFeed(
            {
                "counters": (torch.int64, (width,)),
                "scalars": (torch.float64, (sum(self._num_scalars), width)),
                "limits": (torch.float64, (2, width)),
                "active": (torch.bool, (width,)),
                "free": (torch.float64, (num_free, width)),
            },
            device,
        )
        self._rows: list[int] | slice = []
        self._slots: list[Slot] = []
        self._members: list[Member] = []
        self._training: list[Slot] | None = None
        self._limits: list[float | None] | None = None
        self.idle: tuple[frozenset[str], ...] = ()
        """After ``read``: for each param group, the settings that no member makes use of."""
        self.clips: tuple[bool, bool] = (False, False)
        """After ``read``: whether any member clips by norm, by value."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """``counters``, ``scalars``, ``limits``, ``active`` and ``free``, as a program takes them."""
        return self._feed.device

    def forget(self) -> None:
        """Write everything anew, after members came, left or stopped."""
        self._limits = self._training = None

    def read(self, members: Members) -> None:
        """Take over settings and limits; refuses settings that are no numbers any more, naming the member."""
        if self._limits is None:
            self._start_over(members)
        self._read_limits()
        offset, idle = 0, []
        for index, (columns, num_scalars) in enumerate(zip(self._columns, self._num_scalars, strict=True)):
            torch_groups = [member.optimizer.param_groups[index] for member in self._members]
            scalars = None
            if members and columns.read(torch_groups):
                idle.append(columns.idle)
                scalars = columns.scalars([slot.base_steps[index] + slot.num_updates for slot in self._slots])
            else:
                unused = [idle_settings(torch_group) for torch_group in torch_groups]
                idle.append(frozenset.intersection(*unused) if unused else frozenset())
            table = self._feed.host["scalars"][offset : offset + num_scalars]
            if scalars is not None:
                for row, scalar in zip(table, scalars, strict=True):
                    row[self._rows] = scalar
            if scalars is None or not np.isfinite(table).all():
                for row, slot in members:
                    if slot.active:
                        table[:, row] = self._scalars_of(slot, index)
            if self._structure.groups[index].traced is not None:
                idle[-1] = idle_decisions(self._structure.groups[index], table[:, self._rows])
            offset += num_scalars
        self.idle = tuple(idle)

    def push(self) -> None:
        """Send everything, with the members' counters."""
        counters = self._feed.host["counters"]
        counters[self._rows] = [slot.counter for slot in self._slots]
        self._feed.push()

    def count(self, members: Members, num_updates: int) -> None:
        """Count a step, and ``num_updates`` updates, of every member that trains."""
        if self._training is None:
            self._training = [slot for _, slot in members if slot.active]
        for slot in self._training:
            slot.counter += 1
            slot.num_updates += num_updates

    def told(self, members: Members) -> tuple[bytes, ...]:
        """Return what ``push`` would send now, after ``read``; equal as long as nothing has changed."""
        host = self._feed.host
        counters = np.array([slot.counter for _, slot in members], np.int64)
        others = ("scalars", "limits", "active", "free")
        return (counters.tobytes(), *(host[name].tobytes() for name in others))

    def set_free(self, values: npt.NDArray[np.float64]) -> None:
        """Take over the numbers of the members' code in which they differ, a row for each."""
        self._feed.host["free"][:] = values

    def _start_over(self, members: Members) -> None:
        host = self._feed.host
        width = len(host["active"])
        rows = [row for row, _ in members]
        self._rows = slice(None) if rows == list(range(width)) else rows
        self._slots = [slot for _, slot in members]
        self._members = [slot.member for _, slot in members]
        host["counters"][:] = 0
        host["scalars"][:] = 0.0
        host["limits"][:] = math.inf
        host["active"][:] = False
        host["active"][self._rows] = [slot.active for _, slot in members]

    def _read_limits(self) -> None:
        norms = [member.clip_norm for member in self._members]
        values = [member.clip_value for member in self._members]
        limits = norms + values
        if limits != self._limits:
            for row, numbers in zip(self._feed.host["limits"], (norms, values), strict=True):
                row[self._rows] = [math.inf if number is None else number for number in numbers]
            self.clips = (any(n is not None for n in norms), any(v is not None for v in values))
            self._limits = limits

    def _scalars_of(self, slot: Slot, index: int) -> tuple[float, ...]:
        """One member's scalars by themselves, with an error that names it."""
        optimizer = slot.member.optimizer
        try:
            values = scalar_values(
                self._structure.groups[index],
                optimizer.param_groups[index],
                slot.base_steps[index] + slot.num_updates,
            )
        except OptimizerError as error:
            error.add_note(f"in the settings of member {slot.name!r}")
            raise
        if not all(map(math.isfinite, values)):
            check_hyperparameters(optimizer, member=slot.name)
        return values
