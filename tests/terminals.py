"""A terminal in the place of stdout, for tests of what is shown while something runs."""

from __future__ import annotations

import io
import re
import sys

import pytest

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def last_frame(self) -> list[str]:
        """The lines that are left on the screen."""
        frames = re.split(r"(?:\x1b\[1A|\x1b\[2K|\r)+", self.getvalue())
        plain = (re.sub(r"\x1b\[[\d;?]*\w", "", frame).strip("\n") for frame in frames)
        return [frame for frame in plain if frame][-1].splitlines()

    def assert_left_as_it_was(self) -> None:
        assert sys.stdout is self
        assert self.getvalue().rindex(SHOW_CURSOR) > self.getvalue().rindex(HIDE_CURSOR)


def open_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 40, height: int = 12) -> Terminal:
    pytest.importorskip("rich")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(width)), ("LINES", str(height))):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return stream
