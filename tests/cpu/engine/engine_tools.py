"""A small fleet by hand: stacked storage, one fused step program, and the numbers it is fed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainmux.engine import ReferenceEngine, StepProgram, UpdateSettings, build_step
from trainmux.fusion import fuse
from trainmux.fusion import optimizers as optim
from trainmux.ir import InputKind, OutputKind
from trainmux.runtime import stacked_strides, stacked_zeros
from trainmux.tracing import TraceSettings, flatten_batch, trace_joint, unique_buffers, unique_parameters

CPU = torch.device("cpu")
Batch = dict[str, Tensor]


class TinyNet(nn.Module):
    """Batch norm for buffers, dropout for draws, a frozen and an unused parameter."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5, bias=False)  # batch norm would take a bias out again
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(5, 2)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x))))) * self.frozen


def tiny_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"])
    return (out - batch["y"]).square().mean(), {"largest": out.amax()}


def tiny_batch(seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(6, 3, generator=generator, dtype=dtype),
        "y": torch.randn(6, 2, generator=generator, dtype=dtype),
    }


@dataclass
class HandFleet:
    """Members stacked by hand: what a group does, without the rest of the package."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    program: StepProgram
    tensors: dict[tuple[InputKind, str], Tensor]
    states: list[Tensor]
    accumulators: list[Tensor]
    limits: Tensor
    active: Tensor
    alive: Tensor
    updates: Tensor
    counter: int = 0
    engine: ReferenceEngine = field(default_factory=ReferenceEngine)

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """One step of every member on its own batch; returns what the program returns."""
        settings = self.program.settings
        leaves = {
            leaf.path: torch.stack([flatten_batch(batch).tensors[i] for batch in batches])
            for i, leaf in enumerate(flatten_batch(batches[0]).spec.leaves)
        }
        width = len(self.models)
        fed: list[Tensor] = []
        for item in self.program.inputs:
            if item.kind is InputKind.BATCH:
                fed.append(leaves[item.name])
            elif item.kind is InputKind.SEED:
                fed.append(torch.arange(width))
            elif item.kind is InputKind.COUNTER:
                fed.append(torch.full((width,), self.counter))
            elif item.kind is InputKind.TANGENT:
                fed.append(torch.tensor(1.0, dtype=getattr(torch, item.dtype.removeprefix("torch."))))
            else:
                fed.append(self.tensors[item.kind, item.name])
        columns = [
            [
                value
                for group, torch_group in zip(settings.structure.groups, optimizer.param_groups, strict=True)
                for value in optim.scalar_values(group, torch_group, int(self.updates[i]))
            ]
            for i, optimizer in enumerate(self.optimizers)
        ]
        scalars = torch.tensor(columns, dtype=torch.float64).t().contiguous()
        neutral = torch.tensor(settings.neutral_scalars(), dtype=torch.float64).unsqueeze(1)
        tail = [scalars, neutral, self.limits, self.active, self.alive, self.updates]
        self.counter += 1
        return self.engine.run(self.program, [*fed, *self.states, *self.accumulators, *tail])

    def held(self) -> dict[str, Tensor]:
        """Everything that a step may change, stacked, by name."""
        named = {f"{kind.value} {name}": tensor for (kind, name), tensor in self.tensors.items()}
        keys = self.program.settings.state_keys()
        named |= {f"state {key}": state for key, state in zip(keys, self.states, strict=True)}
        return named


def build_fleet(
    models: Sequence[nn.Module],
    make_optimizer: Callable[[int, list[nn.Parameter]], torch.optim.Optimizer],
    batch: Any,
    loss: Callable[[Any, Any], Any] = tiny_loss,
    *,
    program: StepProgram | None = None,
    **options: bool,
) -> HandFleet:
    """Copies of ``models`` under optimizers of their own; ``options`` are those of ``UpdateSettings``."""
    models = [copy.deepcopy(model) for model in models]
    optimizers = [make_optimizer(i, list(model.parameters())) for i, model in enumerate(models)]
    width = len(models)
    tensors: dict[tuple[InputKind, str], Tensor] = {}
    for kind, find in ((InputKind.PARAMETER, unique_parameters), (InputKind.BUFFER, unique_buffers)):
        for column in zip(*[find(model) for model in models], strict=True):
            like = column[0].tensor
            stacked = stacked_zeros(width, like.shape, like.dtype, CPU)
            stacked.copy_(torch.stack([named.tensor.detach() for named in column]))
            tensors[kind, column[0].name] = stacked
    if program is None:
        program = _build_program(models[0], optimizers[0], width, batch, loss, options)
    settings = program.settings
    like_parameter = {name: tensors[InputKind.PARAMETER, name] for name in settings.parameters}
    accumulators = [torch.zeros_like(tensor) for tensor in like_parameter.values()]
    return HandFleet(
        models=models,
        optimizers=optimizers,
        program=program,
        tensors=tensors,
        states=[torch.zeros_like(like_parameter[name]) for name, _ in settings.state_keys()],
        accumulators=accumulators if settings.accumulates else [],
        limits=torch.full((2, width), torch.inf, dtype=torch.float64),
        active=torch.ones(width, dtype=torch.bool),
        alive=torch.ones(width, dtype=torch.bool),
        updates=torch.zeros(width, dtype=torch.int64),
    )


def _build_program(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    width: int,
    batch: Any,
    loss: Callable[[Any, Any], Any],
    options: dict[str, bool],
) -> StepProgram:
    traced = trace_joint(model, loss, flatten_batch(batch), TraceSettings(CPU, None, None))
    names = [named.name for named in unique_parameters(model)]
    structure = optim.describe(optimizer, list(model.parameters()), member="0")
    owner = {
        names[position]: index for index, group in enumerate(structure.groups) for position in group.params
    }
    learning = tuple(output.name for output in traced.outputs if output.kind is OutputKind.GRADIENT)
    switches = {"clips_norm": False, "clips_value": False, "accumulates": False, "applies": True}
    settings = UpdateSettings(
        structure=structure,
        idle=tuple(frozenset() for _ in structure.groups),
        parameters=learning,
        group_of=tuple(owner.get(name) for name in learning),
        **(switches | options),
    )
    strides = {
        position: stacked_strides(item.shape, getattr(torch, item.dtype.removeprefix("torch.")), CPU)
        for position, item in enumerate(traced.inputs)
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    }
    batched = [item.kind is not InputKind.TANGENT for item in traced.inputs]
    return build_step(fuse(traced, width, batched, strides=strides), settings)
