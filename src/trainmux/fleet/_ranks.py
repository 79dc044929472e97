"""Adapters of several ranks in one group: which members may be padded with zeros to one another's shapes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from trainmux.fleet._member import Member
from trainmux.fleet._shared import has_memory
from trainmux.fleet._slots import named_tensors
from trainmux.tracing import Shape

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)
"""Classes that compute each element of a parameter from the same element of its gradient and state, and keep
one at zero whose gradients are."""


def keeps_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether zeros that pad a parameter stay zeros; without an epsilon they would be divided by zero."""
    return type(optimizer) in _ELEMENTWISE and all(
        float(group.get("eps", 1.0)) > 0 for group in optimizer.param_groups
    )


class Outline:
    """A member's tensors, apart from the sizes of its adapters; those in ``wider`` are padded already.

    Adapters are trainable matrices of a model that has frozen parameters, too.
    """

    def __init__(self, member: Member, wider: Mapping[str, Shape] = MappingProxyType({})) -> None:
        tensors = named_tensors(member)
        adapts = any(isinstance(t, nn.Parameter) and not t.requires_grad for t in tensors.values())
        self.ranks: dict[str, Shape] = {}
        described: list[Any] = [type(member.model), type(member.optimizer)]
        for name, tensor in tensors.items():
            described.append((name, tensor.dtype, tensor.requires_grad))
            if not has_memory(tensor):
                continue
            shape = tuple(tensor.shape)
            if adapts and tensor.requires_grad and len(shape) == 2:
                self.ranks[name] = wider.get(name, shape)
            else:
                described.append(shape)
        described.append(tuple(self.ranks))
        self.key: Hashable = tuple(described)

    def widened(self, *others: Outline) -> dict[str, Shape]:
        """The shapes that this model's adapters need beside ``others``; none where that is no matter of rank.

        Only one axis of each adapter may be another's.
        """
        found = {}
        for name, shape in self.ranks.items():
            shapes = [shape, *(other.ranks[name] for other in others)]
            largest = tuple(map(max, zip(*shapes, strict=True)))
            if sum(len({each[axis] for each in shapes}) > 1 for axis in range(2)) > 1:
                return {}
            if largest != shape:
                found[name] = largest
        return found

    def padded_to(self, other: Outline) -> dict[str, Shape]:
        """The shapes of ``other``'s adapters, where this model is a smaller one of its kind."""
        if not self.ranks or self.key != other.key or other.widened(self):
            return {}
        return self.widened(other)


def widened(outlines: Mapping[str, Outline]) -> dict[str, dict[str, Shape]]:
    """By member: shapes of adapters that are to be padded, so that all that differ in rank are alike."""
    alike: dict[Hashable, list[str]] = {}
    for name, outline in outlines.items():
        alike.setdefault(outline.key, []).append(name)
    return {
        name: outlines[name].widened(*(outlines[other] for other in names))
        for names in alike.values()
        for name in names
    }
