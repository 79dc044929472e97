"""Workers of one study that are killed: every configuration ends once, and little is trained again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="needs Optuna")

from benchmarks.chaos import Run, execute, is_as_promised


@pytest.mark.slow
def test_five_kills_lose_no_trial(tmp_path: Path) -> None:
    often = {"epoch_s": 0.1, "between_s": 0.7, "heartbeat": 0.5}
    run = Run(tmp_path / "run", "journal", trials=16, kills=5, slots=4, lowering="aten", **often)
    found = execute(run)
    assert is_as_promised(run, found), found
    assert found["fail"] > 0, "kills hit trials that were running"
    assert found["complete"] + found["pruned"] == 16
