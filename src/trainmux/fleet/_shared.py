"""Frozen tensors in memory that several models have in common: one base, many adapters."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainmux.errors import MemberError, first_line
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
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise MemberError(
            f"expected a module that can be copied, got {type(error).__name__}: {first_line(error)}; "
            "remove what cannot be copied before you share it"
        ) from error


def view_key(tensor: Tensor) -> Hashable:
    """Equal for tensors that are one view of one memory; ``None`` where there is no memory."""
    is_odd = nn.parameter.is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided
    if is_odd or tensor.device.type == "meta" or not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class _Owned:
    owner: str
    name: str
    begin: int
    end: int
    changes: bool


class Owners:
    """Members by the memory that their tensors lie in."""

    def __init__(self) -> None:
        self._by_storage: dict[tuple[torch.device, int], list[_Owned]] = {}
        self._by_view: dict[Hashable, set[str]] = {}

    def add(self, owner: str, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        """Enter a member's parameters and buffers; training writes to those in ``changing``."""
        for name, tensor in tensors.items():
            key = view_key(tensor)
            if key is not None:
                entry = _Owned(owner, name, *memory_span(tensor), name in changing)
                self._by_storage.setdefault(_storage_of(tensor), []).append(entry)
                self._by_view.setdefault(key, set()).add(owner)

    def check(self, owner: str, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        """Refuse memory in common with another member, if training changes it for either of them."""
        for name, tensor in tensors.items():
            for other in self._others(owner, tensor):
                if name in changing or other.changes:
                    what = "parameters" if isinstance(tensor, nn.Parameter) else "buffers"
                    raise MemberError(
                        f"member {owner!r}: expected {what} of its own where training changes them, got "
                        f"{name} in memory of member {other.owner!r} ({other.name}); freeze it by "
                        "requires_grad_(False), or make a copy: tensor.data = tensor.data.clone()"
                    )

    def _others(self, owner: str, tensor: Tensor) -> Iterator[_Owned]:
        if view_key(tensor) is None:
            return
        begin, end = memory_span(tensor)
        for entry in self._by_storage.get(_storage_of(tensor), ()):
            if entry.owner != owner and entry.begin < end and begin < entry.end:
                yield entry

    def base(
        self, tensors: Mapping[str, Tensor], changing: Collection[str]
    ) -> tuple[tuple[str, Hashable], ...]:
        """Names and views of the constants that a member has in common with others, or by `share_frozen`."""
        return tuple(
            (name, view_key(tensor))
            for name, tensor in tensors.items()
            if name not in changing
            and view_key(tensor) is not None
            and (len(self._by_view[view_key(tensor)]) > 1 or hasattr(tensor, _MARK))
        )


def _storage_of(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
