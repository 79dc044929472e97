"""Steps of a fleet that somebody else runs, segment by segment.

`Fleet.step` checks a batch, feeds every group, runs it, counts it and notes its results. Here these are calls
of their own, so that the kernels of a step can run in memory that is laid out elsewhere, with other work in
between. Nothing changes before a piece is fed; a step that was fed must be ended.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainmux.engine import StepProgram
from trainmux.errors import ConfigError
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._group import Constants, Group
from trainmux.fleet._other_steps import read_step
from trainmux.fleet._runner import Batches, GroupPart
from trainmux.profiling import KernelGraph
from trainmux.tracing import plain_torch

if TYPE_CHECKING:
    from trainmux.fleet._fleet import Fleet


@dataclass(frozen=True)
class GroupPiece:
    """One group's part of a step, with the batch to feed.

    Steps of the group with one ``variant`` have the same program; ``index`` is the group's place among all.
    """

    index: int
    part: GroupPart
    variant: Hashable
    batch: tuple[Tensor, ...]

    @property
    def group(self) -> Group:
        return self.part.group

    @property
    def applies(self) -> bool:
        """Whether the step updates."""
        return self.part.applies

    def kernels(self) -> tuple[StepProgram, KernelGraph]:
        """Build the step of the whole group as one array, and read its kernels.

        It is the step that `Fleet.step` runs, where that is one array of kernels that do not change. Where a
        fleet starts on ATen's kernels and switches to compiled ones later, the usual step is compiled now,
        because its memory is placed once. So is one that the fleet would run in several arrays.
        """
        group, trace, stacked = self.group, self.part.trace, self.part.feed.stacked
        step: StepProgram | None = None
        with plain_torch(group.config.default_dtype):
            if group.config.lowering != "auto":
                step = group.prepare(trace, stacked_batch=stacked, applies=self.applies)
            if step is None or not isinstance(step.module, torch.fx.GraphModule):
                group.stacked_batch = stacked
                is_compiled = group.config.compiles_plans and trace.graph is group.traced
                step = group.sub_array_program(
                    group.width,
                    kernels="compiled" if is_compiled else "aten",
                    traced=trace.graph,
                    stacked_batch=stacked,
                    applies=self.applies,
                )
        return step, read_step(step)

    def feed(self, program: StepProgram) -> dict[int, Tensor]:
        """Return what is new for this step, by position among the program's arguments."""
        self.group.push_numbers()
        return self.group.fed(program, self.batch)

    def end(self, program: StepProgram, results: Sequence[Tensor]) -> None:
        """Count the group's step and keep what it returned."""
        self.group.count(program)
        self.group.note(program, results)


class SegmentRunner:
    """Hands out the steps of a fleet as pieces, one per group.

    Made by `Fleet`, which refuses with `ConfigError` to share a fleet that trains by a plan; so is one whose
    groups are cut into narrower arrays. Groups may not change their number of slots meanwhile.
    """

    def __init__(
        self,
        fleet: Fleet,
        groups: Sequence[Group],
        config: FleetConfig,
        stay_on_host: Callable[[], None],
    ) -> None:
        self.fleet = fleet
        self.groups = tuple(groups)
        self.device = config.device
        self.is_deterministic = config.deterministic
        self.uses_half = config.precision == "bf16"
        """Whether matrix products are of 16-bit numbers."""
        self._config = config
        self._stay_on_host = stay_on_host
        self._widths = [group.width for group in self.groups]
        if config.width is not None and config.width < max(self._widths):
            raise ConfigError(
                f"expected groups that train as one array, got width={config.width} for a group of "
                f"{max(self._widths)}; leave out the fleet's width"
            )

    @property
    def compiles_usual_only(self) -> bool:
        """Whether steps on other batches than the usual ones may run through ATen, unlike those."""
        is_wide = any(group.width > 1 for group in self.groups)
        return self._config.compiles_plans and (self._config.lowering == "auto" or is_wide)

    def begin(self, batch: Any, *, applies: bool | None = None) -> tuple[GroupPiece, ...]:
        """Check a batch and read the members' settings as they are now; refuses what `Fleet.step` would.

        ``applies`` says whether the step updates; left out, it is what comes next. Groups that have lost all
        members have no part in it.
        """
        if applies is None:
            applies = (self.fleet.num_steps + 1) % self._config.accumulate == 0
        return self.fleet._begin_segments(self, batch, applies)

    def check_slots(self, groups: Sequence[Group]) -> None:
        """Refuse a fleet whose groups or slots are not those that it had when its job began."""
        if list(self.groups) != list(groups) or self._widths != [group.width for group in self.groups]:
            raise ConfigError(
                "expected a fleet with the slots that it had when its job began, got others; add members "
                "before the job begins, or replace() one"
            )

    def prepare(self, parts: Sequence[GroupPart]) -> Callable[[Batches], tuple[GroupPiece, ...]]:
        """Read the members' settings; the result adds the batches."""
        variants = [part.variant() for part in parts]

        def pieces(batches: Batches) -> tuple[GroupPiece, ...]:
            return tuple(
                GroupPiece(self.groups.index(part.group), part, variant, tuple(batch))
                for part, variant, batch in zip(parts, variants, batches, strict=True)
            )

        return pieces

    def told(self, *, applies: bool) -> Hashable:
        """Return all that a step that begins now would be told, except for its batch.

        Whoever feeds a step ahead of time sees by this whether it has to be fed again.
        """
        return (self.fleet.names, *(group.told(applies=applies) for group in self.groups))

    def end(self, pieces: Sequence[GroupPiece]) -> Tensor:
        """Count a step that all groups have ended. Returns losses in the order of the fleet's names."""
        return self.fleet._end_step(pieces[0].applies)

    def rest(self) -> None:
        """Free what the fleet's own steps have left on the device: graphs, their pool, workspaces."""
        had_graphs = [group.programs.drop_graphs() for group in self.groups]
        if any(had_graphs):
            gc.collect()  # what graphs held is free only when they are gone

    def go_back(self) -> None:
        """Put the groups' state into storage of their own again.

        Where the device has no room for it, it stays in host memory until the fleet's next step.
        """
        try:
            self._restack(self.device)
        except torch.OutOfMemoryError:
            self._restack(torch.device("cpu"))
            self._stay_on_host()

    def _restack(self, device: torch.device) -> None:
        known: Constants = {}
        for group in self.groups:
            group.restack(device, known)
            base = dict(group.key.base)
            group.state.shared |= {
                name: value.clone() for name, value in group.state.shared.items() if name not in base
            }
