"""The GPU runs what the CPU's suites run too: their helpers and models lie beside the CPU tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from settled import settle

from trainmux.colocate import _fused_work

for folder in ("", "fleet", "engine", "colocate"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / folder))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Nothing of one test is on the device when the next begins."""
    yield
    settle()


@pytest.fixture
def without_workspaces() -> Iterator[None]:
    """Nor are the workspaces of the matrix libraries, before and after."""
    settle(clears_workspaces=True)
    yield
    settle(clears_workspaces=True)


@pytest.fixture
def jobs_keep_what_they_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is more than the arenas of such small jobs: nothing would be tight."""
    monkeypatch.setattr(_fused_work, "_SPARE_BYTES", 1 << 40)
