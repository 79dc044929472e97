"""Workers of a study in a database that are killed, and cannot reach it for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("optuna")

from benchmarks.chaos import Run, execute, is_as_promised


def test_kills_while_the_storage_is_away_lose_no_trial(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "sqlite", trials=24, kills=5, outages=1, outage_s=6.0, slots=4, epoch_s=0.5)
    found = execute(run)
    assert is_as_promised(run, found), found
    assert found["fail"] > 0, "kills hit trials that were running"
