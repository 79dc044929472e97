"""AdamW over stacked parameters ``[members, ...]`` with one learning rate per member, in two spellings.

Both do what ``torch.optim.AdamW`` does to each member alone. torch's own multi-tensor operators are fast in
eager mode; single operators are what ``torch.compile`` fuses best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._base import BETAS, EPS, WEIGHT_DECAY


@dataclass(frozen=True)
class AdamWState:
    """Parameters with their moments, and per parameter what each member multiplies with.

    ``keeps`` is what decay leaves of a weight, ``descents`` the learning rate with a minus; both have the
    shape ``[members, 1, ...]``. The count of steps is on the device, for CUDA graphs.
    """

    parameters: list[Tensor]
    averages: list[Tensor]
    square_averages: list[Tensor]
    keeps: list[Tensor]
    descents: list[Tensor]
    num_steps: Tensor


def make_state(parameters: Sequence[Tensor], learning_rates: Sequence[float]) -> AdamWState:
    """Fresh moments for parameters whose first axis is the members'."""
    device = parameters[0].device
    rates = torch.tensor(learning_rates, device=device)
    shaped = [rates.view(-1, *[1] * (parameter.dim() - 1)) for parameter in parameters]
    return AdamWState(
        parameters=list(parameters),
        averages=[torch.zeros_like(parameter) for parameter in parameters],
        square_averages=[torch.zeros_like(parameter) for parameter in parameters],
        keeps=[1 - rate * WEIGHT_DECAY for rate in shaped],
        descents=[-rate for rate in shaped],
        num_steps=torch.zeros((), device=device),
    )


def update_foreach(state: AdamWState, gradients: list[Tensor]) -> None:
    """One step, all parameters together in each operator."""
    beta1, beta2 = BETAS
    correction1, correction2_sqrt = _corrections(state)
    torch._foreach_lerp_(state.averages, gradients, 1 - beta1)
    torch._foreach_mul_(state.square_averages, beta2)
    torch._foreach_addcmul_(state.square_averages, gradients, gradients, value=1 - beta2)
    denominators = torch._foreach_sqrt(state.square_averages)
    torch._foreach_div_(denominators, correction2_sqrt)
    torch._foreach_add_(denominators, EPS)
    torch._foreach_mul_(denominators, correction1)
    changes = torch._foreach_div(state.averages, denominators)
    # A factor per member broadcasts: torch goes through these two lists tensor by tensor.
    torch._foreach_mul_(state.parameters, state.keeps)
    torch._foreach_addcmul_(state.parameters, changes, state.descents)


def update_plain(state: AdamWState, gradients: Sequence[Tensor]) -> None:
    """One step, parameter after parameter."""
    beta1, beta2 = BETAS
    correction1, correction2_sqrt = _corrections(state)
    for parameter, gradient, average, square_average, keep, descent in zip(
        state.parameters,
        gradients,
        state.averages,
        state.square_averages,
        state.keeps,
        state.descents,
        strict=True,
    ):
        average.lerp_(gradient, 1 - beta1)
        square_average.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square_average.sqrt() / correction2_sqrt + EPS) * correction1
        parameter.mul_(keep).addcmul_(average / denominator, descent)


def _corrections(state: AdamWState) -> tuple[Tensor, Tensor]:
    state.num_steps.add_(1)
    beta1, beta2 = BETAS
    return 1 - beta1**state.num_steps, (1 - beta2**state.num_steps).sqrt()
