"""The fused update: its per-member scalars on the host, and its operations on stacked tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import OptimizerError
from trainmux.optim._base import ScalarSpec
from trainmux.optim._registry import rule_for
from trainmux.optim._structure import GroupStructure

SETTINGS_THAT_IDLE = ("maximize", "weight_decay", "dampening")
"""Settings whose part of an update can be left out where no member makes use of them."""


def scalar_specs(group: GroupStructure) -> tuple[ScalarSpec, ...]:
    """The per-member scalars of a group's update, with the values that turn the update into a no-op."""
    return rule_for(group.kind, group.flags).scalars


def scalar_values(
    group: GroupStructure, torch_group: Mapping[str, Any], steps_done: int
) -> tuple[float, ...]:
    """One member's scalars for the update number ``steps_done + 1``, in the order of ``scalar_specs``.

    ``torch_group`` is the member's torch param group as it stands now. Computed in double precision.
    Refuses a momentum that was switched on or off since the optimizer was described, and values for which
    the update is undefined, such as a beta of 1.
    """
    try:
        return rule_for(group.kind, group.flags).values(torch_group, steps_done)
    except (ArithmeticError, ValueError, TypeError) as error:
        if isinstance(error, OptimizerError):
            raise
        found = {name: value for name, value in torch_group.items() if name != "params"}
        raise OptimizerError(
            f"expected settings for which the {group.kind} update is defined, got {found} ({error}). Check "
            "what the schedule writes into the param group."
        ) from error


def idle_settings(torch_group: Mapping[str, Any]) -> frozenset[str]:
    """Settings that are without effect in this torch param group and cost a pass over memory otherwise.

    ``apply_update`` may leave out the settings that are idle for all members of a group. Whoever does so
    has to build the update anew once a member starts to use one of them.
    """
    idle = set()
    if not torch_group.get("maximize", False):
        idle.add("maximize")
    for name in ("weight_decay", "dampening"):
        if float(torch_group.get(name, 0.0)) == 0.0:
            idle.add(name)
    return frozenset(idle)


def scalar_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scalars are fed: the parameter's, but float32 for half precision parameters."""
    return torch.float32 if param_dtype in (torch.float16, torch.bfloat16) else param_dtype


def shape_scalars(scalars: Mapping[str, Tensor], ndim: int) -> dict[str, Tensor]:
    """Scalars of shape ``[k]`` as views ``[k, 1, ...]`` that broadcast over a stacked tensor of ``ndim``."""
    return {name: _shaped(scalar, ndim) for name, scalar in scalars.items()}


def apply_update(
    group: GroupStructure,
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Tensor],
    *,
    idle: frozenset[str] = frozenset(),
) -> None:
    """One optimizer step on a stacked parameter: ``param`` and ``state`` change in place, ``grad`` does not.

    ``param``, ``grad`` and each state tensor have shape ``[k, *shape]``, rows may be strided. ``scalars``
    have shape ``[k]`` and the dtype ``scalar_dtype(param.dtype)``; they may come shaped by
    ``shape_scalars`` already, which lets many parameters share the views. ``idle`` is the intersection of
    ``idle_settings`` over the members, or empty. Refuses scalars of another dtype.

    A row with neutral scalars and a gradient of +0.0 keeps its bits, provided that its values are finite.
    """
    ndim = param.ndim
    wanted = scalar_dtype(param.dtype)

    def at(name: str) -> Tensor:
        scalar = scalars[name]
        if scalar.dtype != wanted:
            raise OptimizerError(
                f"expected scalars of {wanted} for a parameter of {param.dtype}, got {scalar.dtype} for "
                f"{name!r}. Feed them in scalar_dtype(param.dtype)."
            )
        return _shaped(scalar, ndim)

    with torch.no_grad():
        rule_for(group.kind, group.flags).update(param, grad, state, at, idle)


def _shaped(scalar: Tensor, ndim: int) -> Tensor:
    return scalar if scalar.ndim == ndim else scalar.view(-1, *(1,) * (ndim - 1))
