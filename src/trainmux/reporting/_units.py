"""Numbers and names as people read them: seconds as milliseconds, shares as percent, names on one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

NOTHING = "-"
"""Stands where there is no number, such as the step time of a partition that does not fit."""

_MAX_LISTED_WIDTHS = 4


def format_seconds(seconds: float) -> str:
    """``0.41231`` is "412.31 ms"; what is not finite is `NOTHING`."""
    if not math.isfinite(seconds):
        return NOTHING
    milliseconds = seconds * 1e3
    size = abs(milliseconds)
    if size == 0:
        return "0 ms"
    if size < 0.0005:
        return "<0.001 ms" if milliseconds > 0 else ">-0.001 ms"
    places = 3 if size < 1 else 2 if size < 1000 else 1
    return f"{milliseconds:,.{places}f} ms"


def format_share(share: float) -> str:
    """``0.125`` is "12.5%"."""
    return f"{share * 100:.1f}%" if math.isfinite(share) else NOTHING


def format_change(value: float, reference: float) -> str:
    """By how much ``value`` differs from ``reference``: "+2.4%"; `NOTHING` where that has no meaning."""
    if not (math.isfinite(value) and math.isfinite(reference)) or reference == 0:
        return NOTHING
    percent = round((value / reference - 1) * 100, 1)
    return f"{percent:+.1f}%" if percent else "0.0%"


def format_widths(widths: Sequence[int], num_branches: int = 1) -> str:
    """The widths of sub-arrays: "4 + 4", or "16 x width 2" where a list would be long.

    Where members are not fused, "4 + 4 side by side".
    """
    runs = [(width, len(list(run))) for width, run in groupby(widths)]
    parts = [
        f"{count} x width {width}" if count > _MAX_LISTED_WIDTHS else " + ".join([str(width)] * count)
        for width, count in runs
    ]
    return (" + ".join(parts) or NOTHING) + (" side by side" if num_branches > 1 else "")


def counted(number: int, noun: str) -> str:
    """``1, "swap"`` is "1 swap"; ``12_000, "swap"`` is "12,000 swaps"."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def one_line(name: str) -> str:
    """A name as given, but with line breaks, control characters and broken code points spelled out."""
    readable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)
    return readable.encode("utf-8", "backslashreplace").decode("utf-8")


def shortened(name: str, max_length: int) -> str:
    """A name with its middle left out where it is longer than ``max_length``."""
    if len(name) <= max_length:
        return name
    tail = (max_length - 1) // 2
    return f"{name[: max_length - 1 - tail]}…{name[-tail:]}"
