"""Draws a running fit: a live table in a terminal, plain lines elsewhere, or nothing.

No display may end a training run: one that cannot be written to (a closed pipe) falls silent.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from trainmux.errors import ConfigError
from trainmux.training._options import Progress
from trainmux.training._progress_view import ProgressView, Snapshot, plain_line, progress_view

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_EVERY_S = 5.0
# The table's borders and header, the headline, and a line for the prompt.
_LINES_AROUND_TABLE = 6


class Display(Protocol):
    """Shows snapshots. A context manager, which leaves the terminal as it was.

    ``wants_updates`` is False where no snapshots are needed between the ends of epochs.
    """

    wants_updates: bool

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, snapshot: Snapshot) -> None:
        """Some steps have passed."""

    def end_epoch(self, snapshot: Snapshot) -> None:
        """An epoch has ended."""

    def message(self, text: str) -> None:
        """Something worth a line of its own."""


def open_display(progress: Progress, every_update: bool = False) -> Display:
    """The display for ``progress``; ``auto`` is a live table where stdout is a terminal and rich is there.

    ``every_update`` makes the plain display write a line at each update, not every few seconds.
    """
    if progress == "off":
        return SilentDisplay()
    has_rich = importlib.util.find_spec("rich") is not None
    if progress == "rich" and not has_rich:
        raise ConfigError(
            "progress='rich' needs the package rich: pip install 'trainmux[cli]', or progress='plain'"
        )
    live = progress == "rich" or (progress == "auto" and has_rich and _is_terminal(sys.stdout))
    return RichDisplay() if live else PlainDisplay(every_s=0.0 if every_update else _PLAIN_EVERY_S)


class SilentDisplay:
    """Shows nothing."""

    wants_updates = False

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, snapshot: Snapshot) -> None:
        return None

    def end_epoch(self, snapshot: Snapshot) -> None:
        return None

    def message(self, text: str) -> None:
        return None


class PlainDisplay(SilentDisplay):
    """One line every ``every_s`` seconds and at the end of each epoch."""

    wants_updates = True

    def __init__(
        self,
        every_s: float = _PLAIN_EVERY_S,
        stream: TextIO | None = None,
        time_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = every_s
        self._stream = stream
        self._time_s = time_s
        self._last_s = time_s()

    def update(self, snapshot: Snapshot) -> None:
        if self._time_s() - self._last_s >= self._every_s:
            self.message(plain_line(snapshot))

    def end_epoch(self, snapshot: Snapshot) -> None:
        self.message(plain_line(snapshot) + ", epoch done")

    def message(self, text: str) -> None:
        self._last_s = self._time_s()
        stream = self._stream or sys.stdout
        if stream is None or not self.wants_updates:  # pythonw and some services have no stdout
            return
        try:
            # Names may hold what the stream's encoding does not have.
            encoding = stream.encoding or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
        except (OSError, ValueError):
            self.wants_updates = False


class RichDisplay(SilentDisplay):
    """A table that is redrawn in place. Needs rich."""

    wants_updates = True

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        # Redrawn by us alone: a refresh thread would only repeat what has not changed.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> RichDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._live.stop()
        except (OSError, ValueError):
            self.wants_updates = False

    def update(self, snapshot: Snapshot) -> None:
        view = progress_view(snapshot, self._console.size.height - _LINES_AROUND_TABLE)
        try:
            self._live.update(_table(view), refresh=True)
        except (OSError, ValueError):
            self.wants_updates = False

    def end_epoch(self, snapshot: Snapshot) -> None:
        self.update(snapshot)

    def message(self, text: str) -> None:
        from rich.text import Text

        try:
            self._live.console.print(Text(text))
        except (OSError, ValueError):
            self.wants_updates = False


def _table(view: ProgressView) -> Table:
    from rich.table import Table
    from rich.text import Text

    # Text, not str: a member may be called "[red]", and that is not markup.
    table = Table(title=Text(view.headline), title_justify="left")
    table.add_column("member", no_wrap=True, overflow="ellipsis")
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for row in view.top:
        table.add_row(Text(row.name), Text(row.loss), Text(row.mark), style="dim" if row.mark else None)
    if view.num_hidden:
        table.add_row(Text(f"… {view.num_hidden} more"), Text(""), Text(""), style="dim")
    for row in view.bottom:
        table.add_row(Text(row.name), Text(row.loss), Text(row.mark), style="dim" if row.mark else None)
    return table


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether the live table can be drawn there: a terminal that moves its cursor and knows Unicode."""
    try:
        if stream is None or not stream.isatty():
            return False
        return os.environ.get("TERM") != "dumb" and (stream.encoding or "").lower().startswith("utf")
    except ValueError:  # a closed stream
        return False
