"""Something better in the making: traced by the caller, worked on by a thread, failures said once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from trainmux.errors import TrainmuxWarning
from trainmux.fleet._background import Upgrade


def nothing() -> None:
    pass


def test_only_the_work_is_on_a_thread() -> None:
    threads: dict[str, threading.Thread] = {}

    def note(name: str) -> None:
        threads[name] = threading.current_thread()

    def finish() -> int:
        note("finish")
        return 7

    def prepare() -> tuple[Callable[[], None], Callable[[], int]]:
        note("prepare")
        return lambda: note("work"), finish

    upgrade = Upgrade(prepare)
    assert not upgrade.is_started
    assert not threads, "expected nothing to happen before it is started"
    upgrade.start()
    upgrade.start()
    upgrade.wait()
    assert upgrade.is_ready
    assert upgrade.result() == 7
    own = threading.current_thread()
    assert threads["prepare"] is own
    assert threads["work"] is not own
    assert threads["finish"] is own


def test_it_is_not_ready_before_the_work_is_done() -> None:
    go = threading.Event()

    def work() -> None:
        assert go.wait(10)

    upgrade = Upgrade(lambda: (work, lambda: 7))
    assert not upgrade.is_ready
    upgrade.start()
    assert not upgrade.is_ready
    go.set()
    assert upgrade.result() == 7
    assert upgrade.is_ready


def test_asking_for_the_result_starts_it() -> None:
    assert Upgrade(lambda: (nothing, lambda: 7)).result() == 7


@pytest.mark.parametrize("where", ["prepare", "work", "finish"])
def test_a_failure_is_said_when_it_is_asked_for(where: str) -> None:
    def fail(name: str) -> None:
        if name == where:
            raise ValueError("no room")

    def finish() -> int:
        fail("finish")
        return 7

    def prepare() -> tuple[Callable[[], None], Callable[[], int]]:
        fail("prepare")
        return lambda: fail("work"), finish

    upgrade = Upgrade(prepare)
    upgrade.wait()
    assert upgrade.is_ready
    with pytest.warns(TrainmuxWarning, match=r"goes on through ATen.*ValueError: no room") as told:
        assert upgrade.result() is None
    assert len(told) == 1
