"""Values with a model axis, and the registry of rules over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True)
class Stacked:
    """The values of all members at one place of the graph: ``tensor`` is ``[k, *shape]``.

    The model axis is the first one logically; its stride is free, so a rule that works best with the
    axis folded into another one (convolution, batch norm) may hand on a transposed view.
    """

    tensor: Tensor

    @property
    def rank(self) -> int:
        """Number of dimensions of one member's value."""
        return self.tensor.dim() - 1

    @property
    def shape(self) -> torch.Size:
        """Shape of one member's value."""
        return self.tensor.shape[1:]


def is_stacked(value: Any) -> bool:
    return isinstance(value, Stacked)


@dataclass(frozen=True)
class Context:
    """Facts that a rule may need besides its arguments; ``value`` is the member's own result (fake)."""

    width: int
    value: Any

    def stack(self, value: Stacked | Tensor) -> Tensor:
        """``[k, *shape]`` of a value, repeating (without copying) one that members share."""
        if isinstance(value, Stacked):
            return value.tensor
        return value.unsqueeze(0).expand(self.width, *value.shape)

    def alone(self, value: Stacked | Tensor) -> Tensor:
        """The only member's value, at width 1."""
        return value.tensor[0] if isinstance(value, Stacked) else value


Rule = Callable[..., Any]


@dataclass(frozen=True)
class NamedRule:
    """A rule with the words that ``explain`` uses for it; ``how_alone`` is for a width of 1."""

    how: str
    how_alone: str
    apply: Rule


_RULES: dict[OpOverload, NamedRule] = {}


def rule(*ops: OpOverload, how: str, how_alone: str = "") -> Callable[[Rule], Rule]:
    """Register ``fn(context, op, *args, **kwargs)`` as the way to fuse ``ops``.

    Arguments are as in the member's graph, with ``Stacked`` in the place of tensors that differ
    between members; at least one of them is ``Stacked``. Results likewise. A rule may return
    ``NotImplemented`` to leave a case to the general way.
    """

    def register(fn: Rule) -> Rule:
        for op in ops:
            if op in _RULES:
                raise RuntimeError(f"expected one rule for {op}, got a second")
            _RULES[op] = NamedRule(how, how_alone or how, fn)
        return fn

    return register


def find_rule(op: Any) -> NamedRule | None:
    """The registered rule of an operator, if it has one."""
    return _RULES.get(op)


def rank_of(value: Stacked | Tensor) -> int:
    """Number of dimensions of one member's value, stacked or not."""
    return value.rank if isinstance(value, Stacked) else value.dim()


def member_dim(dim: int, rank: int) -> int:
    """A member's dimension (maybe negative) as a dimension of the stacked tensor."""
    return dim % max(rank, 1) + 1


def align(value: Stacked | Tensor, rank: int) -> Tensor:
    """``value`` so that it broadcasts, from the right, with stacked values of member rank ``rank``."""
    if not isinstance(value, Stacked):
        return value
    missing = rank - value.rank
    if missing <= 0:
        return value.tensor
    return value.tensor.reshape(value.tensor.shape[0], *([1] * missing), *value.shape)


def fold_channels(x: Tensor) -> Tensor:
    """``[k, n, c, ...]`` as ``[n, k * c, ...]``; free if the members already lie side by side in channels."""
    return x.transpose(0, 1).flatten(1, 2)


def unfold_channels(x: Tensor, width: int) -> Tensor:
    """Undo ``fold_channels``, as a view."""
    split: Tensor = x.unflatten(1, (width, -1))
    return split.transpose(0, 1)
