"""A fleet whose steps someone else runs, piece by piece: what belongs before, between and after the pieces.

`Fleet.step` checks a batch, feeds every group, runs it, counts it and notes its results. Here these are calls
of their own, so that the kernels of a step can run in memory that is arranged elsewhere, with other work
between them. A step that was begun is to be ended, or not fed at all: nothing changes before ``feed``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmux.engine import CudaGraphEngine, StepProgram
from trainmux.errors import ConfigError, FleetError
from trainmux.fleet._fleet import Fleet
from trainmux.fleet._group import Group
from trainmux.fleet._planned_beside import read_step
from trainmux.fleet._schedules import end_update
from trainmux.profiling import KernelGraph
from trainmux.tracing import BatchSpec, TracedGraph, plain_torch

_MAX_KNOWN = 8
_KNOWN: weakref.WeakKeyDictionary[Group, dict[Hashable, tuple[StepProgram, KernelGraph]]] = (
    weakref.WeakKeyDictionary()
)
"""Steps that were read before, by group: those of a fleet that shares a device for a second time."""


@dataclass(frozen=True)
class GroupPiece:
    """One group's part of a step: what its program depends on, and the batch that it is to be fed.

    Steps of the group with one ``variant`` have the same program; ``index`` is the group's place among all.
    """

    index: int
    group: Group
    variant: Hashable
    batch: tuple[Tensor, ...]
    traced: TracedGraph
    spec: BatchSpec
    is_stacked: bool
    applies: bool

    def kernels(self) -> tuple[StepProgram, KernelGraph]:
        """The step of the whole group as one array, and its kernels; where `Fleet.step` runs one array of
        kernels that do not change, it is the same."""
        known = _KNOWN.setdefault(self.group, {})
        key = (self.variant, self.group.width, frozenset(self.group.state.shared))
        if key not in known:
            with plain_torch(self.group.config.default_dtype):
                step = self._step()
            known[key] = (step, read_step(step))
            while len(known) > _MAX_KNOWN:
                del known[next(iter(known))]
        return known[key]

    def _step(self) -> StepProgram:
        """The group's step as one array.

        Where a fleet begins on ATen's kernels and goes over to compiled ones meanwhile, the usual step is
        compiled now: its memory is placed once. So is one that the fleet would run in several arrays.
        """
        group = self.group
        if group.config.lowering != "auto":
            step = group.prepare(self.traced, self.spec, stacked_batch=self.is_stacked, applies=self.applies)
            if isinstance(step.module, torch.fx.GraphModule):
                return step
        group.stacked_batch = self.is_stacked
        is_compiled = group.config.lowering != "aten" and self.traced is group.traced
        return group.sub_array_program(
            group.width,
            kernels="compiled" if is_compiled else "aten",
            traced=self.traced,
            stacked_batch=self.is_stacked,
            applies=self.applies,
        )

    def feed(self, program: StepProgram, *, num_ahead: int = 0) -> dict[int, Tensor]:
        """What is new for this step, by position among the program's arguments.

        ``num_ahead`` steps of the group, none with an update, were fed before and have not ended yet.
        """
        self.group._numbers.push(self.group.members, num_ahead=num_ahead)
        arguments = self.group._arguments(program, self.batch)
        return {position: arguments[position] for position in program.positions_fed_anew()}

    def end(self, program: StepProgram, results: Sequence[Tensor]) -> None:
        """Count the group's step and take down what it returned."""
        self.group.count(program)
        self.group.note(program, results)


class FleetInPieces:
    """A fleet's steps, taken apart.

    Refused with `ConfigError`: a fleet that trains by a plan, and one whose groups are cut into narrower
    arrays. Its groups may not change their number of slots meanwhile.
    """

    def __init__(self, fleet: Fleet) -> None:
        if fleet._plans.plan is not None:
            raise ConfigError(
                "expected a fleet without a plan of its own, got one that trains by a plan; call "
                "fleet.use(None) first"
            )
        fleet._require_members()
        fleet._arrange_groups()
        self.fleet = fleet
        self.groups: tuple[Group, ...] = tuple(fleet._groups)
        for group in self.groups:
            if group.config.width is not None and group.config.width < group.width:
                raise ConfigError(
                    f"expected groups that train as one array, got width={group.config.width} for a group "
                    f"of {group.width}; leave out the fleet's width"
                )
        self._widths = [group.width for group in self.groups]

    @property
    def device(self) -> torch.device:
        return self.fleet._config.device

    @property
    def is_deterministic(self) -> bool:
        return self.fleet._config.deterministic

    @property
    def compiles_usual_only(self) -> bool:
        """Whether steps on other batches than the usual ones may run through ATen, unlike those."""
        lowering = self.fleet._config.lowering
        is_wide = any(group.width > 1 for group in self.groups)
        return lowering == "auto" or (lowering == "inductor" and is_wide)

    @property
    def accumulate(self) -> int:
        """Every so many steps update."""
        return self.fleet._config.accumulate

    @property
    def num_accumulated(self) -> int:
        """Steps that have ended since the last update."""
        return self.fleet.num_steps % self.accumulate

    @property
    def uses_half(self) -> bool:
        """Whether products are of 16-bit numbers."""
        return self.fleet._config.precision == "bf16"

    def begin(self, batch: Any, *, applies: bool | None = None, num_ahead: int = 0) -> tuple[GroupPiece, ...]:
        """Check a batch and read the members' settings as they are now; refuses what `Fleet.step` would.

        ``applies`` says whether the step updates; left out, it is what comes next, behind ``num_ahead`` steps
        that have begun and not ended. Groups that have lost all members have no part in it.
        """
        with plain_torch(self.fleet._config.default_dtype):
            return self._begin(batch, applies, num_ahead)

    def _begin(self, batch: Any, applies: bool | None, num_ahead: int) -> tuple[GroupPiece, ...]:
        fleet, groups = self.fleet, self.groups
        if fleet._broken:
            raise FleetError(fleet._broken)
        if list(groups) != fleet._groups or self._widths != [group.width for group in groups]:
            raise ConfigError(
                "expected a fleet with the slots that it had when its job began, got others; add members "
                "before the job begins, or replace() one"
            )
        fleet._require_members()
        fleet._watch.at_step(fleet._groups)
        feeds = fleet._feed.for_groups(batch, {}, groups, fleet.names)
        if applies is None:
            applies = (fleet.num_steps + num_ahead + 1) % fleet._config.accumulate == 0
        filled = [group for group in groups if group.members]
        traces = [fleet._trace_for(group, feeds[id(group)].example).graph for group in filled]
        tensors = fleet._feed.tensors(feeds, filled, fleet.names)
        return tuple(
            GroupPiece(
                groups.index(group),
                group,
                (group.variant(applies=applies), feed.example.spec, feed.stacked),
                tuple(tensors[id(group)]),
                traced,
                feed.example.spec,
                feed.stacked,
                applies,
            )
            for group, traced, feed in zip(filled, traces, [feeds[id(one)] for one in filled], strict=True)
        )

    def told(self, *, applies: bool) -> Hashable:
        """What a step that begins now would be told, beside its batch: members, settings, numbers.

        Whoever feeds a step before it is its turn can see by this whether it has to be fed anew.
        """
        rows = [
            (group.width, group.variant(applies=applies), group._numbers.told(group.members))
            for group in self.groups
        ]
        return (list(self.groups) == self.fleet._groups, self.fleet.names, tuple(rows))

    def end(self, pieces: Sequence[GroupPiece]) -> Tensor:
        """All groups have ended a step: it counts. Returns losses in the order of the fleet's names."""
        fleet = self.fleet
        fleet._num_steps += 1
        if pieces[0].applies:
            end_update(self.groups)
        losses: Tensor = fleet._ordered("loss")
        return losses

    def rest(self) -> None:
        """Let go of what the fleet's own steps have left on the device: graphs, their pool, workspaces."""
        had_graphs = False
        for group in self.groups:
            if isinstance(group._engine, CudaGraphEngine) and group._engine.num_captures:
                group._engine = group.config.make_engine()
                had_graphs = True
        if had_graphs:
            gc.collect()  # what graphs held is free only when they are gone

    def go_back(self) -> None:
        """Put the groups' state into storage of their own again.

        Where the device has no room for it, that is in the host's memory until the fleet's next step.
        """
        try:
            self._restack(self.device)
        except torch.OutOfMemoryError:
            self._restack(torch.device("cpu"))
            self.fleet._plans.stay_on_host()

    def _restack(self, device: torch.device) -> None:
        for group in self.groups:
            group.restack(device)
            group.state.shared = {name: value.clone() for name, value in group.state.shared.items()}
