"""Times of nodes alone become times of nodes in a step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmux.profiling._measured import in_step_seconds

times = st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=30)


@given(times, st.floats(0.05, 3.0))
def test_they_add_up_to_the_step_and_keep_their_order(alone: list[float], share: float) -> None:
    together = share * sum(alone)
    found = in_step_seconds(alone, together)
    assert sum(found) == pytest.approx(together)
    order = sorted(range(len(alone)), key=alone.__getitem__)
    assert all(found[a] <= found[b] * (1 + 1e-9) for a, b in pairwise(order))
    assert min(found) > 0


def test_a_constant_overhead_is_found_again() -> None:
    true = [1e-3, 5e-3, 2e-4, 8e-4]
    assert in_step_seconds([seconds + 1e-5 for seconds in true], sum(true)) == pytest.approx(true)


def test_nothing_measured_changes_nothing() -> None:
    assert in_step_seconds([], 1.0) == []
    assert in_step_seconds([1.0, 2.0], 0.0) == [1.0, 2.0]
