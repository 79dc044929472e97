"""The workloads that can be measured, by name: the full-size ones, and ``small:NAME`` for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import FULL_SIZE, SMALL
from benchmarks.workloads.registry import BATCH_SIZE

SMALL_PREFIX = "small:"
NO_DROPOUT = "_no_dropout"
_SCALE = 1024
"""From one model to the next parameters are smaller by about one part of so many."""


@dataclass(frozen=True)
class Case:
    """One workload to train.

    ``build(seed)`` makes the model on the CPU in fp32; ``batch(seed, batch_size)`` a batch of CPU tensors;
    ``loss(model, batch)`` a scalar, whatever metrics the workload's own loss may add to it. The first of
    ``batch_sizes`` is the usual one; ``is_resizable`` says whether others than these can be made.
    """

    name: str
    batch_sizes: tuple[int, ...]
    is_resizable: bool
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int, int], Any]

    def models(self, count: int, first: int = 0) -> list[nn.Module]:
        """Models from number ``first`` on: one is built, the others are it with other scales of parameters.

        They learn differently. To draw all weights anew takes 8 s for each GPT-2, longer than to measure it.
        """
        built = self.build(0)
        return [_scaled(built, number) for number in range(first, first + count)]


def case_names() -> list[str]:
    """Every name that ``find_case`` knows."""
    return [*FULL_SIZE, *(f"{SMALL_PREFIX}{name}" for name in SMALL)]


def default_names() -> list[str]:
    """What is measured when no workload is named: the full-size ones, without their variants."""
    return [name for name in FULL_SIZE if not name.endswith(NO_DROPOUT)]


def find_case(name: str) -> Case:
    """The workload of that name; ``KeyError`` where there is none."""
    if name.startswith(SMALL_PREFIX):
        small = SMALL[name.removeprefix(SMALL_PREFIX)]
        return Case(
            name=name,
            batch_sizes=(BATCH_SIZE,),
            is_resizable=False,
            build=small.build,
            loss=_scalar(small.loss),
            batch=lambda seed, batch_size: small.batch(seed, torch.float32),
        )
    sized = FULL_SIZE[name]
    return Case(
        name=name,
        batch_sizes=tuple(sized.batch_sizes),
        is_resizable=True,
        build=sized.build,
        loss=_scalar(sized.loss),
        batch=sized.batch,
    )


def _scaled(built: nn.Module, number: int) -> nn.Module:
    model = copy.deepcopy(built)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(1 + number / _SCALE)
    return model


def _scalar(loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Tensor]:
    def scalar(model: nn.Module, batch: Any) -> Tensor:
        result = loss(model, batch)
        value: Tensor = result[0] if isinstance(result, tuple) else result
        return value

    return scalar
