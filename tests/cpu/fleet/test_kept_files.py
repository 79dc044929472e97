"""Lowered steps and plans on disk: found by all that decides them, never taken where damaged or stale."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import BATCHES, EXAMPLE, TOY, coded, dropout_member, mse, sgd, short_fleet
from short_workloads import SHORT
from tests.record_files import edit
from torch import Tensor

import trainmux as tm
from trainmux.fleet import _program_store
from trainmux.lowering import KernelCache

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is compiled; ``steps``, ``plans`` and ``profiles`` lie here."""
    monkeypatch.setattr(KernelCache, "compile_batches", lambda self, batches: None)
    monkeypatch.setattr(_program_store, "cache_folder", lambda: tmp_path / "steps")
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    monkeypatch.setenv("TRAINMUX_PLAN_DIR", str(tmp_path / "plans"))
    return tmp_path


fleet_of = functools.partial(short_fleet, lowering="inductor")


# ---- steps ---------------------------------------------------------------------------------------------


def steps_in(folder: Path) -> dict[str, int]:
    """Stored steps, and which file each is: one that is written again is another."""
    return {path.name: path.stat().st_ino for path in (folder / "steps").rglob("*.step")}


def batches_of(name: str) -> list[Any]:
    return [SHORT[name].batch(step, torch.float32) for step in range(3)]


def losses(fleet: tm.Fleet, batches: Sequence[Any] | None = None) -> Tensor:
    return torch.stack([fleet.step(batch) for batch in batches or batches_of("mlp")])


def normed_fleet() -> tm.Fleet:
    """With running statistics and dropout."""
    return tm.Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE, lowering="inductor")


STORED: dict[str, tuple[Callable[[], tm.Fleet], list[Any]]] = {
    "normed": (normed_fleet, BATCHES[:3]),
    **{
        name: (functools.partial(fleet_of, name), batches_of(name))
        for name in ("cnn_with_dropout", "transformer_with_dropout")
    },
}


@pytest.mark.parametrize(
    "name", ["normed", *(pytest.param(name, marks=pytest.mark.extensive) for name in list(STORED)[1:])]
)
def test_a_stored_step_computes_the_same(name: str, folder: Path) -> None:
    make, batches = STORED[name]
    first = make()
    expected, kept = losses(first, batches), steps_in(folder)
    second = make()
    assert torch.equal(losses(second, batches), expected)
    assert steps_in(folder) == kept != {}
    assert second.explain() == first.explain()


def test_everything_that_decides_a_step_is_part_of_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet_of()
    others: list[dict[str, Any]] = [
        {"num_members": 3},
        {"precision": "bf16"},
        {"deterministic": True},
        {"width": 1},
    ]
    for number, options in enumerate(others, 2):
        fleet_of(**options)
        assert len(steps_in(folder)) == number
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("99.0"))
    fleet_of()
    assert len(steps_in(folder)) == 2 + len(others)


def test_constants_are_part_of_the_name(folder: Path) -> None:
    def loss_with(scale: float) -> float:
        model = coded(lambda model, x: model.layer(x) * torch.tensor([model.scale, 1.0]), scale=scale)
        return float(tm.Fleet([sgd(model)], mse, EXAMPLE, lowering="inductor").step(EXAMPLE))

    assert loss_with(1.0) != loss_with(5.0)
    assert len(steps_in(folder)) == 2


def test_a_damaged_step_is_replaced_and_a_disk_that_cannot_be_written_is_no_obstacle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(fleet_of())
    (path,) = (folder / "steps").rglob("*.step")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no pickle"):
        path.write_bytes(damaged)
        assert torch.equal(losses(fleet_of()), expected)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing half written is left
        assert len(path.read_bytes()) == len(whole)
    (folder / "file").touch()
    monkeypatch.setattr(_program_store, "cache_folder", lambda: folder / "file")
    assert torch.equal(losses(fleet_of()), expected)


ANOTHER_START = """
import torch
import trainmux as tm
from trainmux.lowering import KernelCache

KernelCache.compile_batches = lambda self, batches: None
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
loss = lambda model, x: model(x).square().mean()
tm.Fleet([tm.Member(model, optimizer)], loss, torch.ones(4, 3), lowering="inductor")
"""


def test_another_process_finds_the_step(folder: Path) -> None:
    """Sets have another order in each process: hashes of strings are seeded."""
    exec(ANOTHER_START, {})
    kept = steps_in(folder)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONHASHSEED": seed, "TORCHINDUCTOR_CACHE_DIR": str(folder / "steps")}
    subprocess.run([sys.executable, "-c", ANOTHER_START], env={**os.environ, **environment}, check=True)
    assert steps_in(folder) == kept != {}


# ---- plans ---------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"budget": "1GiB", "policy": "none", "device": TOY, "num_budgets": 2}


def planned(fleet: tm.Fleet, **asked: Any) -> tuple[tm.Plan, bool]:
    """A plan, and whether it is one that was kept."""
    told: list[str] = []
    plan = fleet.plan(**{**ASKED, **asked}, progress=lambda progress: told.append(progress.current))
    return plan, told == ["a plan that was kept"]


@pytest.mark.usefixtures("built_once")
def test_what_was_planned_once_is_not_planned_again(folder: Path) -> None:
    """By the same fleet or one like it, and for whatever was asked."""
    fleet = short_fleet()
    first, was_kept = planned(fleet)
    assert not was_kept
    again, was_kept = planned(short_fleet())
    assert was_kept
    assert (again.record, again.profiles, again.curve) == (first.record, first.profiles, first.curve)
    others: list[dict[str, Any]] = [
        {"budget": "900MiB"},
        {"policy": "swap_only"},
        {"num_members": 3},
        {"num_budgets": 3},
        {"max_partitions": 3},
        {"device": replace(TOY, link=2e10)},
    ]
    for number, other in enumerate(others, 2):
        assert not planned(fleet, **other)[1], other
        assert len(list((folder / "plans").iterdir())) == number
    fleets: list[dict[str, Any]] = [{"num_members": 1}, {"precision": "fp64"}, {"deterministic": True}]
    for options in fleets:
        assert not planned(short_fleet(**options))[1], options


@pytest.mark.usefixtures("built_once")
def test_a_plan_that_is_damaged_or_stale_is_not_taken_and_is_replaced(folder: Path) -> None:
    fleet = short_fleet()
    first, _ = planned(fleet)
    (path,) = (folder / "plans").iterdir()
    text = path.read_text()
    edit(path, ["profiles", "rows", 0, 0], "another fingerprint")  # with a checksum that fits
    for damaged in (path.read_text(), text[: len(text) // 2]):
        path.write_text(damaged)
        again, was_kept = planned(fleet)
        assert not was_kept
        assert again.curve == first.curve
        assert [entry.read_text() for entry in (folder / "plans").iterdir()] == [text]
    assert not planned(fleet, device=None)[1]
    assert planned(fleet, device=None)[1]
    shutil.rmtree(folder / "profiles")  # what was measured is gone
    assert not planned(fleet, device=None)[1]


@pytest.mark.usefixtures("built_once")
def test_the_oldest_plans_go_and_a_folder_that_cannot_be_written_only_costs_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = short_fleet()
    planned(fleet)
    (path,) = (folder / "plans").iterdir()
    for number in range(70):
        shutil.copyfile(path, path.with_name(f"{number}{''.join(path.suffixes)}"))
        os.utime(path.with_name(f"{number}{''.join(path.suffixes)}"), (1e9 + number, 1e9 + number))
    os.utime(path, (1e9, 1e9))
    assert planned(fleet)[1], "expected it to be used now"
    assert not planned(fleet, budget="900MiB")[1]
    assert len(list((folder / "plans").iterdir())) < 70
    assert path.exists()
    (folder / "file").touch()
    monkeypatch.setenv("TRAINMUX_PLAN_DIR", str(folder / "file"))
    for _ in range(2):
        assert not planned(fleet)[1]
