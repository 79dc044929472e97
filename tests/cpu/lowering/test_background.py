"""Training begins on ATen and goes on with the lowered step when it is there."""

from __future__ import annotations

import threading
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lowering_tools import UncompiledCache, assert_close, fleet_of, leave_uncompiled, members_of, trained
from short_workloads import SHORT

import trainmux.fleet._config as config_module
from trainmux.errors import TrainmuxWarning
from trainmux.fleet import _build
from trainmux.fleet._background import Upgrade

MLP = SHORT["mlp"]

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[Upgrade[Any]]:
    """Compile without patience, with a compiler; gives the upgrades that were taken, in order."""
    leave_uncompiled(monkeypatch)
    monkeypatch.setattr(config_module, "compiler_missing", lambda _: "")
    monkeypatch.setattr(_build, "_CPU_PATIENCE_S", 0.0)
    taken: list[Upgrade[Any]] = []
    original = Upgrade.result

    def result(self: Upgrade[Any]) -> Any:
        taken.append(self)
        return original(self)

    monkeypatch.setattr(Upgrade, "result", result)
    return taken


def batch(step: int) -> Any:
    return MLP.batch(step, torch.float32)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is compiled until it is set."""
    go = threading.Event()
    monkeypatch.setattr(UncompiledCache, "fill", lambda self, kernels: lambda: go.wait(30))
    return go


def test_programs_are_switched_once_and_training_goes_on(
    finished: list[Upgrade[Any]], gate: threading.Event
) -> None:
    fleet = fleet_of(MLP, "auto")
    losses = [fleet.step(batch(0)), fleet.step(batch(1))]
    assert not finished
    gate.set()
    fleet.wait_until_compiled()
    losses += [fleet.step(batch(step)) for step in (2, 3, 4)]
    assert len(finished) == 1
    expected = trained(MLP, fleet_of(MLP, "aten"), 5)
    for step, loss in enumerate(losses):
        torch.testing.assert_close(loss, expected[f"loss {step}"], rtol=1e-5, atol=1e-5)
    got = trained(MLP, fleet, 0)
    assert_close(got, {name: expected[name] for name in got}, 1e-5)


def test_a_pending_upgrade_of_another_width_is_dropped(
    finished: list[Upgrade[Any]], gate: threading.Event
) -> None:
    fleet = fleet_of(MLP, "auto")
    fleet.step(batch(0))
    newcomer = members_of(MLP, 3)[2]
    fleet.add(newcomer)  # three slots: programs for two are of no use any more
    gate.set()
    for step in range(1, 4):
        fleet.wait_until_compiled()
        assert fleet.step(batch(step)).shape == (3,)
    assert len(finished) == 1, "expected the upgrade of the new width alone"


@pytest.mark.parametrize("has_code", [True, False])
def test_a_step_whose_code_is_on_disk_is_there_at_once(
    has_code: bool, finished: list[Upgrade[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fleet_of(MLP, "auto")
    first.step(batch(0))
    first.wait_until_compiled()
    expected = first.step(batch(1))
    assert len(finished) == 1
    monkeypatch.setattr(UncompiledCache, "has", lambda self, kernels: has_code)
    second = fleet_of(MLP, "auto")
    assert ("until its kernels are compiled" in second.explain()) != has_code
    second.step(batch(0))
    torch.testing.assert_close(second.step(batch(1)), expected, rtol=1e-5, atol=1e-5)
    second.wait_until_compiled()
    second.step(batch(2))
    assert len(finished) == (1 if has_code else 2)


@pytest.mark.parametrize("where", ["prepare", "finish"])
def test_what_cannot_be_compiled_goes_on_through_aten(
    where: str, finished: list[Upgrade[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=RuntimeError("not today"))
    monkeypatch.setattr(UncompiledCache, "fill" if where == "prepare" else "compile_batches", refuse)
    fleet = fleet_of(MLP, "auto")
    fleet.wait_until_compiled()
    with pytest.warns(TrainmuxWarning, match="goes on through ATen.*not today") as told:
        fleet.step(batch(0))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = trained(MLP, fleet, 2)
    assert torch.isfinite(got["loss 1"]).all()
    assert len(finished) == 1


def test_a_step_that_runs_once_is_never_compiled(
    finished: list[Upgrade[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Upgrade[Any]] = []
    monkeypatch.setattr(Upgrade, "start", lambda self: begun.append(self))
    fleet = fleet_of(MLP, "auto")
    fleet.step(tuple(leaf[:2] for leaf in batch(0)))
    assert begun == finished == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_who_trains_for_a_moment_on_a_cpu_and_deterministic_runs_stay_on_aten(
    deterministic: bool, finished: list[Upgrade[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_build, "_CPU_PATIENCE_S", 0.0 if deterministic else 3600.0)
    monkeypatch.setattr(UncompiledCache, "fill", Mock(side_effect=AssertionError))
    fleet = fleet_of(MLP, "auto", deterministic=deterministic)
    for step in range(3):
        fleet.step(batch(step))
        if deterministic:
            fleet.wait_until_compiled()
    assert not finished
    assert ("until its kernels are compiled" in fleet.explain()) is not deterministic
