"""The dispatcher among other threads."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

from trainmux.colocate._turns import prompt_threads


def test_threads_are_prompt_inside_and_as_before_behind() -> None:
    usual = sys.getswitchinterval()
    with prompt_threads():
        assert sys.getswitchinterval() == pytest.approx(2e-4, abs=2e-6)
        with prompt_threads():
            pass
        assert sys.getswitchinterval() == pytest.approx(2e-4, abs=2e-6)  # the outer one is still there
    assert sys.getswitchinterval() == usual


def test_an_error_and_a_shorter_interval_of_the_user_s_are_kept() -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        kept = sys.getswitchinterval()
        with contextlib.suppress(RuntimeError), prompt_threads():
            seen = sys.getswitchinterval()
            raise RuntimeError
        assert seen == sys.getswitchinterval() == pytest.approx(kept, abs=2e-6)
    finally:
        sys.setswitchinterval(usual)


def test_a_busy_thread_does_not_hold_up_another_for_long() -> None:
    """What a live view does to the dispatcher: one waits for the interpreter again and again."""

    def usual_wait() -> float:
        waits = []
        for _ in range(40):
            begin = time.perf_counter()
            time.sleep(1e-5)
            waits.append(time.perf_counter() - begin)
        return sorted(waits)[len(waits) // 2]

    over = threading.Event()

    def be_busy() -> None:
        while not over.is_set():
            sum(range(200))

    busy = threading.Thread(target=be_busy)
    busy.start()
    try:
        slow = usual_wait()
        with prompt_threads():
            prompt = usual_wait()
    finally:
        over.set()
        busy.join()
    assert prompt < slow / 3
