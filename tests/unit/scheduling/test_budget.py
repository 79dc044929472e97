"""Budgets as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmux.errors import BudgetError
from trainmux.scheduling.budget import in_words, parse_budget

DEVICE = 80 * 2**30


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1, 1),
        (DEVICE, DEVICE),
        ("20GiB", 20 * 2**30),
        ("24 GB", 24 * 10**9),
        ("  24\tgb ", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1 kB", 100),
        ("512 MiB", 2**29),
        ("700KiB", 700 * 1024),
        ("0.05TB", 5 * 10**10),
        ("0.0625 TiB", 2**36),
        ("12345", 12345),
        ("12345 B", 12345),
        ("70%", DEVICE * 7 // 10),
        ("12.5 %", DEVICE // 8),
        ("100%", DEVICE),
    ],
)
def test_what_is_read(written: int | str, num_bytes: int) -> None:
    assert parse_budget(written, device_bytes=DEVICE) == num_bytes


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("-1", "at least 1 byte, but got '-1'"),
        (-5, "at least 1 byte, but got -5"),
        ("-2GiB", "at least 1 byte"),
        ("0", "at least 1 byte, but got '0'"),
        (0, "at least 1 byte"),
        ("0%", "at least 1 byte"),
        ("0.4 B", "at least 1 byte"),
        ("20 GiBs", "unit must be .* but got 'GiBs'"),
        ("20G", "unit must be"),
        ("", "one number with one unit"),
        ("   ", "one number with one unit"),
        ("GiB", "one number with one unit"),
        ("20 GiB 3", "one number with one unit"),
        ("1e9", "unit must be .* but got 'e9'|one number with one unit"),
        ("nan", "one number with one unit"),
        ("2,5GiB", "one number with one unit"),
        ("٣GiB", "one number with one unit"),
        ("101%", 'at most the 80.00 GiB .* "100%" names all of it'),
        (DEVICE + 1, "at most"),
        ("81GiB", "at most"),
        (True, "type bool"),
        (2.0, "type float"),
        (None, "type NoneType"),
    ],
)
def test_what_is_refused(written: object, said: str) -> None:
    with pytest.raises(BudgetError, match=said) as caught:
        parse_budget(written, device_bytes=DEVICE)  # type: ignore[arg-type]
    assert caught.value.smallest_bytes is None


@given(st.integers(1, DEVICE))
def test_a_number_is_the_same_as_its_text(num_bytes: int) -> None:
    assert parse_budget(str(num_bytes), device_bytes=DEVICE) == num_bytes
    assert parse_budget(f"{num_bytes} B", device_bytes=DEVICE) == num_bytes


def test_bytes_in_words() -> None:
    assert in_words(900) == "900 bytes"
    assert in_words(3 * 2**29) == "1.50 GiB (1610612736 bytes)"
    assert in_words(2**20) == "1.00 MiB (1048576 bytes)"
