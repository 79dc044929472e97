"""From a torch optimizer to its structure, refusing what cannot be trained."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trainmux.errors import OptimizerError
from trainmux.fusion.optimizers._families import FAMILIES
from trainmux.fusion.optimizers._rule import OptimizerFamily, Settings, UpdateRule
from trainmux.fusion.optimizers._traced import TracedUpdate, numeric_settings, traced_update

_BY_CLASS = {family.torch_class: family for family in FAMILIES}
_RULES = {family.kind: family.make_rule for family in FAMILIES}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GroupStructure:
    """One param group of a torch optimizer, stripped of everything that may differ between members.

    ``kind`` names the update rule (AdamW is kind ``"Adam"`` with the flag ``decoupled``), ``flags`` are
    the switches that change which operations run, sorted by name, and ``params`` are indices into the
    member's list of parameters. ``maximize`` is no flag: it is a number, +1 or -1, like the learning rate.
    A class without a rule has its update ``traced``, and its own name as the kind.
    """

    kind: str
    flags: tuple[tuple[str, bool], ...]
    params: tuple[int, ...]
    traced: TracedUpdate | None = None


@dataclass(frozen=True)
class OptimizerStructure:
    """All param groups of one optimizer. Equal for members whose updates can run as one."""

    groups: tuple[GroupStructure, ...]


def family_of(optimizer: torch.optim.Optimizer) -> OptimizerFamily | None:
    """The family of an optimizer; none for other classes, also subclasses of those that have one."""
    return _BY_CLASS.get(type(optimizer))


def flags_of(family: OptimizerFamily, settings: Settings) -> tuple[tuple[str, bool], ...]:
    """The structural switches of one torch param group, sorted by name."""
    return tuple(sorted(family.read_flags(settings).items()))


@functools.cache
def _rule_for(kind: str, flags: tuple[tuple[str, bool], ...]) -> UpdateRule:
    return _RULES[kind](**dict(flags))


def rule_of(group: GroupStructure) -> UpdateRule | TracedUpdate:
    """The update of a param group."""
    return group.traced or _rule_for(group.kind, group.flags)


def describe(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], *, member: str
) -> OptimizerStructure:
    """The structure of ``optimizer``, its parameters named by their position in ``params``.

    ``params`` are all parameters of the member, each once; those that the optimizer does not hold stay
    untouched. Refuses an optimizer whose step cannot be traced, ``differentiable=True``, a hyper-parameter
    out of its range, a parameter that is not in ``params``, that appears twice, or that is not of a real
    floating dtype.
    """
    family = family_of(optimizer)
    check_hyperparameters(optimizer, member=member)
    _refuse_own_code(optimizer, member)
    position = {id(param): index for index, param in enumerate(params)}
    seen: set[int] = set()
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        where = f"Member {member!r}, param group {number}"
        if group.get("differentiable", False):
            raise OptimizerError(
                f"{where}: expected differentiable=False, got True. Build the optimizer without it: the "
                "fused update is not differentiated through."
            )
        indices = []
        for param in group["params"]:
            index = position.get(id(param))
            if index is None:
                raise OptimizerError(
                    f"{where}: expected parameters of the member's own model, got a foreign parameter of "
                    f"shape {tuple(param.shape)}. Build the optimizer over model.parameters() of this member."
                )
            if index in seen:
                raise OptimizerError(
                    f"{where}: expected every parameter once, got parameter {index} a second time. Name it "
                    "in one param group only."
                )
            if param._post_accumulate_grad_hooks:
                raise OptimizerError(
                    f"{where}: expected no post-accumulate-grad hooks, got some on parameter {index}. "
                    f"{_WITHOUT}"
                )
            if param.dtype not in _DTYPES:
                raise OptimizerError(
                    f"{where}: expected parameters of dtype float64, float32, bfloat16 or float16, got "
                    f"{param.dtype} for parameter {index}. Convert the model, or leave this parameter out."
                )
            seen.add(index)
            indices.append(index)
        if family is not None:
            groups.append(GroupStructure(family.kind, flags_of(family, group), tuple(indices)))
        else:
            traced = traced_update(optimizer, number, group["params"], where=where)
            groups.append(GroupStructure(type(optimizer).__name__, (), tuple(indices), traced))
    return OptimizerStructure(tuple(groups))


_WITHOUT = (
    "The fused update runs no code of yours: change gradients by a hook on the parameter (register_hook), or "
    "train this member outside the fleet."
)


def _refuse_own_code(optimizer: torch.optim.Optimizer, member: str) -> None:
    """Refuse hooks around ``step``, and a ``step`` not of the class; schedulers may have wrapped it."""
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    )
    if hooks:
        raise OptimizerError(
            f"Member {member!r}: expected an optimizer without step hooks, got {len(hooks)} (the first is "
            f"{getattr(hooks[0], '__qualname__', hooks[0])!r}). {_WITHOUT}"
        )
    step = inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step))
    is_torch = str(getattr(step, "__module__", "")).startswith("torch.optim.")
    if step is not inspect.unwrap(type(optimizer).step) or (type(optimizer) in _BY_CLASS and not is_torch):
        raise OptimizerError(
            f"Member {member!r}: expected the step method of {type(optimizer).__name__}, got "
            f"{getattr(step, '__qualname__', step)!r} in its place. {_WITHOUT}"
        )


def check_hyperparameters(optimizer: torch.optim.Optimizer, *, member: str) -> None:
    """Refuse hyper-parameters that are NaN, infinite, negative or beyond their upper bound."""
    family = family_of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for setting in numeric_settings(group) if family is None else family.settings:
            got = setting.read(group)
            try:
                allowed = setting.allows(float(got))
            except (TypeError, ValueError, RuntimeError):
                allowed = False
            if not allowed:
                raise OptimizerError(
                    f"Member {member!r}, param group {number}: expected {setting.label} to be "
                    f"{setting.expected}, got {got!r}. Set it before the member is trained."
                )
