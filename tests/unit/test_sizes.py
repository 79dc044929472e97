"""Byte counts as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmux.errors import BudgetError
from trainmux.sizes import exact_bytes, format_bytes, parse_budget

MIB, GIB = 2**20, 2**30
DEVICE = 80 * GIB


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1, 1),
        (DEVICE, DEVICE),
        ("20GiB", 20 * GIB),
        ("  24\tgb ", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1 kB", 100),
        ("512 MiB", 2**29),
        ("700KiB", 700 * 1024),
        ("0.05TB", 5 * 10**10),
        ("0.0625 TiB", 2**36),
        ("70%", DEVICE * 7 // 10),
        ("12.5 %", DEVICE // 8),
        ("100%", DEVICE),
    ],
)
def test_what_is_read(written: int | str, num_bytes: int) -> None:
    assert parse_budget(written, device_bytes=DEVICE) == num_bytes


TOO_SMALL = ["-1", -5, "-2GiB", "0", 0, "0%", "0.4 B"]
TOO_LARGE = ["101%", DEVICE + 1, "81GiB"]
NOT_A_SIZE = ["20 GiBs", "20G", "", "   ", "GiB", "20 GiB 3", "1e9", "nan", "2,5GiB", "٣GiB", True, 2.0, None]


@pytest.mark.parametrize("written", [*TOO_SMALL, *TOO_LARGE, *NOT_A_SIZE])
def test_what_is_refused(written: object) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(written, device_bytes=DEVICE)  # type: ignore[arg-type]
    assert repr(written) in str(caught.value)
    assert caught.value.smallest_bytes is None


@given(st.integers(1, DEVICE))
def test_a_number_is_the_same_as_its_text(num_bytes: int) -> None:
    assert parse_budget(str(num_bytes), device_bytes=DEVICE) == num_bytes
    assert parse_budget(f"{num_bytes} B", device_bytes=DEVICE) == num_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (MIB - 1, "1.0 MiB"),
        (int(99.96 * MIB), "100 MiB"),
        (GIB - 1, "1.00 GiB"),
        (18 * GIB + GIB // 4, "18.25 GiB"),
        (5000 * 1024 * GIB, "5,000.00 TiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_messages_have_the_exact_number_too() -> None:
    assert exact_bytes(900) == "900 bytes"
    assert exact_bytes(3 * 2**29) == "1.50 GiB (1610612736 bytes)"
