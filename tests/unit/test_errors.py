"""What is said of an error that was not ours, in a line."""

from __future__ import annotations

from trainmux.errors import first_line


def test_an_error_is_said_in_a_line() -> None:
    assert first_line(RuntimeError("\n  out of memory\nCompile with ...")) == "out of memory"


def test_an_error_that_says_nothing_has_its_type() -> None:
    assert first_line(MemoryError()) == "MemoryError"
