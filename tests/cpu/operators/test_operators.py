"""Every operator with gradients of torch's database, in a fleet and in plain torch.

A part of them is here for ``make test``; ``make test-operators`` runs all, and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from operator_database import FAILURES, OPERATORS, outcome, samples_of, spread

_NUM_QUICK = 16
_NUM_SAMPLES = 3
_WIDTHS = (1, 3)


def _check(name: str, cases: Iterable[tuple[Any, int]], record: Callable[[str, object], None]) -> None:
    counts: Counter[str] = Counter()
    failures = []
    for position, (sample, width) in enumerate(cases):
        state, detail = outcome(OPERATORS[name], sample, width)
        counts[state] += 1
        if state in FAILURES:
            failures.append(f"case {position}, width {width}: {state}: {detail}\n  {sample}")
    record("operator states", dict(counts))
    assert not failures, "\n".join([name, *failures])


@pytest.mark.parametrize("name", spread(OPERATORS, _NUM_QUICK))
def test_operator_of_a_spread_sample_trains_as_in_plain_torch_or_is_refused(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    _check(name, [(sample, 3) for sample in samples_of(OPERATORS[name], 1)], record_property)


@pytest.mark.operators
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_trains_as_in_plain_torch_or_is_refused(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    samples = samples_of(OPERATORS[name], _NUM_SAMPLES)
    _check(name, [(sample, width) for sample in samples for width in _WIDTHS], record_property)
