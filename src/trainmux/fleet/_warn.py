"""Warnings that point at the user's line, however deep in the package they arise."""

from __future__ import annotations

import sys
import warnings

from trainmux.errors import TrainmuxWarning


def warn_user(text: str) -> None:
    """Issue a ``TrainmuxWarning`` at the nearest caller outside this package."""
    level = 1
    frame = sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("trainmux."):
        frame = frame.f_back
        level += 1
    warnings.warn(text, TrainmuxWarning, stacklevel=level)
