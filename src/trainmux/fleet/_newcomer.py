"""A member that wants to join: everything that can be refused about it, before anything changes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from trainmux.errors import ConfigError, MemberError
from trainmux.fleet._batches import BatchFeed
from trainmux.fleet._group import GroupKey
from trainmux.fleet._member import Member
from trainmux.fleet._signature import model_signature
from trainmux.fleet._snapshot import OptimizerSnapshot, snapshot_optimizer
from trainmux.fleet._traces import Trace, TraceCache
from trainmux.optim import describe
from trainmux.tracing import FlatBatch, LossFunction, unique_buffers, unique_parameters


@dataclass(frozen=True)
class Newcomer:
    """A member that was found fit to join, and where."""

    member: Member
    name: str
    optimizer: OptimizerSnapshot
    key: GroupKey
    trace: Trace
    example: FlatBatch
    signature: Hashable


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
    key = GroupKey(trace.key, structure, member.example_batch is not None)
    snapshot = snapshot_optimizer(member, name, structure, trace.graph)
    return Newcomer(member, name, snapshot, key, trace, example, model_signature(member.model))
