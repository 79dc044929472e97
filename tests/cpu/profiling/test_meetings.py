"""Where copies wait for a step's nodes and nodes for copies, and what each of these costs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trainmux.profiling._meetings import meeting_places, meeting_seconds


@given(st.integers(0, 5000))
def test_copies_that_are_met_have_time_to_end(num_nodes: int) -> None:
    """Each is waited for once, three nodes later at least, and no two meetings are at the same node."""
    copies, waits = meeting_places(num_nodes)
    assert len(copies) == len(waits) <= 32
    assert len(copies) >= min(num_nodes // 8 - 1, 15)
    assert all(rank + 1 < num_nodes for rank in waits)  # behind which there is a node that waits
    places = sorted([*copies, *(rank + 1 for rank in waits)])
    assert all(after - before >= 3 for before, after in pairwise(places))
    assert [rank in copies for rank in places] == [number % 2 == 0 for number in range(len(places))]


def test_what_a_meeting_costs() -> None:
    assert meeting_seconds(10.0, 13.0, 6) == 0.5
    assert meeting_seconds(10.0, 9.9, 6) == 0.0
    assert meeting_seconds(10.0, 13.0, 0) == 0.0  # a step of a few nodes: not known
