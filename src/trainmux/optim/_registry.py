"""The supported torch optimizers, as data, and the two look-ups into them."""

from __future__ import annotations

import functools

import torch

from trainmux.errors import OptimizerError
from trainmux.optim._adadelta import ADADELTA
from trainmux.optim._adagrad import ADAGRAD
from trainmux.optim._adam import ADAM, ADAMW
from trainmux.optim._base import Family, Rule
from trainmux.optim._rmsprop import RMSPROP
from trainmux.optim._settings import Settings
from trainmux.optim._sgd import SGD

FAMILIES: tuple[Family, ...] = (SGD, ADAM, ADAMW, RMSPROP, ADAGRAD, ADADELTA)

_BY_CLASS = {family.torch_class: family for family in FAMILIES}
_BY_KIND = {family.kind: family for family in FAMILIES}

SUPPORTED_OPTIMIZERS: tuple[str, ...] = tuple(f"torch.optim.{f.torch_class.__name__}" for f in FAMILIES)
"""Names of the torch classes that can be fused."""


def family_of(optimizer: torch.optim.Optimizer, *, where: str = "") -> Family:
    """The family of an optimizer. Refuses every other class, also subclasses of the supported ones.

    ``where`` begins the error message. A subclass may change the update in ways that cannot be seen here.
    """
    family = _BY_CLASS.get(type(optimizer))
    if family is None:
        got = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise OptimizerError(
            f"{where}expected one of {', '.join(SUPPORTED_OPTIMIZERS)} (the class itself, no subclass), "
            f"got {got}. Use a supported optimizer for this member, or train it outside the fleet."
        )
    return family


def flags_of(family: Family, settings: Settings) -> tuple[tuple[str, bool], ...]:
    """The structural switches of one torch param group, sorted by name."""
    return tuple(sorted(family.read_flags(settings).items()))


@functools.cache
def rule_for(kind: str, flags: tuple[tuple[str, bool], ...]) -> Rule:
    """The update rule of a param group. Refuses a kind that is not registered."""
    family = _BY_KIND.get(kind)
    if family is None:
        raise OptimizerError(
            f"expected the kind of a param group to be one of {', '.join(sorted(_BY_KIND))}, got {kind!r}. "
            "Take group structures from describe()."
        )
    return family.make_rule(**dict(flags))
