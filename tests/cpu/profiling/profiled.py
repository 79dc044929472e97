"""Programs of small workloads, to be read as kernels and run node by node; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.workloads import SMALL
from short_workloads import member_of
from torch import Tensor, fx

import trainmux as tm
from trainmux.engine import StepProgram
from trainmux.ir import ByteClass, Phase
from trainmux.profiling import KernelGraph, read_kernels
from trainmux.tracing import flatten_batch, make_fx, static_fake_mode


def program_of(
    name: str, lowering: str, num_members: int = 2, **options: Any
) -> tuple[StepProgram, list[Tensor]]:
    """A fleet's program and its arguments; no member is active, so that a step changes nothing."""
    workload = SMALL[name]
    members = [member_of(workload, number, lr=1e-3) for number in range(num_members)]
    batch = workload.batch(0, torch.float32)
    fleet = tm.Fleet(members, workload.loss, batch, lowering=lowering, **options)
    (group,) = fleet._groups
    program = next(iter(group.programs.kept.values()))
    assert isinstance(program, StepProgram)
    arguments = group.arguments(program, flatten_batch(batch).tensors)
    active = program.position_of("active")
    arguments[active] = torch.zeros_like(arguments[active])
    return program, arguments


def kernels_of(program: StepProgram) -> KernelGraph:
    module = program.module
    assert isinstance(module, fx.GraphModule)
    return read_kernels(module, program.byte_classes())


def traced(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    """A function of tensors like these, as a forward pass."""
    with static_fake_mode() as mode, mode:
        module: fx.GraphModule = make_fx(function)(*map(mode.from_tensor, given))
    for node in module.graph.nodes:
        node.meta.setdefault("phase", Phase.FORWARD)
    return module


def traced_kernels(function: Callable[..., Any], *given: Tensor) -> KernelGraph:
    return read_kernels(traced(function, *given), [ByteClass.BATCH] * len(given))
