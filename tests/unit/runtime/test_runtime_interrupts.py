"""A Ctrl-C waits for the end of the step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from trainmux.runtime import deferred_interrupts


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    """Start from Python's own handler, whatever the test runner installed, and put that one back."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_nothing_happens_without_a_signal() -> None:
    with deferred_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def step(done: list[str], *, signals: int = 1, fails: bool = False) -> None:
    """A step during which signals arrive."""
    with deferred_interrupts():
        for _ in range(signals):
            interrupt()
        done.append("step")
        if fails:
            raise ValueError("step failed")


def test_a_signal_is_raised_at_the_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        step(done)
    assert done == ["step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_several_signals_are_raised_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        step([], signals=2)
    step([], signals=0)


def test_an_exception_passes_and_the_handler_is_put_back() -> None:
    with pytest.raises(ValueError, match="step failed"):
        step([], signals=0, fails=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_signal_before_an_exception_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        step([], fails=True)
    assert isinstance(raised.value.__context__, ValueError)


def test_nested_the_outermost_end_raises() -> None:
    done: list[str] = []

    def nested() -> None:
        with deferred_interrupts():
            step(done)
            done.append("between")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ["step", "between"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_is_left_in_place() -> None:
    received = []
    signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum))
    own = signal.getsignal(signal.SIGINT)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is own
        interrupt()
        assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_leave_the_handler_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
