"""The whole step of all members as one program: a place in the table for what is to come."""

from __future__ import annotations

from ..job import BenchError
from ._base import Prepared, Setup


def prepare(setup: Setup) -> Prepared:
    """Refuses: there is nothing to measure yet."""
    raise BenchError("whole_graph is not written yet")
