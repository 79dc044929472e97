"""Frozen tensors in memory that several models have in common: one base, many adapters."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainmux.errors import MemberError, named_line
from trainmux.tracing import memory_span

_MARK = "_is_shared_frozen"
"""Attribute of parameters that `share_frozen` has made."""


def share_frozen(module: nn.Module) -> nn.Module:
    """Return a module tree of its own over the memory of ``module``'s parameters, all of them frozen.

    Call it once per member, then add an adapter or a head to each tree: the fleet holds the parameters once,
    and so does a checkpoint. Modules, hooks and attributes are copies. Buffers share memory too, but not
    those of modules that track running statistics, which training changes. ``module`` itself stays as it is;
    it may not be trained beside its trees. Moving a tree (``.to()``) gives it memory of its own.

    Refuses modules that cannot be copied, or whose parameters are not plain ones (``MemberError``).
    """
    if not isinstance(module, nn.Module):
        raise MemberError(f"expected a torch.nn.Module to share, got {type(module).__name__}; pass the base")
    memo: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise MemberError(
                f"expected plain parameters to share, got {name!r}, a {type(parameter).__name__}; initialise "
                "or dequantize the module first"
            )
        memo[id(parameter)] = frozen = nn.Parameter(parameter.detach(), requires_grad=False)
        setattr(frozen, _MARK, True)
    for part in module.modules():
        if not getattr(part, "track_running_stats", False):
            memo |= {id(buffer): buffer.detach() for buffer in part._buffers.values() if buffer is not None}
    return copied(module, memo, "share it")


def copied(module: nn.Module, memo: dict[int, Tensor], purpose: str) -> nn.Module:
    """Copy a module with other tensors, by the ``id`` of each; refuses what cannot be copied."""
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise MemberError(
            f"expected a module that can be copied, got {named_line(error)}; "
            f"remove what cannot be copied before you {purpose}"
        ) from error


def view_key(tensor: Tensor) -> Hashable:
    """Equal for tensors that are one view of one memory; ``None`` where there is no memory."""
    if not has_memory(tensor):
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is dense and has values; others are refused, or have nothing to share."""
    is_odd = tensor.layout is not torch.strided or tensor.is_nested or nn.parameter.is_lazy(tensor)
    return not is_odd and not tensor.is_meta and tensor.numel() > 0


@dataclass(frozen=True)
class _Owned:
    owner: str
    name: str
    tensor: Tensor
    changes: bool


Held = dict[int, list[_Owned]]
"""A member's tensors by the address of their storage."""


def held_by(owner: str, tensors: Mapping[str, Tensor], changing: Collection[str]) -> Held:
    """Find the memory of a member's parameters and buffers; training writes to those in ``changing``."""
    found: Held = {}
    for name, tensor in tensors.items():
        if has_memory(tensor):
            entry = _Owned(owner, name, tensor, name in changing)
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(entry)
    return found


class Owners:
    """Members by the memory that their tensors lie in."""

    def __init__(self) -> None:
        self._all: list[Held] = []

    def add(self, held: Held) -> None:
        """Enter a member."""
        self._all.append(held)

    def check(self, owner: str, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        """Refuse memory in common with another member, if training changes it for either of them."""
        for name, tensor in tensors.items():
            for other in self._others(owner, tensor):
                if (name in changing or other.changes) and _overlap(tensor, other.tensor):
                    what = "parameters" if isinstance(tensor, nn.Parameter) else "buffers"
                    raise MemberError(
                        f"member {owner!r}: expected {what} of its own where training changes them, got "
                        f"{name} in memory of member {other.owner!r} ({other.name}); freeze it by "
                        "requires_grad_(False), or make a copy: tensor.data = tensor.data.clone()"
                    )

    def base(
        self, owner: str, tensors: Mapping[str, Tensor], changing: Collection[str]
    ) -> tuple[tuple[str, Hashable], ...]:
        """Names and views of the constants that a member has in common with others, or by `share_frozen`."""
        found = []
        for name, tensor in tensors.items():
            if name in changing or not has_memory(tensor):
                continue
            key = view_key(tensor)
            if hasattr(tensor, _MARK) or any(
                view_key(other.tensor) == key for other in self._others(owner, tensor)
            ):
                found.append((name, key))
        return tuple(found)

    def _others(self, owner: str, tensor: Tensor) -> Iterator[_Owned]:
        """Tensors of other members in the same storage."""
        if has_memory(tensor):
            storage = tensor.untyped_storage().data_ptr()
            for held in self._all:
                if storage in held:
                    yield from (entry for entry in held[storage] if entry.owner != owner)


def _overlap(one: Tensor, other: Tensor) -> bool:
    (begin, end), (low, high) = memory_span(one), memory_span(other)
    return begin < high and low < end
