"""A timeline from measured spans says of a simulated run what the simulation says of it."""

from __future__ import annotations

import pytest
from test_timeline import FIVE, ONE, PROFILE, TWO

from trainmux.ir import Lane, Offload, Part, Prefetch, Recompute, Span, Wait
from trainmux.planning import measured_timeline, timeline

ROWS = [
    (ONE, TWO, FIVE),
    (ONE, Offload(0, 0), TWO, Wait(Lane.COMPUTE, 1), FIVE),
    (ONE, Offload(0, 0), Offload(0, 1), FIVE, Wait(Lane.IN, 2), Prefetch(0, 0), Wait(Lane.COMPUTE, 5), TWO),
    (Offload(0, 0), Prefetch(0, 1), ONE, Recompute(0, 1, ()), Wait(Lane.COMPUTE, 1), FIVE),
]


@pytest.mark.parametrize("row", ROWS)
def test_spans_of_a_simulation_give_its_numbers(row: tuple[object, ...]) -> None:
    part = Part(row, ())  # type: ignore[arg-type]
    predicted = timeline(part, [PROFILE])
    found = measured_timeline(part, [PROFILE], list(reversed(predicted.spans)), predicted.seconds)
    assert found.source == "measured"
    assert found.spans == predicted.spans
    for name in ("seconds", "compute_seconds", "recompute_seconds", "stall_seconds", "copy_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(predicted, name)), name
    assert found.hidden_copy_seconds == pytest.approx(predicted.hidden_copy_seconds)


def test_gaps_between_nodes_are_stalls_and_copies_beside_them_are_not_hidden() -> None:
    part = Part((ONE, Offload(0, 1), TWO), ())
    spans = [
        Span(Lane.COMPUTE, 0, 0.0, 1.0),
        Span(Lane.OUT, 1, 0.5, 2.0),
        Span(Lane.COMPUTE, 2, 1.5, 3.5),
    ]
    found = measured_timeline(part, [PROFILE], spans, 4.0)
    assert (found.compute_seconds, found.stall_seconds) == (3.0, 1.0)
    assert (found.copy_seconds, found.hidden_copy_seconds) == (1.5, 1.0)
