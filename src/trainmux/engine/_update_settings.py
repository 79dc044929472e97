"""What decides the update of a step, and the tensors it works on."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trainmux.engine._row_gradients import RowGradient
from trainmux.errors import ConfigError
from trainmux.fusion.optimizers import OptimizerStructure, scalar_specs, state_names


class UpdateMode(enum.Enum):
    """When parameters are updated, and how many in one kernel (D3)."""

    DEFERRED = "deferred"
    """After all gradients exist: a member with one that is not finite keeps all of its bits."""

    BUCKETED = "bucketed"
    """The same, parameters of any size in buckets: one compiled kernel updates several of them."""

    IMMEDIATE = "immediate"
    """Each as soon as its gradient exists, which is freed then. What was updated before the first gradient
    that is not finite stays updated."""


@dataclass(frozen=True)
class UpdateSettings:
    """What decides the shape of the update, beside the graph.

    ``parameters`` are the names that get gradients; ``group_of`` gives the optimizer's parameter group
    of each, ``None`` for one that no optimizer owns. ``idle`` names, for each group, the settings that no
    member makes use of. A step that applies nothing need not have ``carries_state``: optimizer state is then
    none of its arguments.
    """

    structure: OptimizerStructure
    idle: tuple[frozenset[str], ...]
    parameters: tuple[str, ...]
    group_of: tuple[int | None, ...]
    clips_norm: bool
    clips_value: bool
    accumulates: bool
    applies: bool
    mode: UpdateMode = UpdateMode.DEFERRED
    carries_state: bool = True

    def __post_init__(self) -> None:
        assert self.carries_state or not self.applies
        if self.mode is UpdateMode.IMMEDIATE and (self.clips_norm or self.accumulates):
            raise ConfigError(
                "update: expected 'deferred' or 'bucketed' with clipping by norm or accumulation, which need "
                "all gradients at once, got 'immediate'; set clip_norm back to None or make another fleet"
            )

    def state_keys(self) -> tuple[tuple[str, str], ...]:
        """(parameter, state name) of every optimizer state tensor, in a fixed order."""
        if not self.carries_state:
            return ()
        return tuple(
            (parameter, name)
            for parameter, index in zip(self.parameters, self.group_of, strict=True)
            if index is not None
            for name in state_names(self.structure.groups[index])
        )

    def scalar_offsets(self) -> tuple[int, ...]:
        """Row of each group's first scalar in the scalar matrix."""
        offsets, total = [], 0
        for group in self.structure.groups:
            offsets.append(total)
            total += len(scalar_specs(group))
        return tuple(offsets)

    def neutral_scalars(self) -> tuple[float, ...]:
        """The neutral value of each row of the scalar matrix."""
        return tuple(spec.neutral for group in self.structure.groups for spec in scalar_specs(group))


@dataclass(frozen=True)
class TailInputs:
    """The tensors that the tail reads and changes in place, by role, all stacked."""

    loss: Tensor
    buffers: Sequence[Tensor]
    new_buffers: Sequence[Tensor]
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor | RowGradient[Tensor]]
    states: Sequence[Tensor]
    accumulators: Sequence[Tensor]
    scalars: Tensor  # [num_scalars, k], fp64
    neutral: Tensor  # [num_scalars, 1], fp64: the scalars of a member that must not change
    limits: Tensor  # [2, k], fp64: largest norm, largest value; infinite where there is none
    active: Tensor  # [k] bool, fed by the host
    alive: Tensor  # [k] bool, changed here: false from the first loss or gradient that is not finite
    updates: Tensor  # [k] int64, changed here: updates done
