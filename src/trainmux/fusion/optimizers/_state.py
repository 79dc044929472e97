"""Optimizer state, from torch's ``optimizer.state`` and back, one parameter at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import OptimizerError
from trainmux.fusion.optimizers._describe import (
    GroupStructure,
    OptimizerStructure,
    family_of,
    flags_of,
    rule_for,
)
from trainmux.fusion.optimizers._rule import Settings


def state_names(group: GroupStructure) -> tuple[str, ...]:
    """Names of the state tensors of a group, as torch spells and orders them, without ``step``."""
    return rule_for(group.kind, group.flags).state_names


def read_state(
    optimizer: torch.optim.Optimizer, group_index: int, param: Tensor
) -> tuple[dict[str, Tensor | float], int]:
    """State tensors of ``param`` by name, and the number of steps that were taken.

    The tensors are torch's own, no copies; one that does not exist yet is given as the number that torch
    would fill it with. SGD keeps no count, so its steps are 1 where there is a momentum buffer and 0
    elsewhere. Refuses a state tensor whose shape is not the parameter's.
    """
    family = family_of(optimizer)
    rule = rule_for(family.kind, flags_of(family, optimizer.param_groups[group_index]))
    stored: Mapping[str, Any] = optimizer.state.get(param, {})
    state: dict[str, Tensor | float] = {}
    for name in rule.state_names:
        value = stored.get(name)
        if value is None:
            initial = rule.initial_setting
            state[name] = 0.0 if initial is None else float(optimizer.defaults[initial])
        else:
            _check_shape(name, value, param)
            state[name] = value
    if rule.counts_steps:
        return state, int(stored.get("step", 0))
    return state, int(any(isinstance(value, Tensor) for value in state.values()))


def read_steps(
    optimizer: torch.optim.Optimizer,
    structure: OptimizerStructure,
    params: Sequence[Tensor],
    used: Collection[int],
    *,
    member: str | None = None,
) -> tuple[int, ...]:
    """Steps already taken, one number per param group; 0 for a group in which no parameter is used.

    ``params`` is the list that was given to ``describe`` and ``used`` has the indices of those that receive
    gradients: torch keeps no state for the others. Refuses a group whose used parameters differ in their
    count, since a group has one bias correction and one schedule for all of them.
    """
    wanted = frozenset(used)
    steps = []
    for number, group in enumerate(structure.groups):
        by_count: dict[int, list[int]] = {}
        for index in group.params:
            if index in wanted:
                by_count.setdefault(read_state(optimizer, number, params[index])[1], []).append(index)
        if len(by_count) > 1:
            found = ", ".join(f"{count} for parameters {who}" for count, who in sorted(by_count.items()))
            where = "" if member is None else f"Member {member!r}: "
            raise OptimizerError(
                f"{where}expected all parameters of param group {number} to have taken the same number of "
                f"steps, got {found}. Put parameters with another history into a param group of their own."
            )
        steps.append(next(iter(by_count), 0))
    return tuple(steps)


def write_state(
    optimizer: torch.optim.Optimizer,
    group_index: int,
    group: GroupStructure,
    param: Tensor,
    state: Mapping[str, Tensor],
    steps: int,
) -> list[tuple[Tensor, Tensor]]:
    """Replace the state of ``param`` so that plain torch continues after ``steps`` steps.

    ``group`` is what it was trained by, and ``state`` has a tensor of the parameter's shape for every name of
    its ``state_names``. The state becomes fresh tensors with the parameter's dtype, device and memory format;
    filling them is left to the caller: (fresh tensor, its value) pairs are returned, so that many can be
    copied at once. With no steps taken, the state is what torch has before the first step: nothing, and for
    Adagrad its accumulator.
    Refuses a shape that is not the parameter's.
    """
    rule, settings = rule_for(group.kind, group.flags), optimizer.param_groups[group_index]
    if not rule.state_names:
        return []
    if steps == 0 and rule.initial_setting is None:
        optimizer.state.pop(param, None)
        return []
    fresh: dict[str, Tensor] = {}
    if rule.counts_steps:
        fresh["step"] = _step_tensor(settings, param, steps)
    for name in rule.state_names:
        _check_shape(name, state[name], param)
        fresh[name] = torch.empty_like(param.detach(), memory_format=torch.preserve_format)
    optimizer.state[param] = fresh
    return [(fresh[name], state[name].detach()) for name in rule.state_names]


def _step_tensor(settings: Settings, param: Tensor, steps: int) -> Tensor:
    fused = bool(settings.get("fused"))
    double = torch.get_default_dtype() == torch.float64 and not fused
    # Torch keeps the count on the host unless a kernel on the device has to read it.
    device = param.device if fused or settings.get("capturable") else torch.device("cpu")
    return torch.tensor(float(steps), dtype=torch.float64 if double else torch.float32, device=device)


def _check_shape(name: str, value: Tensor, param: Tensor) -> None:
    if value.shape != param.shape:
        raise OptimizerError(
            f"expected optimizer state {name!r} to have the parameter's shape {tuple(param.shape)}, got "
            f"{tuple(value.shape)}. Load the state that belongs to this model."
        )
