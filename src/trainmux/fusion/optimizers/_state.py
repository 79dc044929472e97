"""Optimizer state, from torch's ``optimizer.state`` and back, one parameter at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import OptimizerError
from trainmux.fusion.optimizers._describe import GroupStructure, OptimizerStructure, rule_of
from trainmux.fusion.optimizers._rule import Settings
from trainmux.fusion.optimizers._traced import StateEntry, TracedUpdate


def state_entries(group: GroupStructure, param: Tensor) -> tuple[StateEntry, ...]:
    """The state tensors of a parameter, as torch spells and orders them, without its count of steps."""
    rule = rule_of(group)
    if isinstance(rule, TracedUpdate):
        return tuple(entry for entry in rule.of(param).entries if entry.kind in ("tensor", "number"))
    return tuple(StateEntry(name, "tensor", tuple(param.shape)) for name in rule.state_names)


def read_state(
    optimizer: torch.optim.Optimizer, group_index: int, group: GroupStructure, param: Tensor
) -> tuple[dict[str, Tensor | float], int]:
    """State tensors of ``param`` by name, and the number of steps that were taken.

    The tensors are torch's own, no copies; one that does not exist yet is given as the tensor or number that
    torch would start from. SGD keeps no count, so its steps are 1 where there is a momentum buffer and 0
    elsewhere. Refuses a state tensor whose shape is not the one that ``group`` has.
    """
    rule = rule_of(group)
    stored: Mapping[str, Any] = optimizer.state.get(param, {})
    if isinstance(rule, TracedUpdate):
        initial = {} if stored else rule.initial(optimizer.param_groups[group_index], param)
        count = next((stored.get(e.name) for e in rule.of(param).entries if e.kind == "count"), None)
        steps = int(bool(stored)) if count is None else int(count)
    else:
        start = 0.0 if rule.initial_setting is None else float(optimizer.defaults[rule.initial_setting])
        initial = dict.fromkeys(rule.state_names, start)
        steps = int(stored.get("step", 0))
    state: dict[str, Tensor | float] = {}
    for entry in state_entries(group, param):
        value = stored.get(entry.name)
        state[entry.name] = initial.get(entry.name, 0.0) if value is None else value
        if isinstance(value, Tensor):
            _check_shape(entry.name, value, entry.shape)
    if not isinstance(rule, TracedUpdate) and not rule.counts_steps:
        steps = int(any(isinstance(value, Tensor) for value in state.values()))
    return state, steps


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
                done = read_state(optimizer, number, group, params[index])[1]
                by_count.setdefault(done, []).append(index)
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

    ``group`` is what it was trained by, and ``state`` has a tensor for each of its ``state_entries``. The
    state becomes fresh tensors; those shaped like the parameter have its dtype, device and memory format.
    Filling them is left to the caller: (fresh tensor, its value) pairs are returned, so that many can be
    copied at once. With no steps taken, the state is what torch has before the first step: nothing, or what
    the constructor makes.
    Refuses a shape that is not the expected one.
    """
    rule, settings = rule_of(group), optimizer.param_groups[group_index]
    if isinstance(rule, TracedUpdate):
        entries, starts_empty = rule.of(param).entries, not rule.of(param).starts_filled
    else:
        entries, starts_empty = state_entries(group, param), rule.initial_setting is None
        if entries and rule.counts_steps:
            entries = (StateEntry("step", "count"), *entries)
    if not entries:
        return []
    if steps == 0 and starts_empty:
        optimizer.state.pop(param, None)
        return []
    fresh: dict[str, Any] = {}
    for entry in entries:
        match entry.kind:
            case "constant":
                fresh[entry.name] = entry.example
            case "number":
                fresh[entry.name] = float(state[entry.name])
            case "count":
                fresh[entry.name] = _count(entry, settings, param, steps)
            case _:
                _check_shape(entry.name, state[entry.name], entry.shape)
                fresh[entry.name] = _empty(entry, param)
    optimizer.state[param] = fresh
    return [(fresh[e.name], state[e.name].detach()) for e in entries if e.kind == "tensor"]


def _empty(entry: StateEntry, param: Tensor) -> Tensor:
    if entry.shape == param.shape:
        return torch.empty_like(param.detach(), dtype=entry.dtype, memory_format=torch.preserve_format)
    device = "cpu" if entry.on_host else param.device
    return torch.empty(entry.shape, dtype=entry.dtype or param.dtype, device=device)


def _count(entry: StateEntry, settings: Settings, param: Tensor, steps: int) -> Tensor | float:
    """A count of steps as torch keeps it, or Python, or the optimizer's own ``step``."""
    if entry.example is not None:
        return float(steps) if isinstance(entry.example, float) else int(steps)
    fused = bool(settings.get("fused"))
    double = torch.get_default_dtype() == torch.float64 and not fused
    dtype = entry.dtype or (torch.float64 if double else torch.float32)
    # Torch keeps the count on the host unless a kernel on the device has to read it.
    device = param.device if fused or settings.get("capturable") else torch.device("cpu")
    return torch.tensor(float(steps), dtype=dtype, device=device)


def _check_shape(name: str, value: Tensor, shape: Sequence[int]) -> None:
    if tuple(value.shape) != tuple(shape):
        raise OptimizerError(
            f"expected optimizer state {name!r} to have the shape {tuple(shape)}, got {tuple(value.shape)}. "
            "Load the state that belongs to this model."
        )
