"""Plans on disk: found by everything that decides them, never taken where damaged or stale."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL

import trainmux as tm
from trainmux.errors import PlanError
from trainmux.fleet import _plan_cache, _planning, _program_store
from trainmux.fleet._plan_cache import PlanCache, plan_key
from trainmux.lowering import KernelCache
from trainmux.planning import Planner
from trainmux.profiling import ProfileCache

pytestmark = pytest.mark.usefixtures("built_once")

DEVICE = tm.Device("toy", 1 << 30, 1 << 32, 8, 1e12, 1e12, 1e11, 1e10, 1e10)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: Path) -> Path:
    monkeypatch.setattr(KernelCache, "compile", lambda self, kernels: None)
    monkeypatch.setattr(_program_store, "cache_folder", lambda: steps)
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    monkeypatch.setenv("TRAINMUX_PLAN_DIR", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each search that was begun."""
    begun: list[Any] = []

    class Counted(Planner):
        def __init__(self, *args: Any, **options: Any) -> None:
            begun.append(options["policy"])
            super().__init__(*args, **options)

    monkeypatch.setattr(_planning, "Planner", Counted)
    return begun


def fleet_of(num_members: int = 2, *, workload_name: str = "mlp", **options: Any) -> tm.Fleet:
    workload = SMALL[workload_name]
    members = []
    for number in range(num_members):
        model = workload.build(number).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
    return tm.Fleet(members, workload.loss, workload.batch(0, torch.float32), **options)


@pytest.fixture(scope="module")
def fleet() -> tm.Fleet:
    """Planning for another device changes nothing of it."""
    return fleet_of()


def test_what_was_planned_once_is_not_planned_again(
    fleet: tm.Fleet, searches: list[Any], folder: Path
) -> None:
    first = fleet.plan("1GiB", "mutwo", device=DEVICE)
    again = fleet_of().plan("1GiB", "mutwo", device=DEVICE)
    assert searches == ["mutwo"]
    assert (again.record, again.profiles, again.curve) == (first.record, first.profiles, first.curve)
    assert len(list(folder.iterdir())) == 1


def test_everything_that_is_asked_for_is_in_the_key(
    fleet: tm.Fleet, searches: list[Any], folder: Path
) -> None:
    usual: dict[str, Any] = {"budget": "1GiB", "policy": "none", "device": DEVICE}
    fleet.plan(**usual)
    others: list[dict[str, Any]] = [
        {"budget": "900MiB"},
        {"policy": "swap_only"},
        {"num_members": 3},
        {"num_budgets": 2},
        {"max_partitions": 3},
        {"device": replace(DEVICE, link=2e10)},
    ]
    for number, other in enumerate(others):
        fleet.plan(**{**usual, **other})
        assert len(searches) == number + 2, other
    assert len(list(folder.iterdir())) == 1 + len(others)


@pytest.mark.parametrize("other", [{"num_members": 1}, {"workload_name": "cnn"}, {"precision": "fp64"}])
def test_everything_that_a_fleet_is_made_of_is_in_the_key(other: dict[str, Any], fleet: tm.Fleet) -> None:
    group, changed = fleet._groups[0], fleet_of(**other)._groups[0]
    assert plan_key([group], 1) == plan_key([group], 1)
    assert len({plan_key([group], 1), plan_key([group], 2), plan_key([changed], 1)}) == 3


def test_another_version_of_the_source_plans_again(
    fleet: tm.Fleet, searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.plan("1GiB", "none", device=DEVICE)
    monkeypatch.setattr(_plan_cache, "_source_version", lambda: "another")
    fleet.plan("1GiB", "none", device=DEVICE)
    assert len(searches) == 2


def test_a_plan_that_is_damaged_or_not_proved_is_not_taken_and_is_replaced(
    fleet: tm.Fleet, searches: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fleet.plan("1GiB", "none", device=DEVICE, num_budgets=2)
    (path,) = folder.iterdir()
    text = path.read_text()
    for damaged in (text[: len(text) // 2], text.replace(repr(first.curve[-1].step_seconds), "1e-9")):
        assert damaged != text
        path.write_text(damaged)
        again = fleet.plan("1GiB", "none", device=DEVICE, num_budgets=2)
        assert again.curve == first.curve
        assert [entry.read_text() for entry in folder.iterdir()] == [text]
    assert len(searches) == 3

    def refuse(*args: Any, **options: Any) -> None:
        raise PlanError("expected a proof, got none; plan again")

    monkeypatch.setattr("trainmux.fleet._plan.verify", refuse)
    fleet.plan("1GiB", "none", device=DEVICE, num_budgets=2)
    assert len(searches) == 4


def test_a_plan_over_profiles_that_are_gone_or_kernels_that_changed_is_stale(
    searches: list[Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of()
    plan = fleet.plan("1GiB", "none")
    assert {profile.source for profile in plan.profiles} == {"measured"}
    assert fleet.plan("1GiB", "none").record == plan.record
    assert len(searches) == 1
    (path,) = folder.iterdir()
    key = path.name.split(".")[0]
    assert PlanCache().get(key, ProfileCache()) is not None
    assert PlanCache().get(key, ProfileCache(tmp_path / "no profiles")) is None
    monkeypatch.setattr(_planning.FleetPlanner, "_fingerprint", lambda *args: "other kernels")
    with pytest.raises(PlanError, match="plan again"):
        fleet.use(plan)
    assert not list(folder.iterdir())


def test_the_oldest_plans_go(fleet: tm.Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = fleet.plan("1GiB", "none", device=DEVICE)
    cache, profiles = PlanCache(tmp_path / "few"), ProfileCache(tmp_path / "profiles")
    monkeypatch.setattr(_plan_cache, "MAX_PLANS", 2)
    for age, key in ((30, "a"), (20, "b")):
        cache.put(key, plan)
        (path,) = (tmp_path / "few").glob(f"{key}.*")
        os.utime(path, (1e9 - age, 1e9 - age))
    assert cache.get("a", profiles) is not None  # used now
    cache.put("c", plan)
    assert [cache.get(key, profiles) is not None for key in "abc"] == [True, False, True]


def test_a_folder_that_cannot_be_written_only_costs_time(
    fleet: tm.Fleet, searches: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINMUX_PLAN_DIR", str(tmp_path / "file"))
    for _ in range(2):
        fleet.plan("1GiB", "none", device=DEVICE)
    assert len(searches) == 2
