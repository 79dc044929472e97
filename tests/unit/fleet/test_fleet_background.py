"""Something better in the making: made on a thread, finished on the caller's, failures said once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from trainmux.errors import TrainmuxWarning
from trainmux.fleet._background import Upgrade


def test_it_is_prepared_on_a_thread_and_finished_on_the_callers() -> None:
    threads: list[threading.Thread] = []

    def prepare() -> Callable[[], int]:
        threads.append(threading.current_thread())

        def finish() -> int:
            threads.append(threading.current_thread())
            return 7

        return finish

    upgrade = Upgrade(prepare)
    upgrade.wait()
    assert upgrade.is_ready
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert upgrade.result() == 7
    assert threads[1] is threading.current_thread()


def test_it_is_not_ready_before_it_is_prepared() -> None:
    go = threading.Event()

    def prepare() -> Callable[[], int]:
        assert go.wait(10)
        return lambda: 7

    upgrade = Upgrade(prepare)
    assert not upgrade.is_ready
    go.set()
    assert upgrade.result() == 7
    assert upgrade.is_ready


def test_a_failed_preparation_is_said_when_it_is_asked_for() -> None:
    def prepare() -> Callable[[], int]:
        raise ValueError("no room")

    upgrade = Upgrade(prepare)
    upgrade.wait()
    with pytest.warns(TrainmuxWarning, match=r"goes on through ATen.*ValueError: no room") as told:
        assert upgrade.result() is None
    assert len(told) == 1


def test_a_failed_finish_is_said() -> None:
    def finish() -> int:
        raise RuntimeError("no compiler")

    upgrade = Upgrade(lambda: finish)
    with pytest.warns(TrainmuxWarning, match="RuntimeError: no compiler") as told:
        assert upgrade.result() is None
    assert len(told) == 1
