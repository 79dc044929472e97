"""A member that wants to join: everything that can be refused about it, before anything changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainmux.errors import ConfigError, MemberError
from trainmux.fleet._feed import BatchFeed
from trainmux.fleet._group import GroupKey
from trainmux.fleet._member import Member
from trainmux.fleet._snapshot import OptimizerSnapshot, snapshot_optimizer
from trainmux.fleet._traces import Trace, TraceCache
from trainmux.fleet._watch import MemberWatch
from trainmux.optim import describe
from trainmux.tracing import FlatBatch, LossFunction, Reach, unique_buffers, unique_parameters

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
