"""Calls of a study's storage that are made again while the storage is out of reach."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import optuna

from trainmux.errors import SearchError, first_line

T = TypeVar("T")

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_SLOW_S = 2.0
_REFUSALS = (
    optuna.exceptions.OptunaError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)
"""What storages raise although they were reached."""


class Patience:
    """Makes calls, again while the storage is out of reach; after ``limit_s`` seconds of that, only once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._out_since_s: float | None = None
        self._called_s = math.inf

    @property
    def is_slow(self) -> bool:
        """Whether the storage is out of reach, or a call takes unusually long; asked from any thread."""
        return self._out_since_s is not None or time.monotonic() - self._called_s > _SLOW_S

    def __call__(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        wait_s = _FIRST_WAIT_S
        while True:
            self._called_s = time.monotonic()
            try:
                found = call(*args, **kwargs)
            except Exception as error:
                if not is_out_of_reach(error):
                    raise
                now_s = time.monotonic()
                self._out_since_s = now_s if self._out_since_s is None else self._out_since_s
                if now_s + wait_s - self._out_since_s > self._limit_s:
                    raise SearchError(
                        f"expected the study's storage to answer, got {type(error).__name__} for "
                        f"{now_s - self._out_since_s:.0f} s: {first_line(error)}. Start the search again "
                        "when it does; what was saved in checkpoint= goes on"
                    ) from error
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self._out_since_s = None
                return found
            finally:
                self._called_s = math.inf


def is_out_of_reach(error: BaseException) -> bool:
    """Whether an error means that a storage cannot be reached, so that a later call may succeed."""
    if isinstance(error, optuna.exceptions.StorageInternalError):
        return True
    if isinstance(error, _REFUSALS):
        return False
    frame = error.__traceback__
    while frame is not None:
        if str(frame.tb_frame.f_globals.get("__name__")).startswith("optuna.storages"):
            return True
        frame = frame.tb_next
    return False
