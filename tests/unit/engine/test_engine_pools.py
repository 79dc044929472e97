"""What torch may take is bounded for a while, and the bound that was there before comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainmux.engine import limited_growth, pool_bytes

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The process's share of 1000 bytes, of which 100 are reserved; the last entry is in force."""
    found = [0.5]
    for name, fake in {
        "memory_reserved": lambda device: 100,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1000),
        "get_per_process_memory_fraction": lambda device: found[-1],
        "set_per_process_memory_fraction": lambda fraction, device: found.append(fraction),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return found


def test_growth_is_bounded_meanwhile(fractions: list[float]) -> None:
    with limited_growth(DEVICE, 50):
        assert fractions[-1] == pytest.approx(0.15)
    assert fractions[-1] == 0.5


def test_a_bound_that_was_lower_stays(fractions: list[float]) -> None:
    with limited_growth(DEVICE, 800):
        assert fractions[-1] == 0.5
    assert fractions[-1] == 0.5


def test_the_bound_goes_after_an_error_too(fractions: list[float]) -> None:
    def fail() -> None:
        with limited_growth(DEVICE, 0):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert fractions == [0.5, pytest.approx(0.1), 0.5]


def test_a_pool_has_what_its_segments_have() -> None:
    class Pool:
        def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
            assert not include_traces
            return [{"total_size": 2 << 20, "blocks": []}, {"total_size": 20 << 20, "blocks": []}]

    assert pool_bytes(Pool()) == 22 << 20  # type: ignore[arg-type]
