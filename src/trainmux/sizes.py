"""Byte counts as people write and read them: "20GiB", "24 GB", "70%", "18.00 GiB"."""

from __future__ import annotations

import re
from fractions import Fraction

from trainmux.errors import BudgetError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BYTES_PER_UNIT = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>%|[A-Za-z]*)", flags=re.ASCII)
_FORMS = 'whole bytes or text like "20GiB", "24 GB" or "70%"'


def format_bytes(num_bytes: int) -> str:
    """``19_327_352_832`` is "18.00 GiB": two places from a GiB on, one for small MiB, none below."""
    sign = "-" if num_bytes < 0 else ""
    value = float(abs(num_bytes))
    unit = 0
    while unit < len(_UNITS) - 1 and round(value) >= 1024:
        value /= 1024
        unit += 1
    if unit >= _UNITS.index("GiB"):
        text = f"{value:,.2f}"
    elif _UNITS[unit] == "MiB" and value < 99.95:
        text = f"{value:.1f}"
    else:
        text = f"{value:.0f}"
    return f"{sign}{text} {_UNITS[unit]}"


def exact_bytes(num_bytes: int) -> str:
    """``1_610_612_736`` is "1.50 GiB (1610612736 bytes)": for a message whose number is copied into code."""
    return f"{num_bytes} bytes" if num_bytes < 1024 else f"{format_bytes(num_bytes)} ({num_bytes} bytes)"


def parse_budget(budget: int | str, *, device_bytes: int) -> int:
    """The bytes that ``budget`` names: a number of bytes, a number with a unit, or a share of the device.

    Units are B, kB to TB in thousands and KiB to TiB in steps of 1024, in either case; fractions of a byte
    are dropped. Refused with `BudgetError`: text that cannot be read, less than a byte, and more than
    ``device_bytes``.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise BudgetError(
            f"a budget must be {_FORMS}, but got {budget!r} of type {type(budget).__name__}; "
            "write its unit in the text"
        )
    num_bytes = budget if isinstance(budget, int) else _bytes_of_text(budget, device_bytes)
    if num_bytes < 1:
        raise BudgetError(
            f"a budget must be at least 1 byte, but got {budget!r}; the device has "
            f"{exact_bytes(device_bytes)}"
        )
    if num_bytes > device_bytes:
        raise BudgetError(
            f"a budget must be at most the {exact_bytes(device_bytes)} of the device, but got {budget!r}, "
            f'which is {exact_bytes(num_bytes)}; "100%" names all of it'
        )
    return num_bytes


def _bytes_of_text(text: str, device_bytes: int) -> int:
    stripped = text.strip()
    is_negative = stripped.startswith("-")
    match = _TEXT.fullmatch(stripped.removeprefix("-").lstrip() if is_negative else stripped)
    if match is None:
        raise BudgetError(f"a budget must be {_FORMS}, but got {text!r}; write one number with one unit")
    number, unit = Fraction(match["number"]), match["unit"]
    if unit == "%":
        num_bytes = number * device_bytes / 100
    elif unit.lower() in _BYTES_PER_UNIT:
        num_bytes = number * _BYTES_PER_UNIT[unit.lower()]
    else:
        raise BudgetError(
            f"a budget's unit must be %, B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, but got {unit!r} in "
            f'{text!r}; write for example "20GiB"'
        )
    return -1 if is_negative else int(num_bytes)


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``size``."""
    return -(-size // unit) * unit
