"""Programs of small workloads, to be read as kernels and run node by node; nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from torch import Tensor

import trainmux as tm
from trainmux.engine import StepProgram
from trainmux.lowering import KernelCache
from trainmux.profiling import KernelGraph, read_kernels
from trainmux.tracing import flatten_batch


def leave_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCache, "compile", lambda self, kernels: None)


def program_of(
    name: str, lowering: str, num_members: int = 2, **options: Any
) -> tuple[StepProgram, list[Tensor]]:
    """A fleet's program and its arguments; no member is active, so that a step changes nothing."""
    workload = SMALL[name]
    models = [workload.build(number).train() for number in range(num_members)]
    members = [
        tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-3), name=str(number), seed=number)
        for number, model in enumerate(models)
    ]
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
    assert isinstance(module, torch.fx.GraphModule)
    return read_kernels(module, program.byte_classes())
