"""A member that wants to join: everything that can be refused about it, before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainmux.errors import ConfigError, MemberError
from trainmux.fleet._feed import BatchFeed
from trainmux.fleet._group import GroupKey
from trainmux.fleet._member import Member
from trainmux.fleet._slots import OptimizerSnapshot, snapshot_optimizer
from trainmux.fleet._traces import Trace, TraceCache
from trainmux.fleet._watch import MemberWatch
from trainmux.fusion.optimizers import describe
from trainmux.tracing import FlatBatch, LossFunction, Reach, unique_buffers, unique_parameters


def unique_names(members: Sequence[Member]) -> list[str]:
    """A name for every member, given or made up; refuses members that cannot be told apart."""
    if not members:
        raise MemberError("expected at least one member, got none; pass a list of trainmux.Member")
    for member in members:
        if not isinstance(member, Member):
            raise MemberError(f"expected trainmux.Member objects, got {type(member).__name__}")
    if len({id(member) for member in members}) != len(members):
        raise MemberError("expected every member once, got the same Member object twice")
    given = [member.name for member in members if member.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise MemberError(f"expected unique member names, got {name!r} twice; name them apart")
    names: list[str] = []
    for position, member in enumerate(members):
        taken = {*given, *names}
        names.append(member.name if member.name is not None else made_up_name(position, taken))
    owners: dict[int, tuple[str, Member]] = {}
    for name, member in zip(names, members, strict=True):
        for tensor in (member.model, *member.model.parameters()):
            owner = owners.setdefault(id(tensor), (name, member))
            if owner[1] is not member:
                check_apart(name, member, *owner)
    return names


def name_of_newcomer(member: Member, others: Mapping[str, Member], leaving: str | None = None) -> str:
    """The name of a member that joins ``others``, one of whom may be ``leaving`` for it.

    Refused: one that is among them, or has something in common with one of them.
    """
    if not isinstance(member, Member):
        raise MemberError(f"expected a trainmux.Member, got {type(member).__name__}")
    taken = set(others) - {leaving}
    name = member.name if member.name is not None else made_up_name(len(taken), taken)
    if name in taken:
        raise MemberError(f"expected a name that no other member has, got {name!r} again")
    for owner, other in others.items():
        if other is member:
            raise MemberError(f"member {name!r}: expected a new member, got one that is in the fleet already")
        check_apart(name, member, owner, other)
    return name


def made_up_name(number: int, taken: Collection[str]) -> str:
    """``member-N`` with the first free number from ``number`` on."""
    while f"member-{number}" in taken:
        number += 1
    return f"member-{number}"


def check_apart(name: str, member: Member, other_name: str, other: Member) -> None:
    """Refuse a member that has its model, or a parameter, in common with another."""
    if member.model is other.model:
        raise MemberError(
            f"member {name!r}: expected a model of its own, got the one of member {other_name!r}; "
            "copy.deepcopy the model"
        )
    owned = {id(parameter) for parameter in other.model.parameters()}
    if any(id(parameter) in owned for parameter in member.model.parameters()):
        raise MemberError(
            f"member {name!r}: expected parameters of its own, got some of member {other_name!r}; "
            "copy.deepcopy the model"
        )


def unknown_member(name: object, names: Sequence[str]) -> MemberError:
    """The error for a name that no member has."""
    return MemberError(
        f"expected the name of a member, got {name!r}; it was dropped or never there (members: "
        f"{', '.join(names) or 'none'})"
    )


_UNFIT: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((torch.jit.ScriptModule,), "pass the module that it was made from"),
    ((nn.DataParallel, nn.parallel.DistributedDataParallel), "pass what it wraps, model.module"),
)


@dataclass(frozen=True)
class Newcomer:
    """A member that was found fit to join, and where."""

    member: Member
    name: str
    optimizer: OptimizerSnapshot
    key: GroupKey
    trace: Trace
    example: FlatBatch
    watch: MemberWatch


def loss_of(member: Member, of_fleet: LossFunction | None) -> LossFunction:
    """A member's own loss function, or else its fleet's; refuses what is none."""
    loss = member.loss if member.loss is not None else of_fleet
    if loss is None:
        raise ConfigError(
            f"expected a loss function for member {member.name!r}, got none; give Fleet(loss=...) or "
            "Member(loss=...)"
        )
    if not callable(loss):
        raise ConfigError(f"loss: expected a callable loss(model, batch), got {type(loss).__name__}")
    return loss


def describe_newcomer(
    member: Member, name: str, position: int, loss: LossFunction, feed: BatchFeed, traces: TraceCache
) -> Newcomer:
    """Check and trace a member; typed errors say what is wrong with it."""
    _refuse_unfit_parts(member.model, name)
    parameters = unique_parameters(member.model)
    devices = {str(item.tensor.device) for item in (*parameters, *unique_buffers(member.model))}
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
    structure = describe(member.optimizer, [item.tensor for item in parameters], member=name)
    example = feed.example_for(member, position)
    trace = traces.joint(name, member.model, loss, example)
    reach = Reach(member.model, loss)
    _refuse_shared_memory(name, reach, trace)
    key = GroupKey(trace.key, structure, member.example_batch is not None)
    snapshot = snapshot_optimizer(member, name, structure, trace.graph)
    watch = MemberWatch(member, name, loss, structure, reach)
    return Newcomer(member, name, snapshot, key, trace, example, watch)


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
