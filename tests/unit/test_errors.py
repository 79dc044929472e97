"""Errors: where they are found, and what is said of one that was not ours."""

from __future__ import annotations

import inspect

import trainmux as tm
from trainmux import errors


def test_an_error_is_said_in_a_line_or_by_its_type() -> None:
    assert errors.first_line(RuntimeError("\n  out of memory\nCompile with ...")) == "out of memory"
    assert errors.first_line(MemoryError()) == "MemoryError"


def test_every_error_is_found_at_the_top() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert tm.FleetError in classes
    for value in classes:
        assert getattr(tm, value.__name__) is value
        assert value.__name__ in tm.__all__
