"""What follows the backward pass: per-member checks, buffer commits and the optimizer update.

The update runs after all gradients exist (D3 "deferred", "bucketed"): a member's weights and buffers change
only if its loss and all of its gradients are finite, and clipping needs the norm over all of them. A member
that must not change gets neutral scalars and a zero gradient, which leaves its rows bitwise as they were.

An *immediate* update follows each gradient. What it knows by then is the loss and the gradients that came
before: from the first one that is not finite on, nothing of the member changes any more. Buffers wait for the
whole gradient in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainmux.engine._row_gradients import RowGradient, Rows
from trainmux.engine._units import Unit, as_ready, buckets, large_alone
from trainmux.engine._update_settings import TailInputs, UpdateMode, UpdateSettings
from trainmux.engine._updates import Broadcast, Updates, flat, unit_of_graph

Tail = Callable[[TailInputs], tuple[Tensor, Tensor]]


def make_tail(settings: UpdateSettings, fresh: Sequence[bool], ready: Sequence[int]) -> Tail:
    """The tail as a function to trace; it returns the gradient norm and who is finite, ``[k]`` each.

    ``fresh`` says which gradients are in memory that nothing else refers to; ``ready``, only for an immediate
    update, where in the backward pass each parameter can be updated: it goes in that order.
    """

    def immediate(given: TailInputs) -> tuple[Tensor, Tensor]:
        updates = Updates(settings, given)
        parts: dict[int, Tensor] = {}
        commits = torch.isfinite(given.loss) & given.alive & given.active
        for unit in as_ready(given.parameters, ready):
            gradients = {position: _in_full(given, position) for position in unit.positions}
            with unit_of_graph(f"norm {unit.number}"):
                for position, gradient in gradients.items():
                    parts[position] = _row_norm(gradient, len(given.loss))
                    commits = commits & torch.isfinite(parts[position])
                scalars = updates.scalars_of(unit, commits)
            for position, gradient in gradients.items():
                updates.append(position, unit, gradient, scalars, fresh=fresh[position])
        norm = _total(parts, given.loss)
        finite, commits = _commit_buffers(given, norm, Broadcast())
        given.updates.add_(commits)
        return norm, finite

    def deferred(given: TailInputs) -> tuple[Tensor, Tensor]:
        gradients: list[Tensor | Rows] = [
            _in_full(given, position) for position in range(len(given.gradients))
        ]
        if settings.accumulates:
            gradients = [
                total.add_(_dense(gradient))
                for total, gradient in zip(given.accumulators, gradients, strict=True)
            ]
        norm = _norm(gradients, given)
        shaped = Broadcast()
        finite, commits = _commit_buffers(given, norm, shaped)
        if settings.applies:
            given.updates.add_(commits)
            updates = Updates(settings, given)
            scalars = updates.scalars_of_all(commits, norm, shaped)
            for unit in _units(settings, given):
                for position in unit.positions:
                    mine = fresh[position] and not settings.accumulates
                    updates.append(position, unit, gradients[position], scalars, fresh=mine)
            if settings.accumulates:
                for total in given.accumulators:
                    total.zero_()
        return norm, finite

    return immediate if settings.mode is UpdateMode.IMMEDIATE else deferred


def _units(settings: UpdateSettings, given: TailInputs) -> list[Unit]:
    if settings.mode is not UpdateMode.BUCKETED:
        return large_alone(given.parameters)
    kinds = [
        None if isinstance(gradient, RowGradient) else (index, parameter.dtype)
        for gradient, index, parameter in zip(
            given.gradients, settings.group_of, given.parameters, strict=True
        )
    ]
    return buckets(given.parameters, kinds)


def _commit_buffers(given: TailInputs, norm: Tensor, shaped: Broadcast) -> tuple[Tensor, Tensor]:
    """Who is finite, and who is so and trains; buffers of the latter take their new values."""
    finite = torch.isfinite(given.loss) & torch.isfinite(norm)
    given.alive.logical_and_(finite | ~given.active)
    commits = given.alive & given.active
    for old, new in zip(given.buffers, given.new_buffers, strict=True):
        old.copy_(torch.where(shaped(commits, old), new, old))
    return finite, commits


def _in_full(given: TailInputs, position: int) -> Tensor | Rows:
    """A gradient; one of rows with what belongs to the same row added up."""
    gradient = given.gradients[position]
    if not isinstance(gradient, RowGradient):
        return gradient
    with unit_of_graph(f"rows {position}"):
        return Rows.of(gradient, given.parameters[position])


def _dense(gradient: Tensor | Rows) -> Tensor:
    assert isinstance(gradient, Tensor), "steps that accumulate have gradients of whole tensors"
    return gradient


def _norm(gradients: Sequence[Tensor | Rows], given: TailInputs) -> Tensor:
    """Per-member 2-norm over all gradients. One that overflows counts as infinite."""
    parts: dict[int, Tensor] = {}
    for unit in large_alone([_whole(gradient) for gradient in gradients]):
        for position in unit.positions:
            with unit_of_graph(f"norm {unit.number}"):
                parts[position] = _row_norm(gradients[position], len(given.loss))
    return _total(parts, given.loss)


def _whole(gradient: Tensor | Rows) -> Tensor:
    return gradient.once if isinstance(gradient, Rows) else gradient


def _row_norm(gradient: Tensor | Rows, width: int) -> Tensor:
    """Each member's 2-norm of one gradient."""
    whole = _whole(gradient)
    wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(flat(whole)[0].reshape(width, -1), dim=1, dtype=wide)
    return norm


def _total(parts: dict[int, Tensor], loss: Tensor) -> Tensor:
    if not parts:
        return torch.zeros_like(loss, dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([parts[position].to(torch.float64) for position in sorted(parts)]), dim=0
    )
    return norm
