"""Numbers and names as people read them."""

from __future__ import annotations

import pytest

from trainmux.reporting import _units as units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (1e-9, "<0.001 ms"),
        (-1e-9, ">-0.001 ms"),
        (1.5e-6, "0.002 ms"),
        (0.0004, "0.400 ms"),
        (0.0125, "12.50 ms"),
        (0.41231, "412.31 ms"),
        (12.5, "12,500.0 ms"),
        (-0.0125, "-12.50 ms"),
        (float("inf"), "-"),
        (float("nan"), "-"),
    ],
)
def test_seconds_are_shown_as_milliseconds(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


def test_shares_and_changes() -> None:
    assert units.format_share(0.1254) == "12.5%"
    assert units.format_share(float("nan")) == "-"
    assert units.format_change(1.1, 1.0) == "+10.0%"
    assert units.format_change(0.9, 1.0) == "-10.0%"
    assert units.format_change(1.0001, 1.0) == "0.0%"
    assert units.format_change(0.9999, 1.0) == "0.0%"
    assert units.format_change(1.0, 0.0) == "-"
    assert units.format_change(float("inf"), 1.0) == "-"


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ((), "-"),
        ((7,), "7"),
        ((4, 3), "4 + 3"),
        ((2, 2, 2, 2), "2 + 2 + 2 + 2"),
        ((1,) * 5, "5 x width 1"),
        ((8,) * 6 + (2, 2, 1), "6 x width 8 + 2 + 2 + 1"),
    ],
)
def test_widths(widths: tuple[int, ...], text: str) -> None:
    assert units.format_widths(widths) == text


def test_counted() -> None:
    assert units.counted(1, "swap") == "1 swap"
    assert units.counted(0, "swap") == "0 swaps"
    assert units.counted(12000, "swap") == "12,000 swaps"
    assert units.counted(2, "copy", "copies") == "2 copies"


def test_a_name_stays_on_one_line_and_can_be_encoded() -> None:
    assert units.one_line("lr=0.1, µ ≤ 3") == "lr=0.1, µ ≤ 3"
    assert units.one_line("a\nb\tc\x1b[31m\x00") == "a\\nb\\tc\\x1b[31m\\x00"
    assert units.one_line("broken \ud800").encode("utf-8") == b"broken \\ud800"
    assert units.one_line("line\u2028separator") == "line\\u2028separator"


def test_a_long_name_loses_its_middle() -> None:
    assert units.shortened("short", 5) == "short"
    short = units.shortened("abcdefghij", 6)
    assert short == "abc…ij"
    assert len(units.shortened("x" * 1000, 160)) == 160
