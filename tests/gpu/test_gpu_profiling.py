"""Profiling on the GPU: steps that do not fit, the link under load, the cost of waiting for copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.workloads import SMALL

import trainmux as tm
from trainmux.profiling import _measured, probe_link
from trainmux.profiling._clocks import enqueue_replays, replays
from trainmux.profiling._link import probe_link_under_load
from trainmux.profiling._pass import Pass
from trainmux.runtime import capturing, warm_matrix_libraries

pytestmark = pytest.mark.alone

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    monkeypatch.setenv("TRAINMUX_PLAN_DIR", str(tmp_path / "plans"))


def fleet_of(name: str) -> tm.Fleet:
    workload = SMALL[name]
    models = [workload.build(number).train() for number in range(2)]
    members = [
        tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-3), name=f"m{number}", seed=number)
        for number, model in enumerate(models)
    ]
    return tm.Fleet(members, workload.loss, workload.batch(0, torch.float32), device=DEVICE, lowering="aten")


@pytest.mark.parametrize("name", ["transformer_with_dropout", "cnn_with_dropout"])
def test_a_step_that_does_not_fit_is_measured_with_feature_maps_away(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is away is what the step would else hold, and members train on as if nothing had been."""
    most_away, most_made = 0, 0
    release = Pass.release

    def counted(run: Pass, rank: int) -> None:
        nonlocal most_away, most_made
        release(run, rank)
        away = sum(host.nbytes for host in run._host.values())
        created = {number for step in run._graph.steps for number in step.creates}
        there = sum(memory.nbytes for number, memory in run._memory.items() if number in created)
        most_away, most_made = max(most_away, away), max(most_made, away + there)

    monkeypatch.setattr(Pass, "release", counted)
    monkeypatch.setattr(_measured, "fits", lambda graph, device: False)
    fleet, other = fleet_of(name), fleet_of(name)
    plan = fleet.plan(None, "none")
    fleet.use(None)
    assert {profile.source for profile in plan.profiles} == {"measured"}
    assert all(node.seconds > 0 for profile in plan.profiles for node in profile.nodes)
    assert 0.2 * most_made < most_away <= most_made
    for number in range(2):
        batch = SMALL[name].batch(number, torch.float32)
        torch.testing.assert_close(fleet.step(batch), other.step(batch))


def test_the_link_is_measured_under_load() -> None:
    """One load for each measurement; rates are at most those of an idle device, and no fraction of them.
    Copies do not make kernels take twice as long."""
    device = torch.device(DEVICE)
    tall = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    result = torch.empty_like(tall)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        warm_matrix_libraries(device)
        with capturing(graph, stream):
            for _ in range(20):
                torch.mm(tall, tall, out=result)
        count = max(1, int(0.1 / replays(graph, 3)))
        replays(graph, 5 * count)  # until the device's clock is what it is under load
        taken = replays(graph, count)
        num_loads = 0

        def load() -> None:
            nonlocal num_loads
            num_loads += 1
            enqueue_replays(graph, count)

        idle = probe_link(device)
        loaded = probe_link_under_load(load, count * taken, idle, device)
    for name in ("out", "into", "out_duplex", "into_duplex"):
        assert 0.1 * getattr(idle, name) < getattr(loaded.link, name) <= getattr(idle, name)
    assert loaded.link.handover_seconds == idle.handover_seconds
    assert 1.0 <= loaded.slowdown < 2.0
    assert num_loads == 9


@pytest.mark.parametrize("name", ["transformer_with_dropout", "cnn_with_dropout"])
def test_the_cost_of_waiting_for_copies_is_measured(name: str) -> None:
    """Small kernels pay for it: some microseconds, and less than a step."""
    profiles = fleet_of(name).plan(None, "none").profiles
    for profile in profiles:
        step = sum(node.seconds for node in profile.nodes)
        assert 0.2e-6 < profile.meeting_seconds < min(1e-4, step)
