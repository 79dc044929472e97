"""Jobs side by side on a GPU give bit for bit what each gives alone, at every budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from colocation_cases import (
    ONE_LAYER,
    SMALL_CUTS,
    assert_same_state,
    batches_of,
    cycled,
    small_fleet,
    smallest_budget,
    state_of,
    sum_of_peaks,
)
from torch import Tensor
from wide_jobs import BATCH_SIZE, MIB, REGION, captures_of, wide_batches, wide_fleet

import trainmux as tm
from trainmux.colocate import _fused_work
from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._protocols import Ended

STEPS = 12


@pytest.fixture(autouse=True)
def _jobs_keep_what_they_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is more than the arenas of such small jobs: nothing would be tight."""
    monkeypatch.setattr(_fused_work, "_SPARE_BYTES", 1 << 40)


def jobs_in_flight(colocation: tm.Colocation) -> list[int]:
    """Fills, whenever a segment is enqueued, with how many jobs have one whose end was not told."""
    device: Any = colocation._device
    enqueue, next_ended = device.enqueue, device.next_ended
    flying: list[str] = []
    found: list[int] = []

    def noting_begin(ref: SegmentRef, *rest: Any) -> None:
        enqueue(ref, *rest)
        flying.append(ref.job)
        found.append(len(set(flying)))

    def noting_end(*until: Any) -> Ended | None:
        ended: Ended | None = next_ended(*until)
        if ended is not None:
            flying.remove(ended.ref.job)
        return ended

    device.enqueue, device.next_ended = noting_begin, noting_end
    return found


def check_small(tmp_path: Path, names: Sequence[str], lowering: str, tightness: Sequence[float]) -> None:
    fleets = {name: small_fleet(name, device="cuda", lowering=lowering) for name in names}
    expected = {}
    for name, fleet in fleets.items():
        fleet.save(tmp_path / name)
        losses = torch.stack([fleet.step(batch).cpu() for batch in cycled(batches_of(name), STEPS)])
        expected[name] = (losses, state_of(fleet))
    for tight in tightness:
        for name in names:
            fleets[name].restore(tmp_path / name)
        jobs = [tm.Job(name, fleet=fleets[name], loader=batches_of(name), steps=STEPS) for name in names]
        colocation = tm.colocate(jobs, "20GiB", tracking_bytes=SMALL_CUTS, region_bytes=REGION, poisons=True)
        least, most = smallest_budget(colocation), sum_of_peaks(colocation)
        colocation.set_budget(round(tight * least + (1 - tight) * most))
        at_once = jobs_in_flight(colocation)
        result = colocation.run()
        assert [repr(job.error) for job in result.jobs.values() if job.error] == []
        if tight == 0:
            assert max(at_once) == len(names), f"{names}: one iteration after the other"
        for name in names:
            assert torch.equal(result[name].losses, expected[name][0]), (names, tight, name)
            assert_same_state(state_of(fleets[name]), expected[name][1], f"{names} at {tight}: {name}")


NAMES = ("mlp", "residual", "transformer_with_dropout", "lstm")


@pytest.mark.parametrize(
    ("names", "lowering", "tightness"),
    [
        *((names, "aten", (1.0, 0.0)) for names in itertools.pairwise([*NAMES, NAMES[0]])),
        (("mlp", "transformer_with_dropout", "residual"), "aten", (1.0, 0.5)),
        (("residual", "transformer_with_dropout"), "inductor", (1.0, 0.0)),
    ],
)
def test_jobs_are_as_alone(
    tmp_path: Path, names: Sequence[str], lowering: str, tightness: Sequence[float]
) -> None:
    check_small(tmp_path, names, lowering, tightness)


def test_other_batches_and_micro_batches() -> None:
    """Run kernel by kernel the first time, captured the second time: the bits stay."""

    def batches(seed: int) -> list[Tensor]:
        long, short = wide_batches(seed), wide_batches(seed, BATCH_SIZE // 2)
        return [long[0], long[1], short[0], long[2]]

    def fleet(seed: int) -> tm.Fleet:
        return wide_fleet(seed, num_layers=3, accumulate=2)

    steps = 24
    expected = {}
    for seed in (0, 1):
        alone = fleet(seed)
        losses = torch.stack([alone.step(batch).cpu() for batch in cycled(batches(seed), steps)])
        expected[seed] = (losses, state_of(alone))
    captured: list[dict[str, int]] = []
    jobs = [tm.Job(str(seed), fleet=fleet(seed), loader=batches(seed), steps=steps) for seed in (0, 1)]
    colocation = tm.colocate(
        jobs,
        "20GiB",
        tracking_bytes=4 * MIB,
        region_bytes=REGION,
        callbacks=[lambda event: captured.append(captures_of(event.colocation))],
        poisons=True,
    )
    colocation.set_budget(smallest_budget(colocation) + 4 * REGION)
    result = colocation.run()
    assert [repr(job.error) for job in result.jobs.values() if job.error] == []
    for seed, job in zip((0, 1), jobs, strict=True):
        assert torch.equal(result[str(seed)].losses, expected[seed][0])
        assert job.fleet is not None
        assert_same_state(state_of(job.fleet), expected[seed][1], str(seed))
    both = [row for row in captured if len(row) == 2]
    assert both[-1]["0"] > both[0]["0"]  # further steps were captured
    assert both[-1] == both[len(both) * 3 // 4]  # and none of them twice


def test_dropout_and_several_members() -> None:
    name = "transformer_with_dropout"

    def make() -> tm.Fleet:
        members = []
        for number in range(2):
            model = ONE_LAYER[name](number).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (number + 1))
            members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
        return tm.Fleet(
            members,
            SMALL[name].loss,
            batches_of(name)[0],
            device="cuda",
            deterministic=True,
            lowering="aten",
            accumulate=3,
        )

    alone, fleet = make(), make()
    losses = torch.stack([alone.step(batch).cpu() for batch in cycled(batches_of(name), 60)])
    job = tm.Job("a", fleet=fleet, loader=batches_of(name), steps=60)
    result = tm.colocate([job], "20GiB", region_bytes=REGION, poisons=True).run()["a"]
    assert result.error is None
    assert torch.equal(result.losses, losses)
    assert_same_state(state_of(fleet), state_of(alone), "a")
