"""The dispatcher among other threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys

import pytest

from trainmux.colocate._threads import prompt_threads


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


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such setting")
def test_this_thread_wakes_promptly_inside_and_as_before_behind() -> None:
    slack = functools.partial(ctypes.CDLL(None).prctl, 30, 0, 0, 0, 0)
    usual = slack()
    assert usual > 1000
    with contextlib.suppress(RuntimeError), prompt_threads():
        assert slack() == 1000
        with prompt_threads():
            pass
        assert slack() == 1000
        raise RuntimeError
    assert slack() == usual
