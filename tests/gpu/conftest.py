"""The GPU runs what the CPU's suites run too: their helpers and models lie beside the CPU tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from settled import settle

for folder in ("", "fleet", "engine", "colocate"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / folder))


def pytest_configure(config: pytest.Config) -> None:
    """Known to xdist; here for runs without it."""
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker should run together")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Nothing of one test is on the device when the next begins."""
    yield
    settle()
