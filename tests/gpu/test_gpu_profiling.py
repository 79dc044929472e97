"""Profiling on the GPU: steps that do not fit, the link under load, the cost of waiting for copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_fleets import batch_of, make_fleet

from trainmux.profiling import _measured, probe_link
from trainmux.profiling._clocks import enqueue_replays, replays
from trainmux.profiling._link import probe_link_under_load
from trainmux.profiling._pass import Pass
from trainmux.runtime import capturing, warm_matrix_libraries

NAME = "transformer_with_dropout"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


def test_a_step_that_does_not_fit_is_measured_with_feature_maps_away(monkeypatch: pytest.MonkeyPatch) -> None:
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
    fleet, other = (make_fleet(NAME, 2, lowering="aten") for _ in range(2))
    plan = fleet.plan(None, "none")
    fleet.use(None)
    assert {profile.source for profile in plan.profiles} == {"measured"}
    assert all(node.seconds > 0 for profile in plan.profiles for node in profile.nodes)
    assert 0.2 * most_made < most_away <= most_made
    for number in range(2):
        batch = batch_of(NAME, number)
        torch.testing.assert_close(fleet.step(batch), other.step(batch))


@pytest.mark.alone
def test_the_link_is_measured_under_load() -> None:
    """One load for each measurement; rates are at most those of an idle device, and no fraction of them.
    Copies do not make kernels take twice as long."""
    device = torch.device("cuda")
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


@pytest.mark.alone
def test_the_cost_of_waiting_for_copies_is_measured() -> None:
    """Small kernels pay for it: some microseconds, and less than a step."""
    for profile in make_fleet(NAME, 2, lowering="aten").plan(None, "none").profiles:
        step = sum(node.seconds for node in profile.nodes)
        assert 0.2e-6 < profile.sync_seconds < min(1e-4, step)


def test_a_width_is_measured_after_another_plan_was_used() -> None:
    """The state lies in host memory then, where filters and the counters of batch norm lie otherwise."""
    fleet, other = (make_fleet("cnn_with_dropout", lowering="aten") for _ in range(2))
    for number, (max_partitions, widths) in enumerate([(2, {1, 4}), (5, {1, 2, 3, 4})]):
        plan = fleet.plan("20GiB", "none", max_partitions=max_partitions)
        assert {max(attempt.widths) for attempt in plan.record.attempts} == widths
        batch = batch_of("cnn_with_dropout", number)
        torch.testing.assert_close(fleet.step(batch), other.step(batch), rtol=1e-4, atol=1e-5)
