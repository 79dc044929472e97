"""The contract of an update rule, and the small records that rules are made of.

A rule rewrites one optimizer's update as operations on stacked tensors of shape ``[k, *shape]``, where all
that differs between members comes in as scalars of shape ``[k]``. Every scalar has a *neutral* value. A row
that is fed neutral scalars and a gradient of +0.0 must keep its parameter and its state bit for bit, because
this is how a member is frozen while its neighbours train on. Three facts of IEEE arithmetic carry that:

* ``x * 1.0 == x`` and ``x + -0.0 == x`` hold for every finite x and both signs of zero, whereas
  ``-0.0 + 0.0`` is ``+0.0``. So what a frozen row adds must be -0.0: factors that are neutral at zero are
  neutral at **-0.0**, and meet an operand that is +0.0.
* ``0.0 + (-0.0)`` is ``+0.0``: a sum that starts from +0.0 forgets the sign of whatever else is zero in it.
  This turns a product with arbitrary state into the +0.0 that the first fact asks for.
* ``lerp(x, y, -0.0)`` is x when y is zero, also for x = -0.0, because there ``y - x`` is +0.0.

A frozen row whose gradient is -0.0 instead of +0.0 keeps all its values, but entries that are -0.0 may turn
into +0.0. ``torch.where`` and ``masked_fill`` yield the +0.0 that is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainmux.optim._settings import Number, Numbers, Setting, Settings

ScalarAt = Callable[[str], Tensor]
"""Looks up a per-member scalar by name, shaped so that it broadcasts over a stacked parameter."""


@dataclass(frozen=True)
class ScalarSpec:
    """A per-member scalar of an update, and the value that makes the update a no-op."""

    name: str
    neutral: float


class Rule(ABC):
    """One update rule with its flags decided. Implementations are frozen dataclasses over the flags."""

    settings: ClassVar[tuple[Setting, ...]]
    """The numbers that ``formula`` reads, beside ``maximize``."""

    counts_steps: ClassVar[bool] = True
    """Whether torch keeps a ``step`` beside the state tensors."""

    has_state_before_first_step: ClassVar[bool] = False
    """Whether torch creates the state together with the optimizer."""

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, as torch spells and orders them, without ``step``."""

    @property
    @abstractmethod
    def scalars(self) -> tuple[ScalarSpec, ...]:
        """The scalars that ``update`` may look up, in the order in which ``formula`` returns them."""

    @abstractmethod
    def formula(self, numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        """Scalars of the update number ``steps_done + 1``.

        ``numbers`` has ``settings`` by label, and ``sign``. Where the update is undefined, floats raise as
        Python does, and arrays as ``numpy.errstate`` has it.
        """

    def values(self, settings: Settings, steps_done: int) -> tuple[float, ...]:
        """``formula`` for one torch param group."""
        numbers: dict[str, Any] = {setting.label: float(setting.read(settings)) for setting in self.settings}
        numbers["sign"] = -1.0 if settings["maximize"] else 1.0
        return self.formula(numbers, steps_done)

    @abstractmethod
    def update(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], at: ScalarAt, idle: frozenset[str]
    ) -> None:
        """Updates ``param`` and ``state`` in place and leaves ``grad`` as it is.

        ``idle`` names settings that have no effect for any member; what only they need may be skipped.
        """

    def initial_value(self, name: str, defaults: Settings) -> float:
        """What state tensor ``name`` is filled with before the first step."""
        return 0.0


@dataclass(frozen=True)
class Family:
    """A supported torch class and how to read it.

    Classes with the same ``kind`` share their rules. ``read_flags`` takes a torch param group and
    ``make_rule`` takes the flags that came out of it.
    """

    torch_class: type[torch.optim.Optimizer]
    kind: str
    settings: tuple[Setting, ...]
    read_flags: Callable[[Settings], dict[str, bool]]
    make_rule: Callable[..., Rule]
