"""Random walks through a fleet's life: no member is ever different from the same one in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from lifecycle_walk import Walk

WEIGHTS = {
    "step": 40,
    "add": 4,
    "drop": 3,
    "replace": 4,
    "stop": 1,
    "sync": 5,
    "save": 3,
    "restore": 3,
    "evaluate": 5,
    "number": 8,
    "edit": 2,
    "change": 3,
}


@pytest.mark.usefixtures("built_once")
@pytest.mark.parametrize("seed", range(2))
def test_a_short_walk(seed: int, tmp_path: Path) -> None:
    Walk(seed, tmp_path).run(50, WEIGHTS)


@pytest.mark.usefixtures("built_once")
def test_a_short_walk_with_plans(tmp_path: Path) -> None:
    Walk(100, tmp_path).run(30, {**WEIGHTS, "plan": 4, "unplan": 3})


@pytest.mark.usefixtures("built_once")
@pytest.mark.extensive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(50))
def test_a_walk_of_500_actions(seed: int, tmp_path: Path) -> None:
    Walk(1000 + seed, tmp_path).run(500, {**WEIGHTS, "plan": 0.3, "unplan": 0.3})
