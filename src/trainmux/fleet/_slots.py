"""Slots: the rows of a group's stacked tensors, and the members that occupy them (D9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainmux.errors import MemberError
from trainmux.fleet._member import Member
from trainmux.fusion.optimizers import OptimizerStructure, read_state, read_steps
from trainmux.ir import OutputKind
from trainmux.runtime import stacked_zeros
from trainmux.tracing import TracedGraph, unique_buffers, unique_parameters

if TYPE_CHECKING:
    from trainmux.fleet._watch import MemberWatch

CopyPairs = Callable[[Sequence[tuple[Tensor, Tensor]]], None]
"""Copies (destination, source) pairs."""


@dataclass
class Slot:
    """An occupied row: the member, and what the host counts for it.

    ``base_steps`` are the updates that each parameter group had behind it on arrival; ``num_updates``
    those enqueued since (a member that froze on the device did fewer); ``counter`` the micro-batches seen,
    which number the random draws; ``watch`` finds out whether its owner has changed it since. One that
    ``waits`` came between two updates and is not active before the next whole one.
    """

    member: Member
    name: str
    structure: OptimizerStructure
    watch: MemberWatch
    base_steps: tuple[int, ...]
    num_updates: int = 0
    counter: int = 0
    active: bool = True
    waits: bool = False
    reason: str | None = None


@dataclass
class StackedState:
    """All tensors of a group that outlive a step, each ``[width, ...]``, or shared by all members."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    states: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)  # non-trainable tensors equal in all members
    alive: Tensor = field(default_factory=lambda: torch.empty(0))
    updates: Tensor = field(default_factory=lambda: torch.empty(0))
    seeds: Tensor = field(default_factory=lambda: torch.empty(0))

    def mapped(
        self, change: Callable[[Tensor], Tensor], shared: Callable[[Tensor], Tensor] | None = None
    ) -> StackedState:
        """Apply ``change`` to every tensor; ``shared``, if given, to those that members have in common."""
        return StackedState(
            {name: change(rows) for name, rows in self.parameters.items()},
            {name: change(rows) for name, rows in self.buffers.items()},
            {key: change(rows) for key, rows in self.states.items()},
            {name: change(rows) for name, rows in self.totals.items()},
            {name: (shared or change)(value) for name, value in self.shared.items()},
            change(self.alive),
            change(self.updates),
            change(self.seeds),
        )

    @staticmethod
    def joined(parts: Sequence[StackedState]) -> StackedState:
        """The rows of all parts in one state; what is shared is that of the first."""
        first = parts[0]
        width = sum(part.alive.shape[0] for part in parts)
        device = first.alive.device
        whole = first.resized(width, [], device)
        begin = 0
        for part in parts:
            end = begin + part.alive.shape[0]
            for new, old in zip(whole.stacked(), part.stacked(), strict=True):
                new[begin:end].copy_(old)
            begin = end
        return whole

    def stacked(self) -> list[Tensor]:
        """Every tensor with one row per member."""
        kinds = (self.parameters, self.buffers, self.states, self.totals)
        return [*(rows for kind in kinds for rows in kind.values()), self.alive, self.updates, self.seeds]

    def resized(
        self, width: int, kept: list[int], device: torch.device, copy: CopyPairs | None = None
    ) -> StackedState:
        """Copy the state to ``width`` rows; ``kept`` are the old rows that go to the front, in order.

        ``copy`` copies (new, old) pairs of rows, all at once; without it they are copied one by one.
        """
        pairs: list[tuple[Tensor, Tensor]] = []

        def resize(old: Tensor) -> Tensor:
            if any(old is numbers for numbers in (self.alive, self.updates, self.seeds)):
                new = torch.full((width,), old is self.alive, dtype=old.dtype, device=device)
            else:
                new = stacked_zeros(width, old.shape[1:], old.dtype, device)
            pairs.extend((new[row], old[source]) for row, source in enumerate(kept))
            return new

        result = self.mapped(resize, lambda value: value)
        if copy is not None:
            copy(pairs)
            return result
        for new, old in pairs:
            new.copy_(old)
        return result


def named_tensors(member: Member) -> dict[str, Tensor]:
    """Parameters and buffers of a member's model by name, tied ones once."""
    found = (*unique_parameters(member.model), *unique_buffers(member.model))
    return {item.name: item.tensor for item in found}


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same in shape, type and every value."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach(), b.detach()))


def check_shapes(slot_name: str, member: Member, expected: dict[str, torch.Size]) -> None:
    """Refuse a member whose model no longer has the tensors it had when it joined."""
    found = named_tensors(member)
    for name, shape in expected.items():
        if name not in found:
            raise MemberError(
                f"member {slot_name!r}: expected a tensor {name} of shape {tuple(shape)} in its model, got "
                "none; do not change a model while it is in the fleet (drop it first)"
            )
        if found[name].shape != shape:
            raise MemberError(
                f"member {slot_name!r}: expected {name} of shape {tuple(shape)}, got "
                f"{tuple(found[name].shape)}; do not change a model while it is in the fleet (drop it first)"
            )


@dataclass(frozen=True)
class OptimizerSnapshot:
    """A member's optimizer, read and checked before the member joins.

    ``states`` maps (parameter, state name) to a tensor, or to the number that fills a state torch has not
    made yet; ``steps`` has the updates done, one number per parameter group.
    """

    structure: OptimizerStructure
    steps: tuple[int, ...]
    states: dict[tuple[str, str], Tensor | float]


def snapshot_optimizer(
    member: Member, name: str, structure: OptimizerStructure, traced: TracedGraph
) -> OptimizerSnapshot:
    """Read the state of every parameter that gets a gradient; ``OptimizerError`` if it cannot be used."""
    parameters = unique_parameters(member.model)
    learning = {output.name for output in traced.outputs if output.kind is OutputKind.GRADIENT}
    used = {position for position, item in enumerate(parameters) if item.name in learning}
    tensors = [item.tensor for item in parameters]
    steps = read_steps(member.optimizer, structure, tensors, used, member=name)
    states: dict[tuple[str, str], Tensor | float] = {}
    for index, group in enumerate(structure.groups):
        for position in used.intersection(group.params):
            values, _ = read_state(member.optimizer, index, tensors[position])
            for state, value in values.items():
                states[parameters[position].name, state] = value
    return OptimizerSnapshot(structure, steps, states)
