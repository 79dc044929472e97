"""The workloads that benchmarks measure, by name: full-size ones, and ``small:NAME`` for a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.workloads import FULL_SIZE, SAMPLE, SMALL
from benchmarks.workloads.registry import BATCH_SIZE

SMALL_PREFIX, SAMPLE_PREFIX = "small:", "sample:"
PAPER = (
    *("bert_base_mlm_no_dropout", "gpt2_no_dropout", "vit_b16"),
    *("dlrm", "resnet101", "mobilenet_v3_large"),
)
"""What is measured unless named otherwise."""
_SCALE = 1024
"""From one member to the next, parameters shrink by one part in so many."""


@dataclass(frozen=True)
class Case:
    """One workload: a model on the CPU in fp32, batches of CPU tensors by seed, a scalar loss."""

    name: str
    batch_size: int
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    note: str = ""

    def models(self, count: int, first: int = 0) -> list[nn.Module]:
        """Build one model and scale its parameters for the others: drawing all weights takes seconds each."""
        built = self.build(0).train()
        return [scaled(built, number) for number in range(first, first + count)]


def find_case(name: str, batch_size: int | None = None) -> Case:
    """Give the workload of that name, with its usual batch size unless another is named."""
    if name.removeprefix(SMALL_PREFIX) in SMALL and name.startswith(SMALL_PREFIX):
        small = SMALL[name.removeprefix(SMALL_PREFIX)]
        return Case(
            name, BATCH_SIZE, small.build, _scalar(small.loss), lambda seed: small.batch(seed, torch.float32)
        )
    full_size = FULL_SIZE | {SAMPLE_PREFIX + each: workload for each, workload in SAMPLE.items()}
    if name not in full_size:
        known = [*full_size, *(SMALL_PREFIX + each for each in SMALL)]
        raise typer.BadParameter(f"expected one of {', '.join(known)}; got {name}")
    sized = full_size[name]
    size = batch_size or sized.batch_sizes[0]
    return Case(name, size, sized.build, _scalar(sized.loss), lambda seed: sized.batch(seed, size))


def workloads_named(names: str) -> list[str]:
    """A list with commas, in which "sample" is all models that nothing was tuned for."""
    sample = [SAMPLE_PREFIX + name for name in SAMPLE]
    return [each for name in split(names) for each in (sample if name == "sample" else [name])]


def split(names: str) -> list[str]:
    """A list with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Replace each tensor of a batch, which may be made of tuples, lists, dicts and dataclasses."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = {field.name: map_tensors(function, getattr(tree, field.name)) for field in fields(tree)}
        return replace(tree, **changed)
    return tree


def to_device(batch: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def scaled(built: nn.Module, number: int) -> nn.Module:
    """Copy a model with its parameters shrunk a little, ``number`` times as much as from one to the next."""
    model = copy.deepcopy(built)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(1 + number / _SCALE)
    return model


def _scalar(loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Tensor]:
    """Leave out the metrics that a loss may add."""

    def scalar(model: nn.Module, batch: Any) -> Tensor:
        result = loss(model, batch)
        value: Tensor = result[0] if isinstance(result, tuple) else result
        return value

    return scalar
