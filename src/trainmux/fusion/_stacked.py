"""Values with a model axis, and the registry of rules over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

if TYPE_CHECKING:
    from trainmux.fusion.strategies import Family, OperatorTimes


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
    """What a rule may need beside its arguments.

    ``value`` is the member's own result (fake tensors); ``strategies`` names the chosen way for
    operators that have several, or "measured"; ``times`` then finds the fastest. ``compiles`` says that a
    compiler will make kernels of what lies between library calls.
    """

    width: int
    device: torch.device
    value: Any
    strategies: Mapping[str, str] = field(default_factory=dict)
    times: OperatorTimes | None = None
    compiles: bool = False

    def stack(self, value: Stacked | Tensor) -> Tensor:
        """``[k, *shape]`` of a value, repeating (without copying) one that members share."""
        if isinstance(value, Stacked):
            return value.tensor
        return value.unsqueeze(0).expand(self.width, *value.shape)


Rule = Callable[..., Any]


@dataclass(frozen=True)
class NamedRule:
    """A rule with the words that ``explain`` uses for it; ``family`` has the ways where there are several."""

    how: str
    apply: Rule
    family: Family | None = None

    def fused(self, context: Context, op: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, str]:
        """The result, and how it was fused."""
        if self.family is None:
            return self.apply(context, op, *args, **kwargs), self.how
        choice = self.family.choose(context, op, args, kwargs)
        return choice.way.runs[op](context, op, *args, **kwargs), choice.how


_RULES: dict[OpOverload, NamedRule] = {}


def rule(*ops: OpOverload, how: str) -> Callable[[Rule], Rule]:
    """Register ``fn(context, op, *args, **kwargs)`` as the way to fuse ``ops``.

    Arguments are as in the member's graph, with ``Stacked`` in the place of tensors that differ
    between members; at least one of them is ``Stacked``. Results likewise. A rule may return
    ``NotImplemented`` to leave a case to the general way.
    """

    def register(fn: Rule) -> Rule:
        for op in ops:
            if op in _RULES:
                raise RuntimeError(f"expected one rule for {op}, got a second")
            _RULES[op] = NamedRule(how, fn)
        return fn

    return register


def strategy_rule(family: Family, *ops: OpOverload) -> None:
    """Register a family's ways as the rule of ``ops``."""

    def apply(context: Context, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        return _RULES[op].fused(context, op, *args, **kwargs)[0]

    rule(*ops, how=family.name)(apply)
    for op in ops:
        _RULES[op] = NamedRule(family.name, apply, family)


def find_rule(op: Any) -> NamedRule | None:
    """The registered rule of an operator, if it has one."""
    return _RULES.get(op)


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
    """The way back, as a view."""
    split: Tensor = x.unflatten(1, (width, -1))
    return split.transpose(0, 1)
