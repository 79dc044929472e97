"""Deterministic algorithms for a while, and every global switch back to what it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainmux.runtime import deterministic_algorithms


def switches() -> dict[str, bool]:
    return {
        "enabled": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def set_switches(values: dict[str, bool]) -> None:
    torch.use_deterministic_algorithms(values["enabled"], warn_only=values["warn_only"])
    torch.utils.deterministic.fill_uninitialized_memory = values["fill"]
    torch.backends.cudnn.deterministic = values["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = values["cudnn_benchmark"]


@pytest.fixture(
    params=[
        {"enabled": False, "warn_only": False, "fill": True, "cudnn_deterministic": False},
        {"enabled": True, "warn_only": False, "fill": True, "cudnn_deterministic": True},
        {"enabled": True, "warn_only": True, "fill": False, "cudnn_deterministic": False},
    ],
    ids=["off", "strict", "warn only"],
)
def before(request: pytest.FixtureRequest) -> Iterator[dict[str, bool]]:
    original = switches()
    set_switches(request.param | {"cudnn_benchmark": True})
    yield switches()
    set_switches(original)


def test_switches_are_on_inside_and_back_outside(before: dict[str, bool]) -> None:
    with deterministic_algorithms(True):
        inside = switches()
    assert inside["enabled"]
    assert inside["cudnn_deterministic"]
    assert not inside["cudnn_benchmark"]
    assert switches() == before


def test_switches_are_back_after_an_exception(before: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="step failed"), deterministic_algorithms(True):
        raise ValueError("step failed")
    assert switches() == before


def test_switches_are_back_after_nesting(before: dict[str, bool]) -> None:
    with deterministic_algorithms(True):
        with deterministic_algorithms(True):
            pass
        assert switches()["enabled"]
    assert switches() == before


def test_disabled_changes_nothing(before: dict[str, bool]) -> None:
    with deterministic_algorithms(False):
        assert switches() == before
    assert switches() == before


def test_disabled_does_not_switch_an_outer_one_off() -> None:
    with deterministic_algorithms(True):
        with deterministic_algorithms(False):
            assert switches()["enabled"]
        assert switches()["enabled"]
