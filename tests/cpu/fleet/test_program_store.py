"""A second start takes the lowered step from disk; anything that decides it is part of its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from short_workloads import SHORT
from torch import Tensor, nn

import trainmux as tm
import trainmux.fleet._build as build_module
import trainmux.fleet._program_store as store_module
from trainmux.lowering import KernelCache

pytestmark = pytest.mark.usefixtures("traced_once")

NAMES = ["cnn_with_dropout", pytest.param("transformer_with_dropout", marks=pytest.mark.extensive)]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are lowered, nothing is compiled, and no kernel is remembered from one start to the next."""
    monkeypatch.setattr(KernelCache, "compile", lambda self, kernels: None)
    monkeypatch.setattr(
        build_module, "_kernels", lambda deterministic: KernelCache(deterministic=deterministic)
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was built and what was loaded, in order."""
    seen: list[str] = []
    build, load = build_module.build_step, build_module.load

    def building(*args: Any, **kwargs: Any) -> Any:
        seen.append("built")
        return build(*args, **kwargs)

    def loading(*args: Any) -> Any:
        found = load(*args)
        seen.extend([] if found is None else ["loaded"])
        return found

    monkeypatch.setattr(build_module, "build_step", building)
    monkeypatch.setattr(build_module, "load", loading)
    return seen


def fleet_of(name: str, num_members: int = 2, **options: Any) -> tm.Fleet:
    workload = SHORT[name]
    models = [workload.build(number).train() for number in range(num_members)]
    members = [
        tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-3), name=str(number), seed=number)
        for number, model in enumerate(models)
    ]
    return tm.Fleet(members, workload.loss, workload.batch(0, torch.float32), lowering="inductor", **options)


def losses(name: str, fleet: tm.Fleet) -> Tensor:
    return torch.stack([fleet.step(SHORT[name].batch(step, torch.float32)) for step in range(3)])


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_step_computes_the_same(name: str, counted: list[str]) -> None:
    first = fleet_of(name)
    expected = losses(name, first)
    second = fleet_of(name)
    assert torch.equal(losses(name, second), expected)
    assert counted == ["built", "loaded"]
    assert second.explain() == first.explain()


def test_another_fleet_or_source_is_built_anew(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet_of("mlp")
    others: list[dict[str, Any]] = [
        {"num_members": 3},
        {"precision": "bf16"},
        {"deterministic": True},
        {"width": 1},
    ]
    for options in others:
        fleet_of("mlp", **options)
    monkeypatch.setattr(store_module, "_source_version", lambda: "another")
    fleet_of("mlp")
    assert counted == ["built"] * (2 + len(others))


def test_constants_are_part_of_the_name(counted: list[str]) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x) * torch.tensor([self.scale, 1.0, 1.0])
            return out

    def loss_with(scale: float) -> float:
        torch.manual_seed(0)
        model = Scaled(scale)
        member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 3)
        fleet = tm.Fleet([member], lambda m, b: m(b).sum(), x, lowering="inductor")
        return float(fleet.step(x))

    assert loss_with(1.0) != loss_with(5.0)
    assert counted == ["built", "built"]


def test_a_damaged_file_is_replaced(counted: list[str]) -> None:
    expected = losses("mlp", fleet_of("mlp"))
    (path,) = store_module.cache_folder().rglob("*.step")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"no pickle"):
        path.write_bytes(damaged)
        assert torch.equal(losses("mlp", fleet_of("mlp")), expected)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing half written is left
    fleet_of("mlp")
    assert counted == ["built"] * 4 + ["loaded"]


def test_a_disk_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, counted: list[str], tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(store_module, "cache_folder", lambda: in_the_way)
    losses("mlp", fleet_of("mlp"))
    losses("mlp", fleet_of("mlp"))
    assert counted == ["built", "built"]


def test_a_name_is_the_same_in_every_process() -> None:
    """Sets have another order in each process: hashes of strings are seeded."""
    value = "(frozenset('abcdefgh'), {'b': {1, 2}, 'a': ({'x', 'y'},)}, 1.5)"
    program = f"from trainmux.fleet._program_store import _canonical\nprint(_canonical({value}))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    elsewhere = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(os.environ, PYTHONHASHSEED=seed),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert store_module._canonical(eval(value)) == elsewhere.rstrip("\n")
    assert elsewhere.startswith("[{'a', 'b', 'c'")
