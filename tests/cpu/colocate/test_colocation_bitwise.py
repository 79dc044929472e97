"""Jobs side by side give bit for bit what each gives alone, at every budget, in poisoned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from colocation_cases import (
    SMALL_CUTS,
    assert_same_state,
    batches_of,
    cycled,
    small_fleet,
    smallest_budget,
    state_of,
    sum_of_peaks,
)
from tests.fake_cuda import install
from torch import Tensor

import trainmux as tm

STEPS = 3
NAMES = ("mlp", "transformer_with_dropout", "residual")


def test_pairs_and_triples_at_every_budget(
    built_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, because the fleets take most of the time and every case can have the same ones.

    At its end, in shared regions as on a CUDA device (`fake_cuda`).
    """
    fleets = {name: small_fleet(name) for name in NAMES}
    expected: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for name, fleet in fleets.items():
        fleet.save(tmp_path / name)
        losses = torch.stack([fleet.step(batch).clone() for batch in cycled(batches_of(name), STEPS)])
        expected[name] = (losses, state_of(fleet))

    def check(names: tuple[str, ...], tightness: float) -> tm.ColocationResult:
        """``tightness`` 1 is the smallest workable budget, 0 that with which nobody waits."""
        for name in names:
            fleets[name].restore(tmp_path / name)
        jobs = [tm.Job(name, fleet=fleets[name], loader=batches_of(name), steps=STEPS) for name in names]
        colocation = tm.colocate(jobs, "4GiB", tracking_bytes=SMALL_CUTS, poisons=True)
        least, most = smallest_budget(colocation), sum_of_peaks(colocation)
        colocation.set_budget(round(tightness * least + (1 - tightness) * most))
        result = colocation.run()
        if tightness == 0.0:
            assert result.used_bytes > least, f"{names}: one iteration after the other"
        assert result.peak_bytes <= result.budget_bytes
        assert result.failed == ()
        for name in names:
            losses, state = expected[name]
            assert result[name].num_steps == STEPS
            assert torch.equal(result[name].losses, losses), (names, tightness, name)
            assert_same_state(state_of(fleets[name]), state, f"{names} at {tightness}: {name}")
        return result

    check(("mlp", "transformer_with_dropout"), 1.0)
    check(("residual", "mlp"), 0.5)
    roomy = check(("residual", "transformer_with_dropout"), 0.0)
    assert all(job.shift_seconds == 0 for job in roomy.jobs.values())
    tight = check(NAMES, 1.0)
    assert tight.used_bytes == tight.peak_bytes == tight.budget_bytes
    check(NAMES, 0.8)
    driver = install(monkeypatch)
    for tightness in (1.0, 0.5):
        check(("residual", "transformer_with_dropout"), tightness)
        assert driver.held_bytes == 0  # all jobs have left
