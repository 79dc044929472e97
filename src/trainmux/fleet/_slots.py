"""Slots: the rows of a group's stacked tensors, and the members that occupy them (D9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from trainmux.engine import Transfers
from trainmux.fleet._member import Member
from trainmux.fleet._shared import Held, held_by
from trainmux.runtime import stacked_zeros
from trainmux.tracing import BatchSpec, Shape

if TYPE_CHECKING:
    from trainmux.fleet._traces import Evaluated, Trace
    from trainmux.fleet._watch import MemberWatch

K = TypeVar("K")


class Room(StrEnum):
    """Where a member that comes finds its place in a fleet."""

    FREE_SLOT = "free slot"  # nothing is captured anew
    MORE_SLOTS = "more slots"  # in a group like it, which is captured anew
    NEW_GROUP = "new group"


@dataclass
class Slot:
    """An occupied row: the member, and what the host counts for it.

    ``base_steps`` are the updates that each parameter group had behind it on arrival; ``num_updates``
    those enqueued since (a member that froze on the device did fewer); ``counter`` the micro-batches seen,
    which number the random draws; ``watch`` finds out whether its owner has changed it since. One that
    ``waits`` came between two updates and is not active before the next whole one. ``origin`` is another one
    where training begins anew: with another member, or from another's state. ``traces`` are those of its
    step, by batch, ``evaluated`` those of metrics, by the metric's id, too. ``wider`` has the shapes of
    parameters that are padded with zeros in the group's storage, ``own_shapes`` those in the model.
    """

    member: Member
    name: str
    watch: MemberWatch
    traces: dict[BatchSpec, Trace]
    base_steps: tuple[int, ...]
    num_updates: int = 0
    counter: int = 0
    active: bool = True
    waits: bool = False
    reason: str | None = None
    wider: Mapping[str, Shape] = field(default_factory=dict)
    own_shapes: Mapping[str, Shape] = field(default_factory=dict)
    evaluated: dict[tuple[int, BatchSpec], Evaluated] = field(default_factory=dict)
    origin: object = field(default_factory=object)
    _held: tuple[object, Collection[str], Held] | None = None

    def held(self, changing: Collection[str]) -> Held:
        """The memory of the member's tensors, of which training writes to ``changing``."""
        own = self.watch.own
        if self._held is None or self._held[0] is not own or self._held[1] != changing:
            self._held = (own, changing, held_by(self.name, own, changing))
        return self._held[2]

    def cut(self, parameter: str, value: Tensor) -> Tensor:
        """The member's own part of a row of a parameter, or of a state of it; numbers are whole."""
        for axis, size in enumerate(self.own_shapes.get(parameter, ()) if value.dim() else ()):
            value = value.narrow(axis, 0, size)
        return value


@dataclass
class StackedState:
    """All tensors of a group that outlive a step, each ``[width, ...]``, or shared by all members.

    ``tensors`` are parameters and buffers, ``states`` the optimizers', ``totals`` accumulated gradients.
    """

    alive: Tensor
    updates: Tensor
    seeds: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    states: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)  # non-trainable tensors equal in all members

    @staticmethod
    def blank(width: int, device: torch.device) -> StackedState:
        """A state of ``width`` rows that has no tensors yet."""
        alive = torch.ones(width, dtype=torch.bool, device=device)
        updates, seeds = (torch.zeros(width, dtype=torch.int64, device=device) for _ in range(2))
        return StackedState(alive, updates, seeds)

    def stacked(self) -> list[Tensor]:
        """Every tensor with one row per member."""
        kinds = (self.tensors, self.states, self.totals)
        return [*(rows for kind in kinds for rows in kind.values()), self.alive, self.updates, self.seeds]

    def everything(self) -> list[Tensor]:
        """Every tensor."""
        return [*self.stacked(), *self.shared.values()]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StackedState:
        """Apply ``change`` to every tensor."""
        return StackedState(
            change(self.alive),
            change(self.updates),
            change(self.seeds),
            _each(self.tensors, change),
            _each(self.states, change),
            _each(self.totals, change),
            _each(self.shared, change),
        )

    def with_rows(
        self,
        sources: Sequence[tuple[StackedState, int]],
        width: int,
        device: torch.device,
        transfers: Transfers,
        shared: Mapping[str, Tensor],
    ) -> StackedState:
        """Make a state like this one with ``width`` rows, the first ones copied from ``sources``.

        Sources are other states like it and rows of theirs; ``shared`` are the constants, in place.
        """

        def zeros(rows: Tensor) -> Tensor:
            return stacked_zeros(width, rows.shape[1:], rows.dtype, device)

        new = StackedState.blank(width, device)
        new.tensors, new.states = _each(self.tensors, zeros), _each(self.states, zeros)
        new.totals = _each(self.totals, zeros)
        new.shared = dict(shared)
        transfers.copy(
            [
                (rows[row], given[number])
                for row, (source, number) in enumerate(sources)
                for rows, given in zip(new.stacked(), source.stacked(), strict=True)
            ]
        )
        return new


def _each(kind: dict[K, Tensor], change: Callable[[Tensor], Tensor]) -> dict[K, Tensor]:
    return {key: change(tensor) for key, tensor in kind.items()}


def named_tensors(member: Member) -> dict[str, Tensor]:
    """Parameters and buffers of a member's model by name, tied ones once."""
    return {**dict(member.model.named_parameters()), **dict(member.model.named_buffers())}


def volatile_names(member: Member) -> set[str]:
    """Names of the buffers that ``state_dict`` leaves out."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in member.model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same in shape, type and every value."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach(), b.detach()))
