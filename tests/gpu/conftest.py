"""The GPU runs what the CPU's suites run too: their helpers and models lie beside the CPU tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from settled import settle

for folder in ("", "fleet", "engine", "colocate"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / folder))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Nothing of one test is on the device when the next begins."""
    yield
    settle()
