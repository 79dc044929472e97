"""Errors: where they are found, and what is said of one that was not ours."""

from __future__ import annotations

import inspect

import trainmux as tm
from trainmux import errors
from trainmux.errors import first_line


def test_an_error_is_said_in_a_line() -> None:
    assert first_line(RuntimeError("\n  out of memory\nCompile with ...")) == "out of memory"


def test_an_error_that_says_nothing_has_its_type() -> None:
    assert first_line(MemoryError()) == "MemoryError"


def test_every_error_is_found_at_the_top() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert "FleetError" in classes
    for name, value in classes.items():
        assert getattr(tm, name) is value
        assert name in tm.__all__


def test_a_fleet_that_cannot_do_something_is_a_runtime_error() -> None:
    assert issubclass(tm.FleetError, (tm.TrainmuxError, RuntimeError))
    assert issubclass(tm.FleetError, RuntimeError)
