"""A Ctrl-C waits for the end of the step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext

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


def step(done: list[str], *, signals: int = 1, fails: bool = False) -> None:
    """A step during which signals arrive."""
    with deferred_interrupts():
        for _ in range(signals):
            interrupt()
        done.append("step")
        if fails:
            raise ValueError("step failed")


@pytest.mark.parametrize(
    ("signals", "fails", "raised"),
    [
        (0, False, None),
        (0, True, ValueError),
        (1, False, KeyboardInterrupt),
        (2, False, KeyboardInterrupt),
        (1, True, KeyboardInterrupt),
    ],
)
def test_signals_are_raised_once_at_the_end(
    signals: int, fails: bool, raised: type[BaseException] | None
) -> None:
    done: list[str] = []
    with pytest.raises(raised) if raised else nullcontext():
        step(done, signals=signals, fails=fails)
    assert done == ["step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step([], signals=0)


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


def test_handlers_of_others_are_left_in_place() -> None:
    received = []
    for handler in (signal.SIG_IGN, lambda signum, frame: received.append(signum)):
        signal.signal(signal.SIGINT, handler)
        with deferred_interrupts():
            assert signal.getsignal(signal.SIGINT) is handler
            interrupt()
        assert signal.getsignal(signal.SIGINT) is handler
    assert received == [signal.SIGINT]


def test_other_threads_leave_the_handler_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
