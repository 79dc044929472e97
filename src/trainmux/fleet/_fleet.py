"""The facade: members in, fused training out."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from trainmux.errors import ConfigError, FleetError, FusionError, MemberError, warn_user
from trainmux.fleet._callbacks import Callback
from trainmux.fleet._checkpoint import SavedFleet, SavedMember, fleet_document, member_document
from trainmux.fleet._checkpoint_files import write_checkpoint
from trainmux.fleet._config import make_config
from trainmux.fleet._feed import BatchFeed
from trainmux.fleet._fit import FitOptions, fit
from trainmux.fleet._free_numbers import GroupTrace
from trainmux.fleet._group import Group, GroupKey, changing_names
from trainmux.fleet._history import History
from trainmux.fleet._member import Member
from trainmux.fleet._newcomer import (
    Newcomer,
    carry_over,
    describe_newcomer,
    kept_edits,
    names_of,
)
from trainmux.fleet._plan import Plan
from trainmux.fleet._plan_keeper import PlanKeeper, without_empty
from trainmux.fleet._planning import FleetPlanner, PlanRequest
from trainmux.fleet._ranks import Outline, widened
from trainmux.fleet._runner import Batches, Gather, GroupPart, HalfStepError, StepRunner, evaluate_fleet
from trainmux.fleet._schedules import await_update, end_epoch, end_update
from trainmux.fleet._segment_runner import GroupPiece, SegmentRunner
from trainmux.fleet._shared import Owners, held_by, view_key
from trainmux.fleet._slots import Room, Slot, named_tensors
from trainmux.fleet._split import splits, warn_of_small_splits
from trainmux.fleet._traces import Trace, TraceCache
from trainmux.fleet._watch import Checksums, Edits, FleetWatch, MemberWatch
from trainmux.ir import GroupSummary, Timeline
from trainmux.planning import TIME_LIMIT_SECONDS, PlanProgress
from trainmux.profiling import Device
from trainmux.reporting import format_fusion
from trainmux.runtime import deferred_interrupts
from trainmux.tracing import FlatBatch, LossFunction, Shape, is_plain, plain_torch

P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[Concatenate["Fleet", P], T]


_MOST_PREPARED = 64
"""Members that are prepared and do not come; the oldest are forgotten."""


def whole(method: Call[P, T]) -> Call[P, T]:
    """Refuse the call where a step has failed half-way before; a step that does so now is remembered."""

    @functools.wraps(method)
    def call(fleet: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if fleet._broken:
            raise FleetError(fleet._broken)
        try:
            return method(fleet, *args, **kwargs)
        except HalfStepError as error:
            fleet._broken = str(error)
            raise

    return call


def door(method: Call[P, T]) -> Call[P, T]:
    """As `whole`, and with torch's ambient switches put aside: autocast, a default device and the like."""

    @functools.wraps(method)
    def call(fleet: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if is_plain(fleet._config.default_dtype):
            return method(fleet, *args, **kwargs)
        with plain_torch(fleet._config.default_dtype):
            return method(fleet, *args, **kwargs)

    return whole(call)


class Fleet:
    """Many models that train as one.

    Members of one architecture, loss, batch shape and optimizer structure are fused into one group, whatever
    the numbers in their code (dropout probability, loss weight); others form groups of their own. Everything
    is traced and fused here, before the first step: what cannot be trained is refused with a typed error that
    changes nothing.

    ``loss(model, batch)`` returns a scalar, or ``(scalar, {name: tensor})``; it is traced with
    ``example_batch``, a batch like those to come. ``data="shared"`` gives every member the same batch; with
    ``"per_member"`` each leaf has a leading axis of one entry per member, in the order of ``names``. With
    ``accumulate=n`` every n-th call of ``step`` updates, with the mean of the gradients of n batches.
    ``precision`` is "fp32" (no autocast; tensors keep their own dtype), "bf16" (autocast) or "fp64"
    (everything floating is held in fp64). ``engine`` is "auto" (CUDA graphs on a CUDA device), "cuda_graphs"
    or "reference" (node by node).

    A fleet that has lost members goes on with fewer slots, half of them or less, once what empty ones cost is
    worth the new programs; not with ``deterministic``, because results may differ in their last bits then.

    ``lowering`` is "auto" (training begins on ATen's kernels at once and switches to compiled ones as soon as
    they are ready, at once where they are on disk; on a CPU they are begun after some seconds, and never
    with ``deterministic``), "inductor" (wait for them) or "aten". ``width`` is the number of members fused
    into one sub-array and ``branches`` the number of sub-arrays that run in parallel; ``None`` chooses by
    what was measured for models of this kind.
    """

    def __init__(
        self,
        members: Sequence[Member],
        loss: LossFunction | None = None,
        example_batch: Any = None,
        *,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        data: str = "shared",
        accumulate: int = 1,
        deterministic: bool = False,
        engine: str = "auto",
        lowering: str = "auto",
        width: int | None = None,
        branches: int | None = None,
    ) -> None:
        kinds = {"precision": precision, "data": data, "engine": engine, "lowering": lowering}
        sizes = {"accumulate": accumulate, "width": width, "branches": branches}
        self._config = make_config(device, **kinds, **sizes, deterministic=deterministic)
        self._loss = loss
        self._traces = TraceCache(self._config.trace_settings)
        self._groups: list[Group] = []
        self._prepared: dict[Member, Newcomer] = {}  # that have not come yet
        self._gather = Gather()
        self._num_steps = 0
        self._broken = ""  # why no more calls are taken: a step failed half-way
        self._plans = PlanKeeper(self._config, self._planner)
        self._watch = FleetWatch(self._computes_alike)
        members = list(members)
        if not members:
            raise MemberError("expected at least one member, got none; pass a list of trainmux.Member")
        names = names_of(members)
        self._feed = BatchFeed(self._config, example_batch, len(members))
        by_key: dict[GroupKey, list[Newcomer]] = {}
        with plain_torch(self._config.default_dtype):
            joining = dict(zip(names, members, strict=True))
            owners, sums = self._owners(joining), Checksums()
            wider = widened({name: Outline(member) for name, member in joining.items()})
            for name, member in joining.items():
                plan = self._describe(member, name, sums, wider[name]).among(owners)
                by_key.setdefault(plan.key, []).append(plan)
            for key, (plan, *others) in list(by_key.items()):
                if plan.wider and not others:  # padded for nobody
                    del by_key[key]
                    plan = self._describe(plan.member, plan.name, sums).among(owners)
                    by_key.setdefault(plan.key, []).append(plan)
            for group_plans in by_key.values():
                self._groups += self._make_groups(group_plans)
        self._names: list[str] = names
        warn_of_small_splits(self._groups)

    # ---- training ----------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The members in the order in which every per-member result comes."""
        return tuple(self._names)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members in the order of ``names``; their own tensors are current after ``sync``."""
        found = {slot.name: slot.member for group in self._groups for _, slot in group.members}
        return tuple(found[name] for name in self._names)

    @property
    def num_steps(self) -> int:
        """Calls of ``step`` so far."""
        return self._num_steps

    @door
    def step(self, batch: Any = None, overrides: Mapping[str, Any] | None = None) -> Tensor:
        """One training step of every member on ``batch``; losses in the order of ``names``.

        ``overrides`` holds the batches of members that were given an ``example_batch`` of their own, by
        name. A `PartialBatch` is for some members only. The result is on the fleet's device: nothing waits
        for it. A member whose loss or gradient is not finite is frozen before its weights or buffers change
        (but see ``update``); ``stopped()`` tells. A step that fails changes no member; where it has,
        ``FleetError`` says whom, until ``restore``.
        """
        self._require_members()
        self._watch.at_step(self._places())
        self._arrange_groups()
        applies = (self._num_steps + 1) % self._config.accumulate == 0
        batch, absent = self._feed.attendance(batch, self._names)
        if absent and self._config.accumulate > 1:
            raise ConfigError(
                "expected accumulate=1 for a PartialBatch, which would leave members without one of their "
                f"micro-batches, got accumulate={self._config.accumulate}; IndexBatches gives none with "
                "drop_last=True and views of one length"
            )
        with self._left_out(absent):
            ready, batches = self._begin_step(self._plans.runner, batch, overrides or {}, applies)
            # Only now, when nothing is left to be refused, does any group change; and then all of them do.
            with deferred_interrupts():
                ready(batches)
                losses = self._end_step(applies)
        self._plans.hold_budget()
        if absent:
            gone = torch.tensor([name in absent for name in self._names], pin_memory=losses.is_cuda)
            losses = losses.masked_fill(gone.to(losses.device, non_blocking=True), math.nan)
        return losses

    @contextmanager
    def _left_out(self, absent: frozenset[str]) -> Iterator[None]:
        """Inside, a step changes nothing about these members."""
        places = [(group, slot) for group, slot in self._places() if slot.name in absent and slot.active]
        for group, slot in places:
            slot.active = False
            group.forget_fed()
        try:
            yield
        finally:
            for group, slot in places:
                slot.active = True
                group.forget_fed()

    def _begin_step(
        self, runner: StepRunner[T], batch: Any, overrides: Mapping[str, Any], applies: bool
    ) -> tuple[Callable[[Batches], T], Batches]:
        """Check a batch and have ``runner`` prepare a step on it; groups without members have no part."""
        groups = [group for group in self._groups if group.members]
        feeds = self._feed.for_groups(batch, overrides, groups, self._names)
        parts = [
            GroupPart(group, self._trace_for(group, feed.example), feed, applies)
            for group, feed in zip(groups, feeds, strict=True)
        ]
        return runner.prepare(parts), self._feed.tensors(feeds, groups, self._names)

    def _end_step(self, applies: bool) -> Tensor:
        """Count a step that all groups have done; returns losses in the order of ``names``."""
        self._num_steps += 1
        if applies:
            end_update(self._groups)
        losses: Tensor = self._gather("loss", self._names, self._groups)
        return losses

    def _in_segments(self) -> SegmentRunner:
        """Let somebody else run the steps, segment by segment; see `SegmentRunner` for what is refused."""
        if self._plans.plan is not None:
            raise ConfigError(
                "expected a fleet without a plan of its own, got one that trains by a plan; call "
                "fleet.use(None) first"
            )
        self._require_members()
        self._arrange_groups()
        return SegmentRunner(self, self._groups, self._config, self._plans.stay_on_host)

    @door
    def _begin_segments(self, runner: SegmentRunner, batch: Any, applies: bool) -> tuple[GroupPiece, ...]:
        """Check everything that ``step`` would and return the groups' pieces of a step."""
        runner.check_slots(self._groups)
        self._require_members()
        self._watch.at_step(self._places())
        pieces, batches = self._begin_step(runner, batch, {}, applies)
        return pieces(batches)

    def wait_until_compiled(self) -> None:
        """With ``lowering="auto"``: return when the next step, if like one seen before, will run compiled."""
        with plain_torch(self._config.default_dtype):
            for group in self._groups:
                group.programs.wait_until_compiled()

    @property
    @door
    def metrics(self) -> dict[str, Any]:
        """Of the last step, one row per member: the loss function's metrics, ``grad_norm`` and ``finite``.

        A metric that only some members have is NaN for the others; one whose shape differs between members
        comes as a list.
        """
        self._plans.runner.finish()
        keys = dict.fromkeys(key for group in self._groups for key in group.last if key != "loss")
        return {key: self._gather(key, self._names, self._groups) for key in keys}

    def fit(
        self,
        loader: Iterable[Any],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        validation: Iterable[Any] | None = None,
        validate_every: int | None = None,
        metric_fn: LossFunction | None = None,
        callbacks: Iterable[Callback] = (),
        checkpoint: str | os.PathLike[str] | None = None,
        resume: str | bool = "auto",
        progress: str | bool = "auto",
        log_every: int | None = None,
        member_loaders: Mapping[str, Iterable[Any]] | None = None,
    ) -> History:
        """Train on the batches of ``loader`` for ``epochs`` passes over it, or for ``steps`` steps.

        ``validation`` is evaluated with ``metric_fn`` after every epoch; with ``steps``, after every
        ``validate_every`` of them (default: after every pass over the loader) and at the end. At the same
        points epoch schedulers are stepped, callbacks called, records made, and a checkpoint is saved in
        the directory ``checkpoint``. ``resume`` is ``"auto"`` (go on from a checkpoint if there is one),
        ``"must"`` or True, ``"never"`` or False (start over, overwriting it). A resumed fit goes on with
        the next epoch, at the batch and with the host's random state that it would have had; it returns at
        once when all is done.

        ``member_loaders`` maps names of members to loaders of their own, cycled; the others get
        ``loader``'s batches. ``progress`` is ``"auto"`` (or True), ``"rich"``, ``"plain"`` or False.
        ``log_every`` is the number of steps between progress updates; by default they come by wall clock.

        Returns the history of each member, of a resumed run from its first epoch on. The fit ends early
        when all members are stopped. Members that stop being finite are named in a ``TrainmuxWarning`` at
        the end of the epoch. Refuses contradicting arguments (``ConfigError``), a loader without batches
        (``BatchError``) and a checkpoint that cannot be read, written, or gone on with
        (``CheckpointError``). However it ends, also on an exception or Ctrl-C, ``sync()`` comes first, so
        that the members hold consistent weights.
        """
        what = (loader, epochs, steps, validation, validate_every, metric_fn, callbacks)
        return fit(self, FitOptions(*what, checkpoint, resume, progress, log_every, member_loaders))

    @whole
    def evaluate(
        self, loader: Iterable[Any], metric_fn: LossFunction | None = None
    ) -> dict[str, dict[str, float]]:
        """Every member's metrics over ``loader``, fused and forward only, in evaluation mode.

        ``metric_fn(model, batch)`` returns a scalar tensor or a dict of them; without one the fleet's loss
        is used. Values are means over samples: batches count by the size of their first dimension, and a
        `PartialBatch` for the members that it is for. Under a plan it stays within the plan's budget, or is
        refused with ``BudgetError``. Random draws differ from batch to batch and are the same ones in every
        call.
        """
        with plain_torch(self._config.default_dtype):  # without the loader, which is the user's
            self._require_members()
            self._watch.check(self._places(), ignores_mode=True)
            self._groups = self._plans.at_step(self._groups)
            self._plans.runner.finish()
        groups = [group for group in self._groups if group.members]

        def trace_of(slot: Slot, example: FlatBatch) -> Trace:
            metric = metric_fn if metric_fn is not None else self._loss_of(slot.member)
            return self._traces.forward(slot, metric, example)

        return evaluate_fleet(self._plans.runner.forward, groups, self._names, self._feed, loader, trace_of)

    # ---- members -----------------------------------------------------------------------------------

    def stop(self, name: str) -> None:
        """No more updates for this member; it keeps its slot, its weights stay as they are."""
        group, row = self._find(name)
        group.stop(row, "stopped")

    @door
    def stopped(self) -> dict[str, str]:
        """Members that train no more and why; waits for the device."""
        self._plans.runner.finish()
        found = {name: why for group in self._groups for name, why in group.stopped().items()}
        return {name: found[name] for name in self._names if name in found}

    @door
    def drop(self, name: str, *, write_back: bool = True) -> Member:
        """Take a member out, with its weights and optimizer state written back; its slot is free.

        Without ``write_back`` nothing waits for the device, and the member's own objects stay as the last
        ``sync`` left them. Gradients accumulated for it since the last update are lost.
        """
        self._plans.runner.finish()
        member = self._take_out(*self._find(name), write_back)
        self._names.remove(name)
        return member

    @door
    def replace(self, name: str, member: Member, *, write_back: bool = True) -> Member:
        """Put ``member`` in the place of another, which comes back as from ``drop``.

        No retracing where the new member fits the old one's group. It starts as one that comes by ``add``:
        its values are on their way to the device when this returns, behind the steps that are under way.
        """
        self._plans.runner.finish()
        group, row = self._find(name)
        plan, owners = self._describe_joining(member, leaving=name)
        if plan.key.base:
            self._find_bases(owners, leaving=name)
        if write_back:
            group.check_export(row)
        if plan.key == group.key:
            if self._plans.is_active and not group.accepts(plan):
                self._leave_plan()
                group, row = self._find(name)
            old = self._take_out(group, row, write_back)
            self._put(group, row, plan)
        else:
            watch = group.slot(row).watch
            self._place(plan)
            old = self._take_out(*self._find(name, watch), write_back)  # moved if that left the plan in use
        self._prepared.pop(member, None)
        await_update(self._groups, plan.name, self._num_steps)
        self._names[self._names.index(name)] = plan.name
        return old

    @door
    def add(self, member: Member) -> None:
        """Take in another member: into a free slot where there is one, else with one slot more; where there
        have been more before, with twice as many.

        With ``accumulate=n``, one that comes between two updates starts with the next n batches.
        """
        self._plans.runner.finish()
        plan, owners = self._describe_joining(member)
        if plan.key.base:
            self._find_bases(owners)
        self._place(plan)
        self._prepared.pop(member, None)
        await_update(self._groups, plan.name, self._num_steps)
        self._names.append(plan.name)

    @door
    def prepare(self, member: Member) -> None:
        """Do ahead of time, and from any thread, what ``add`` and ``replace`` do before anything changes.

        The member is checked and traced, and its values are copied to where the device can fetch them, while
        the fleet trains. ``add`` then takes little of the host's time. Refuses what ``add`` would but for
        other members' sake. A member that is changed afterwards is looked at again.
        """
        name = member.name if isinstance(member, Member) else None
        if name is None:
            names_of([member])
            return  # it is named when it comes
        ready = self._describe(member, name, Checksums())
        if not Outline(member).ranks:  # else members that are there when it comes decide about its shape
            while len(self._prepared) >= _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[member] = ready.staged(self._config)

    def room_for(self, member: Member) -> Room:
        """Tell whether ``add`` would find a free slot, add slots or a group; refuses what it would refuse."""
        with plain_torch(self._config.default_dtype):
            plan, _ = self._describe_joining(member)
        same = [group for group in self._groups if group.key == plan.key and group.members]
        if any(group.free_row() is not None for group in same):
            return Room.FREE_SLOT
        return Room.MORE_SLOTS if same else Room.NEW_GROUP

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of members that train as one, group by group."""
        found = (tuple(slot.name for _, slot in group.members) for group in self._groups)
        return tuple(names for names in found if names)

    @door
    def copy_member(self, source: str, target: str) -> None:
        """Have a member go on from another one's state: weights, buffers, optimizer state, counted updates.

        As ``load_state_dict`` of model and optimizer would, but ``target`` keeps the settings of its own
        optimizer (learning rate and the like), its schedule, name and seed; like the source, it trains or is
        stopped. Nothing waits for the device. ``MemberError`` for members that differ in structure.
        """
        group, row = self._find(target)
        other = self._find(source)
        self._plans.runner.finish()
        if source != target:
            group.take_over(row, *other)

    @door
    def refresh(self, name: str | None = None) -> None:
        """Take over what was changed about a member: its code and attributes, its optimizer, edited values.

        Without a name, about all of them. What nobody edited stays as it was trained. A member that computes
        something else now moves to a group where it fits. What cannot be trained is refused, and the fleet
        goes on as before. Afterwards the members' own objects are as after ``sync``.
        """
        self._plans.runner.finish()
        names = self._names if name is None else [name]
        owners, sums = self._owners(), Checksums()
        for one in names:
            group, row = self._find(one)
            slot = group.slot(row)
            # Refused before any changes.
            self._describe(slot.member, one, sums, slot.wider).among(owners)
        self._find_bases(owners)
        for one in names:
            group, row = self._find(one)
            self._take_base(group, group.slot(row).watch.edits(sums).tensors)
        changed: list[tuple[Newcomer, Edits]] = []
        after = Checksums()
        for one in names:
            group, row = self._find(one)
            slot = group.slot(row)
            edits = slot.watch.edits(sums)
            group.check_export(row)
            with kept_edits(slot.member, edits):
                group.export(row, sums)
            plan = self._describe(slot.member, one, after, slot.wider).among(owners)
            changed.append((plan, edits))
        if self._plans.is_active and not all(self._stays(plan) for plan, _ in changed):
            self._leave_plan()
        moving: dict[GroupKey, list[tuple[Newcomer, Edits]]] = {}
        for plan, edits in changed:
            group, row = self._find(plan.name)
            if plan.key == group.key:
                before = group.gathered([(group, row)])
                self._put(group, row, plan)
                carry_over(before, 0, group, row, edits)
            else:
                moving.setdefault(plan.key, []).append((plan, edits))
        for together in moving.values():
            places = [self._find(plan.name) for plan, _ in together]
            if len(together) == 1:
                self._place(together[0][0])
            else:
                self._groups += self._make_groups([plan for plan, _ in together])
            for (plan, edits), (group, row) in zip(together, places, strict=True):
                carry_over(group, row, *self._find(plan.name, plan.watch), edits)
                group.clear(row)
        self._watch.handed_out(self._places())

    @door
    def sync(self, name: str | None = None) -> None:
        """Write weights, buffers and optimizer state back into the members' own objects, or into one's."""
        self._plans.runner.finish()
        found = [self._find(one) for one in (self._names if name is None else [name])]
        for group, row in found:
            group.check_export(row)
        sums = Checksums()
        places = [(group, group.slot(row)) for group, row in found]
        self._watch.warn(places, "it trained on without it, and edited values are overwritten", sums)
        for group, row in found:
            group.export(row, sums)

    @door
    def plan(
        self,
        budget: int | str | None = None,
        policy: str = "auto",
        *,
        device: str | Device | None = None,
        num_members: int | None = None,
        num_budgets: int = 0,
        max_partitions: int | None = None,
        time_limit: float = TIME_LIMIT_SECONDS,
        progress: Callable[[PlanProgress], None] | None = None,
    ) -> Plan:
        """The quickest schedule that provably stays within ``budget`` on the device.

        ``budget`` is in bytes, or text such as "20GiB" or "70%"; ``None`` is what is free. Steps are measured
        on the fleet's own device, or worked out for another one by name ("a100-40gb"), which need not be
        here. A plan for the fleet as it is, on its own device, is used from the next step on.
        ``num_members`` plans as if the fleet had so many members like its own, ``num_budgets`` adds what
        other budgets would cost. Once kernels are compiled, profiling and search take ``time_limit`` seconds,
        or less where a plan is close to ``plan.bound_seconds``; the search has 20 of them in any case.
        Ctrl-C ends it with the best plan so far, and before there is one ends planning and changes nothing.
        ``progress`` is told how far each stage is.
        ``BudgetError`` says which budget would work where this one does not.
        """
        self._require_members()
        request = PlanRequest(budget, policy, num_members, num_budgets, max_partitions, time_limit, progress)
        if device is not None or num_members is not None:
            return self._planner(self._plans.whole(self._groups), device).plan(request)
        self._leave_plan()
        plan = self._planner(self._groups).plan(request)
        self._plans.want(plan, request)
        return plan

    @door
    def use(self, plan: Plan | None) -> None:
        """Train by a plan from the next step on; ``None``: without one.

        ``PlanError`` where it is another fleet's, or stale.
        """
        if plan is None:
            self._groups = self._plans.renounce(self._groups)
            return
        self._planner(self._plans.whole(self._groups)).check(plan, self.names)
        self._plans.want(plan, PlanRequest(plan.budget_bytes, plan.policy))

    def _planner(self, groups: Sequence[Group], device: str | Device | None = None) -> FleetPlanner:
        groups = [group for group in groups if group.members]
        examples = [self._feed.example_for(group.members[0][1].member) for group in groups]
        return FleetPlanner(groups, examples, self._config, device)

    @door
    def watch(self, batch: Any = None, overrides: Mapping[str, Any] | None = None) -> Timeline:
        """Train for a step by the plan in use, as ``step`` does; returns when each instruction ran.

        To compare with what the plan predicts: ``plan.report(path, measured=fleet.watch(batch))``.
        """
        self._arrange_groups()
        return self._plans.runner.watch(lambda: self.step(batch, overrides))

    def explain(self) -> str:
        """Per group: each operator and how it was fused, what fell back and why."""
        return format_fusion(self.summary())

    def summary(self) -> tuple[GroupSummary, ...]:
        """Return what ``explain`` says as records."""
        memory = self._plans.runner.memory
        return tuple(
            group.summary(memory, split.text)
            for group, split in zip(self._groups, splits(self._groups), strict=True)
        )

    @door
    def end_epoch(self, monitored: Mapping[str, Mapping[str, float]]) -> None:
        """Step the schedules that advance by epoch; ``monitored`` has what plateau schedules look at."""
        self._watch.check(self._places())
        end_epoch(self._groups, monitored)

    # ---- checkpoints -------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse what ``copy`` and ``pickle`` ask for."""
        raise FleetError(
            "expected a fleet to stay where it is, got copy or pickle; write it with fleet.save() and "
            "restore() it into another one, or call fleet.sync() and copy the members"
        )

    @door
    def parameters(self, name: str) -> dict[str, Tensor]:
        """A member's trainable parameters as they train, by name: views, valid until the next call.

        Writing into them changes what the member trains and is evaluated with.
        """
        self._plans.runner.finish()
        group, row = self._find(name)
        return {key: rows[row] for key, rows in group.state.tensors.items() if key in group.trainable}

    def num_updates(self, name: str) -> int:
        """Updates that a member was given since it came, as the host counts them."""
        group, row = self._find(name)
        return group.slot(row).num_updates

    def is_finite(self, name: str) -> Tensor:
        """Whether a member has been finite up to now; a bool on the device, which is not waited for."""
        group, row = self._find(name)
        return group.state.alive[row]

    @door
    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write all members' weights, optimizer and schedule state and counters to the directory ``path``.

        ``extra`` is kept beside them, as JSON; ``restore`` returns it. A save that is interrupted leaves the
        last one whole.
        """
        self._plans.runner.finish()
        self._watch.warn(self._places(), "what is saved was trained without it", Checksums())
        tensors, document = fleet_document(self._groups, self._names, self._num_steps, self._config)
        write_checkpoint(path, tensors, {**document, "extra": dict(extra or {})})

    def restore(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        """Go back to a saved state; the fleet must have the same members. Returns what ``extra`` was."""
        with plain_torch(self._config.default_dtype):
            saved = SavedFleet(path)
            saved.check(self._groups, self._names, self._config)
            if self._broken:
                self._groups = self._plans.start_over(self._groups)
            self._plans.runner.finish()
            if self._plans.is_active and saved.has_other_constants(self._groups):
                self._leave_plan()
            self._num_steps = saved.load(self._groups)
        self._broken = ""
        return dict(saved.document["extra"])

    @door
    def save_member(
        self, name: str, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write one member's weights, optimizer and schedule state and counters to a directory.

        Not what it shares with others in memory: of a frozen base, only checksums are written. Gradients
        accumulated since the last update are left out.
        """
        self._plans.runner.finish()
        group, row = self._find(name)
        text = "what is saved was trained without it"
        self._watch.warn([(group, group.slot(row))], text, Checksums())
        tensors, document = member_document(group, row, self._config)
        write_checkpoint(path, tensors, {**document, "extra": dict(extra or {})})

    @door
    def load_member(self, name: str, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        """Have a member go on from a state that `save_member` wrote, in this fleet or in another one.

        It must be built like the one that was saved, on the same base; ``CheckpointError`` says what does not
        fit, and nothing changes. With ``accumulate=n``, it starts with the next n batches. Returns what
        ``extra`` was.
        """
        saved = SavedMember(path)
        self._plans.runner.finish()
        group, row = self._find(name)
        saved.check(group, row, self._config)
        if self._plans.is_active and saved.other_constants(group):
            self._leave_plan()
            group, row = self._find(name)
        saved.load(group, row)
        await_update(self._groups, name, self._num_steps)
        return dict(saved.document["extra"])

    # ---- inside ------------------------------------------------------------------------------------

    def _require_members(self) -> None:
        if not self._names:
            raise MemberError("expected at least one member in the fleet, got none; add() one first")

    def _loss_of(self, member: Member) -> LossFunction:
        """A member's own loss function, or else the fleet's; refuses what is none."""
        loss = member.loss if member.loss is not None else self._loss
        if not callable(loss):
            raise ConfigError(
                f"expected a callable loss(model, batch) for member {member.name!r}, got "
                f"{type(loss).__name__}; give Fleet(loss=...) or Member(loss=...)"
            )
        return loss

    def _trace_for(self, group: Group, example: FlatBatch) -> GroupTrace:
        return group.trace_for(example.spec, lambda slot: self._trace(slot, example))

    def _trace(self, slot: Slot, example: FlatBatch) -> Trace:
        loss = self._loss_of(slot.member)
        return self._traces.joint(slot.name, slot.member.model, loss, example, slot.wider)

    @property
    def _origins(self) -> dict[str, object]:
        """By name: an object that is another one where the member of that name began anew."""
        return {slot.name: slot.origin for _, slot in self._places()}

    def _places(self) -> list[tuple[Group, Slot]]:
        return [(group, slot) for group in self._groups for _, slot in group.members]

    def _computes_alike(self, group: Group, slot: Slot) -> bool:
        """Whether a member as it is now has the graph of its group.

        If so, its graphs for batches unlike the example are made anew when they are needed.
        """
        example = self._feed.example_for(slot.member)
        trace = self._trace(slot, example)
        known = slot.traces.get(example.spec, trace)
        is_alike = (trace.key, trace.numbers) == (known.key, known.numbers)
        if is_alike:
            group.forget_traces(slot, but=example.spec)
        return is_alike

    def _find(self, name: str, watch: MemberWatch | None = None) -> tuple[Group, int]:
        """Find a member's group and row; with ``watch``, the one of two that has it while it moves."""
        for group in self._groups:
            for row, slot in group.members:
                if slot.name == name and watch in (None, slot.watch):
                    return group, row
        raise MemberError(
            f"expected the name of a member, got {name!r}; it was dropped or never there (members: "
            f"{', '.join(self._names) or 'none'})"
        )

    def _describe(
        self, member: Member, name: str, sums: Checksums, wider: Mapping[str, Shape] = MappingProxyType({})
    ) -> Newcomer:
        loss = self._loss_of(member)
        return describe_newcomer(member, name, loss, self._feed, self._traces, sums, wider)

    def _describe_joining(self, member: Member, leaving: str | None = None) -> tuple[Newcomer, Owners]:
        """Describe a newcomer, padded to the rank of a group that is there, if it fits there so.

        Returned with it are the owners of all memory once it has come.
        """
        (name,) = names_of([member], dict(zip(self._names, self.members, strict=True)), leaving)
        owners = self._owners({name: member}, leaving)
        ready = self._prepared.get(member)
        if ready is not None and ready.name == name and ready.watch.is_current():
            return ready.among(owners), owners
        outline, sums = Outline(member), Checksums()
        for group in self._groups if outline.ranks else ():
            for _, slot in group.members[:1]:
                wider = outline.padded_to(Outline(slot.member, slot.wider))
                if wider:
                    plan = self._describe(member, name, sums, wider).among(owners)
                    if plan.wider and plan.key.graph == group.key.graph:
                        return plan, owners
        return self._describe(member, name, sums).among(owners), owners

    def _owners(self, joining: Mapping[str, Member] | None = None, leaving: str | None = None) -> Owners:
        """Find the memory of all members but one who leaves, and of those that join."""
        owners = Owners()
        for group in self._groups:
            changing = changing_names(group.traced) if group.members else frozenset()
            for _, slot in group.members:
                if slot.name != leaving:
                    owners.add(slot.held(changing))
        for name, member in (joining or {}).items():
            tensors = named_tensors(member)
            learning = [key for key, tensor in tensors.items() if tensor.requires_grad]
            owners.add(held_by(name, tensors, learning))
        return owners

    def _find_bases(self, owners: Owners, leaving: str | None = None) -> None:
        """Find anew which constants groups have in common with other members, when some come or change."""
        for group in self._groups:
            changing = changing_names(group.traced)
            slots = [slot for _, slot in group.members if slot.name != leaving]
            found = {owners.base(slot.name, named_tensors(slot.member), changing) for slot in slots}
            base = found.pop() if len(found) == 1 else ()
            # What was held per member, because of one who has left, stays so.
            if base and all(name in group.state.shared for name, _ in base):
                group.key = replace(group.key, base=base)

    def _take_base(self, group: Group, edited: Sequence[str]) -> None:
        """Take edited values of constants over for all members that have them in common."""
        homes = group.homes
        views = {view_key(homes[name]) for name in edited if name in homes}
        if not views:
            return
        if self._plans.is_active:
            self._leave_plan()
        for other in self._groups:
            names = [name for name, home in other.homes.items() if view_key(home) in views]
            for name in names:
                if view_key(other.state.shared[name]) not in views:
                    other.state.shared[name].copy_(other.homes[name])
            for _, slot in other.members:
                slot.watch.settle(written=names)

    def _make_groups(self, plans: list[Newcomer]) -> list[Group]:
        """One group for all plans, or one for each where the graph cannot be fused."""
        group = self._new_group(plans)
        try:
            self._prepare(group, plans[0])
        except FusionError as error:
            if len(plans) == 1:
                raise
            warn_user(f"{error}; its members train at width 1")
            singles = [self._new_group([plan]) for plan in plans]
            for single, plan in zip(singles, plans, strict=True):
                single.unfused_because = str(error)
                self._prepare(single, plan)
            return singles
        return [group]

    def _new_group(self, plans: list[Newcomer]) -> Group:
        group = Group(plans[0].key, plans[0].trace.graph, self._config, len(plans))
        known = {key: value for other in self._groups for key, value in other.constants().items()}
        group.allocate([plan.member for plan in plans], known)
        for row, plan in enumerate(plans):
            group.load(row, plan)
        return group

    def _prepare(self, group: Group, plan: Newcomer) -> None:
        group.prepare(self._trace_for(group, plan.example), stacked_batch=self._feed.stacks(plan.member))

    def _place(self, plan: Newcomer) -> None:
        same = [group for group in self._groups if group.key == plan.key]
        with_room = [group for group in same if group.free_row() is not None]
        if self._plans.is_active and not any(group.accepts(plan) for group in with_room):
            self._leave_plan()
            self._place(plan)
        elif with_room:
            self._put(with_room[0], with_room[0].free_row(), plan)
        elif same and not same[0].unfused_because and self._grow(same[0], plan):
            self._put(same[0], same[0].free_row(), plan)
        else:
            self._groups += self._make_groups([plan])
            if same:
                self._groups[-1].unfused_because = same[0].unfused_because

    def _leave_plan(self) -> None:
        """The plan in use has no room for what comes; another one is made at the next step."""
        self._groups = self._plans.leave(self._groups)

    def _stays(self, plan: Newcomer) -> bool:
        """Whether a member that was described anew still fits its row, constants included."""
        group, _ = self._find(plan.name)
        return plan.key == group.key and group.accepts(plan)

    def _put(self, group: Group, row: int | None, plan: Newcomer) -> None:
        """Load a member into a row of its group."""
        assert row is not None
        others = group.other_constants(plan)
        if others:
            group.unshare(others)
        group.load(row, plan)

    def _grow(self, group: Group, plan: Newcomer) -> bool:
        """More slots; false, with a warning, where the group cannot be fused at that width."""
        width = group.width
        if width < group.widths.most:  # which has been fused
            group.resize(group.widths.wider(width))
            return True
        group.resize(width + 1)
        try:
            trace = group.trace_with(plan)
            group.prepare(trace, stacked_batch=self._feed.stacks(plan.member))
        except FusionError as error:
            group.resize(width)
            group.unfused_because = str(error)
            warn_user(f"{error}; its members train at width {width}")
            return False
        return True

    def _take_out(self, group: Group, row: int, write_back: bool) -> Member:
        slot = group.slot(row)
        if write_back:
            group.check_export(row)
            sums = Checksums()
            self._watch.warn([(group, slot)], "it leaves without it, and edited values are overwritten", sums)
            group.export(row, sums)
        group.clear(row)
        return slot.member

    def _arrange_groups(self) -> None:
        """At a step's beginning: the plan's groups, or without one fewer slots where most are empty."""
        groups = self._plans.at_step(self._groups)
        self._groups = groups if self._plans.is_active else without_empty(groups)
