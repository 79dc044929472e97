"""Graphs that are only read are never written as Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from torch import fx

import trainmux as tm


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of nodes of the graphs that were written."""
    found: list[int] = []
    write = fx.Graph.python_code

    def and_count(self: fx.Graph, *args: Any, **options: Any) -> Any:
        found.append(len(self.nodes))
        return write(self, *args, **options)

    monkeypatch.setattr(fx.Graph, "python_code", and_count)
    return found


def test_a_step_is_written_once_when_it_runs(written: list[int]) -> None:
    workload = SMALL["transformer"]
    members = []
    for number in range(2):
        model = workload.build(number).train()
        members.append(tm.Member(model, torch.optim.AdamW(model.parameters()), name=str(number)))
    batch = workload.batch(0, torch.float32)
    fleet = tm.Fleet(members, workload.loss, batch, lowering="aten", device="cpu")
    (group,) = fleet._groups
    program = next(iter(group.programs.kept.values()))
    assert isinstance(program.module, fx.GraphModule)
    size = len(program.module.graph.nodes)
    assert not [number for number in written if number > size // 2]
    fleet.step(batch)
    fleet.step(batch)
    assert len([number for number in written if number > size // 2]) == 1
