"""Members that want to join, or were changed: everything that can be refused, before anything changes.

Of a member that is in the fleet, what its user changed is taken over without losing what was trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trainmux.errors import MemberError, TrainmuxError
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._feed import BatchFeed
from trainmux.fleet._group import Group, GroupKey, changing_names
from trainmux.fleet._member import Member
from trainmux.fleet._ranks import keeps_zeros
from trainmux.fleet._shared import Owners
from trainmux.fleet._slots import named_tensors
from trainmux.fleet._traces import Trace, TraceCache
from trainmux.fleet._watch import Checksums, Edits, MemberWatch
from trainmux.fusion.optimizers import OptimizerStructure, describe, read_state, read_steps
from trainmux.ir import OutputKind
from trainmux.tracing import (
    FlatBatch,
    LossFunction,
    Reach,
    Shape,
    TracedGraph,
)


def names_of(
    joining: Sequence[Member], others: Mapping[str, Member] | None = None, leaving: str | None = None
) -> list[str]:
    """Name the members that join ``others``, one of whom may be ``leaving`` for them.

    Names are given or made up. Refused: members that cannot be told apart from others, or have a model in
    common with one.
    """
    for member in joining:
        if not isinstance(member, Member):
            raise MemberError(f"expected trainmux.Member objects, got {type(member).__name__}")
    others = others or {}
    present = [*others.values(), *joining]
    if len({id(member) for member in present}) != len(present):
        raise MemberError("expected every member once, got the same Member object twice")
    staying = set(others) - {leaving}
    given = [member.name for member in joining if member.name is not None]
    for name in given:
        if name in staying or given.count(name) > 1:
            raise MemberError(f"expected a name that no other member has, got {name!r} twice")
    names: list[str] = []
    for position, member in enumerate(joining):
        number, taken = len(staying) + position, staying | {*given, *names}
        while f"member-{number}" in taken:
            number += 1
        names.append(member.name if member.name is not None else f"member-{number}")
    everyone = [*others.items(), *zip(names, joining, strict=True)]
    owners: dict[int, int] = {}
    for position, (name, member) in enumerate(everyone):
        owner = owners.setdefault(id(member.model), position)
        if owner != position:
            raise MemberError(
                f"member {name!r}: expected a model of its own, got that of member {everyone[owner][0]!r}; "
                "copy.deepcopy the model, or give each member a tree by trainmux.share_frozen"
            )
    return names


_UNFIT: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((torch.jit.ScriptModule,), "pass the module that it was made from"),
    ((nn.DataParallel, nn.parallel.DistributedDataParallel), "pass what it wraps, model.module"),
)


@dataclass(frozen=True)
class Newcomer:
    """A member that was found fit to join, and where.

    ``tensors`` has values of its parameters and buffers. ``steps`` has the updates done, one number per
    parameter group. ``states`` maps (parameter, state name) to a tensor, or to the number that fills a state
    torch has not made yet. ``wider`` has the shapes of parameters that the trace has padded with zeros.
    """

    member: Member
    name: str
    key: GroupKey
    trace: Trace
    example: FlatBatch
    watch: MemberWatch
    steps: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    states: Mapping[tuple[str, str], Tensor | float]
    wider: Mapping[str, Shape]

    def among(self, owners: Owners) -> Newcomer:
        """Copy it, with the memory that it shares with other ``owners``; refuses what may not be shared."""
        tensors, changing = self.watch.own, changing_names(self.trace.graph)
        owners.check(self.name, tensors, changing)
        return replace(self, key=replace(self.key, base=owners.base(self.name, tensors, changing)))

    def staged(self, config: FleetConfig) -> Newcomer:
        """Copy it, with its values in pinned memory, from which a GPU fetches them by itself."""
        if config.device.type != "cuda":
            return self

        def pinned(value: Tensor) -> Tensor:
            if value.device.type != "cpu":
                return value
            place = torch.empty(value.shape, dtype=config.held_dtype(value.dtype), pin_memory=True)
            return place.copy_(value.detach())

        constant = self.tensors.keys() - changing_names(self.trace.graph)  # most likely not to be loaded
        return replace(
            self,
            tensors={
                name: value if name in constant else pinned(value) for name, value in self.tensors.items()
            },
            states={
                key: pinned(value) if isinstance(value, Tensor) else value
                for key, value in self.states.items()
            },
        )


def describe_newcomer(
    member: Member,
    name: str,
    loss: LossFunction,
    feed: BatchFeed,
    traces: TraceCache,
    sums: Checksums,
    wider: Mapping[str, Shape],
) -> Newcomer:
    """Check and trace a member by itself (see `Newcomer.among`); typed errors say what is wrong with it.

    Where that is exact, its parameters are padded with zeros to ``wider`` shapes.
    """
    _refuse_unfit_parts(member.model, name)
    devices = {str(tensor.device) for tensor in named_tensors(member).values()}
    if len(devices) > 1:
        raise MemberError(
            f"member {name!r}: expected all parameters and buffers on one device, got "
            f"{sorted(devices)}; move the model with .to(device)"
        )
    if "meta" in devices:
        raise MemberError(
            f"member {name!r}: expected a model with values, got one on the meta device; use to_empty() "
            "and initialise it"
        )
    structure = describe(member.optimizer, list(member.model.parameters()), member=name)
    example = feed.example_for(member)
    reach, trace = Reach(member.model, loss), None
    if wider and keeps_zeros(member.optimizer):
        with suppress(TrainmuxError):
            trace = traces.joint(name, member.model, loss, example, wider, reach)
    wider = wider if trace is not None else {}
    trace = trace or traces.joint(name, member.model, loss, example, reach=reach)
    _refuse_shared_memory(name, reach, trace)
    key = GroupKey(trace.key, structure, member.example_batch is not None)
    steps, states = _optimizer_state(member, name, structure, trace.graph)
    watch = MemberWatch(member, name, loss, structure, reach, sums)
    return Newcomer(member, name, key, trace, example, watch, steps, watch.own, states, wider)


def _optimizer_state(
    member: Member, name: str, structure: OptimizerStructure, traced: TracedGraph
) -> tuple[tuple[int, ...], dict[tuple[str, str], Tensor | float]]:
    """Read the state of every parameter that gets a gradient; ``OptimizerError`` if it cannot be used."""
    names, tensors = zip(*member.model.named_parameters(), strict=True)
    learning = {output.name for output in traced.outputs if output.kind is OutputKind.GRADIENT}
    used = {position for position, parameter in enumerate(names) if parameter in learning}
    steps = read_steps(member.optimizer, structure, tensors, used, member=name)
    states: dict[tuple[str, str], Tensor | float] = {}
    for index, group in enumerate(structure.groups):
        for position in used.intersection(group.params):
            values, _ = read_state(member.optimizer, index, group, tensors[position])
            states |= {(names[position], state): value for state, value in values.items()}
    return steps, states


def _refuse_shared_memory(name: str, reach: Reach, trace: Trace) -> None:
    """Refuse tensors that change and share bytes with another: each would have a copy of its own."""
    names, changing = list(reach.named), {output.name for output in trace.graph.outputs}
    for first, second in reach.memory.shared():
        one, other = names[first], names[second]
        if not changing.isdisjoint((one, other)):
            raise MemberError(
                f"member {name!r}: expected parameters and buffers in memory of their own, got {one} and "
                f"{other} in the same bytes; tie the parameter itself (a.weight = b.weight), or make the "
                "view where it is used"
            )


def _refuse_unfit_parts(model: nn.Module, name: str) -> None:
    """Refuse modules that run code of their own instead of Python's, and tensors that cannot be stacked."""
    for path, module in model.named_modules():
        where = f"member {name!r}, {path or 'the model'}"
        for classes, remedy in _UNFIT:
            if isinstance(module, classes):
                raise MemberError(
                    f"{where}: expected a module in plain Python, got {type(module).__name__}; {remedy}"
                )
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if nn.parameter.is_lazy(tensor):
                raise MemberError(
                    f"{where}: expected initialised parameters, got {key!r} without a shape "
                    f"({type(module).__name__}); run one batch through the model first"
                )
            if tensor is not None and (tensor.layout is not torch.strided or tensor.is_nested):
                raise MemberError(
                    f"{where}: expected dense parameters and buffers, got {key!r} with layout "
                    f"{tensor.layout}; convert it with .to_dense()"
                )


@contextmanager
def kept_edits(member: Member, edits: Edits) -> Iterator[None]:
    """Put edited values back afterwards, when the fleet has written its own over them."""
    tensors, state = named_tensors(member), member.optimizer.state
    values = {name: tensors[name].detach().clone() for name in edits.tensors}
    states = {
        name: copy.copy(state[tensors[name]]) if tensors[name] in state else None for name in edits.states
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)
        for name, entry in states.items():
            if entry is None:
                state.pop(tensors[name], None)
            else:
                state[tensors[name]] = entry


def carry_over(old: Group, old_row: int, new: Group, new_row: int, edits: Edits) -> None:
    """Copy what was trained, and not edited, from a member's old row to the one it was just loaded into.

    Its own objects have it too, but perhaps in another precision, and without the gradients of an update that
    is not complete.
    """
    before, after, base = old.state, new.state, dict(new.key.base)
    was, now = old.slot(old_row), new.slot(new_row)

    def copy_row(name: str, target: Tensor, source: Tensor) -> None:
        now.cut(name, target[new_row]).copy_(was.cut(name, source[old_row]))

    with torch.no_grad():
        for name, rows in before.tensors.items():
            if name in edits.tensors:
                continue
            if name in after.tensors:
                copy_row(name, after.tensors[name], rows)
            elif name in after.shared and name not in base:
                after.shared[name].copy_(rows[old_row])
        for key, states in after.states.items():
            if key in before.states and key[0] not in edits.states:
                copy_row(key[0], states, before.states[key])
        for name, total in after.totals.items():
            if name in before.totals:
                copy_row(name, total, before.totals[name])
        after.alive[new_row].copy_(before.alive[old_row])
        after.seeds[new_row].copy_(before.seeds[old_row])
        after.updates[new_row].copy_(before.updates[old_row])
    # Its optimizer was read as that of a newcomer, who has had no updates in the fleet.
    now.base_steps = tuple(steps - int(before.updates[old_row]) for steps in now.base_steps)
    now.num_updates = was.num_updates
    now.active, now.waits, now.reason = was.active, was.waits, was.reason
    now.origin = was.origin
    new.forget_fed()
