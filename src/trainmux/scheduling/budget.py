"""A byte budget as people write it, and bytes as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

from trainmux.errors import BudgetError

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


def parse_budget(budget: int | str, *, device_bytes: int) -> int:
    """The bytes that ``budget`` names: a number of bytes, a number with a unit, or a share of the device.

    Units are B, kB to TB in thousands and KiB to TiB in steps of 1024, in either case; fractions of a byte
    are dropped. Refused with `BudgetError`: what cannot be read, nothing or less, and more than
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
            f"a budget must be at least 1 byte, but got {budget!r}; name what may be used of the device's "
            f"{in_words(device_bytes)}"
        )
    if num_bytes > device_bytes:
        raise BudgetError(
            f"a budget must be at most the {in_words(device_bytes)} of the device, but got {budget!r}, which "
            f'is {in_words(num_bytes)}; "100%" names all of it'
        )
    return num_bytes


def in_words(num_bytes: int) -> str:
    """Bytes for people: in the largest binary unit of which there is at least one, and exact beside it."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit} ({num_bytes} bytes)"
    return f"{num_bytes} bytes"


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
            f"{text!r}; "
            'write for example "20GiB"'
        )
    return -1 if is_negative else int(num_bytes)
