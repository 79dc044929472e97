"""Deterministic algorithms for a while, and every global switch back to what it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux.runtime import deterministic_algorithms, measured_convolutions, process_lock


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
    with deterministic_algorithms(False):
        assert switches() == before
    with deterministic_algorithms(True):
        with deterministic_algorithms(True), deterministic_algorithms(False):
            pass
        inside = switches()
    assert inside["enabled"]
    assert inside["cudnn_deterministic"]
    assert not inside["cudnn_benchmark"]
    assert switches() == before
    with pytest.raises(ValueError, match="step failed"), deterministic_algorithms(True):
        raise ValueError("step failed")
    assert switches() == before


def test_threads_find_the_switches_as_they_asked_for_them() -> None:
    wrong: list[str] = []

    def ask(enabled: bool) -> None:
        for _ in range(100):
            with deterministic_algorithms(enabled):
                for _ in range(3):
                    if torch.are_deterministic_algorithms_enabled() != enabled:
                        wrong.append(f"expected {enabled}")
                    time.sleep(1e-5)

    threads = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_step_may_wait_for_the_lock_that_another_thread_switches_under() -> None:
    """The other thread waits for steps to end, and this one's step for the lock: neither may wait forever."""
    in_a_step, is_switched = threading.Event(), threading.Event()

    def switch() -> None:
        in_a_step.wait()
        with deterministic_algorithms(True):
            is_switched.set()

    thread = threading.Thread(target=switch)
    thread.start()
    with deterministic_algorithms(False):
        with process_lock:
            in_a_step.set()
            assert not is_switched.wait(0.02)
        while not is_switched.is_set():
            with process_lock:
                pass
        thread.join(10)
    assert not thread.is_alive()
    assert not torch.are_deterministic_algorithms_enabled()


class _SeesSearch(TorchDispatchMode):
    """Notes for each operator whether cuDNN would search for its algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.searched: list[bool] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.searched.append(torch.backends.cudnn.benchmark)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("wanted", "groups", "channels", "searches"),
    [(True, 1, 4, True), (True, 2, 2, True), (True, 4, 1, False), (False, 1, 4, False)],
    ids=["dense", "grouped", "depthwise", "not wanted"],
)
def test_convolutions_are_searched_for_unless_depthwise(
    wanted: bool, groups: int, channels: int, searches: bool
) -> None:
    data, weight = torch.randn(1, 4, 5, 5), torch.randn(4, channels, 3, 3)
    shape = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    was = torch.backends.cudnn.benchmark
    with _SeesSearch() as seen, measured_convolutions(wanted):
        out = torch.ops.aten.convolution(data, weight, *shape)
        torch.ops.aten.convolution_backward(out, data, weight, *shape, [True, True, False])
    assert seen.searched == [searches, searches]
    assert torch.backends.cudnn.benchmark == was
