"""Progress of a running fit: a live table in a terminal, plain lines elsewhere, or nothing.

No display may end a training run: one that cannot be written to (a closed pipe) falls silent.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from trainmux.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_EVERY_S = 5.0
_LINES_AROUND_TABLE = 6
"""The table's borders and header, the headline, and a line for the prompt."""


@dataclass(frozen=True)
class Snapshot:
    """The fit as last seen on the host. ``remaining_steps`` and ``steps_per_s`` are None where not known."""

    epoch: int
    num_epochs: int | None
    step: int
    num_steps: int | None
    remaining_steps: int | None
    steps_per_s: float | None
    losses: Mapping[str, float]
    stopped: Mapping[str, str]

    def headline(self) -> str:
        """``epoch 2/5, step 120/500, 41.2 steps/s, 0:00:12 left``; what is not known is left out."""
        counts = (("epoch", self.epoch, self.num_epochs), ("step", self.step, self.num_steps))
        parts = [f"{what} {number}" + (f"/{total}" if total else "") for what, number, total in counts]
        rate = self.steps_per_s
        if rate:
            parts.append(f"{rate:.3g} steps/s" if rate < 100 else f"{rate:.0f} steps/s")
            if self.remaining_steps is not None:
                parts.append(f"{timedelta(seconds=round(self.remaining_steps / rate))} left")
        return ", ".join(parts)

    def ranked(self) -> list[str]:
        """The members by loss, smallest first, NaN last; equal ones in their own order."""
        return sorted(self.losses, key=lambda name: (math.isnan(self.losses[name]), self.losses[name]))


def member_rows(snapshot: Snapshot, max_rows: int) -> list[tuple[str, str, str]]:
    """One row per member, in at most ``max_rows`` (but never fewer than 3): name, loss, why it is stopped.

    Of too many members the best and the worst by loss stand around a row that counts the others.
    """
    max_rows = max(max_rows, 3)
    names = list(snapshot.losses)
    num_hidden = max(0, len(names) - max_rows + 1) if len(names) > max_rows else 0
    if num_hidden:
        names = snapshot.ranked()
    rows = [
        (printable(name), _loss_text(snapshot.losses[name]), snapshot.stopped.get(name, "")) for name in names
    ]
    if num_hidden:
        num_top = max_rows // 2
        rows[num_top : num_top + num_hidden] = [(f"… {num_hidden} more", "", "")]
    return rows


def plain_line(snapshot: Snapshot) -> str:
    """Everything in one line: the headline, the best and the worst loss, how many are stopped."""
    parts = [snapshot.headline()]
    ordered = snapshot.ranked()
    if ordered:
        ends = dict.fromkeys((ordered[0], ordered[-1]))
        parts.append(
            "loss " + " to ".join(f"{_loss_text(snapshot.losses[name])} ({printable(name)})" for name in ends)
        )
    num_stopped = sum(name in snapshot.stopped for name in snapshot.losses)
    if num_stopped:
        parts.append(f"{num_stopped} of {len(snapshot.losses)} stopped")
    return ", ".join(parts)


def printable(name: str) -> str:
    """``name`` without what would break a line or steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _loss_text(loss: float) -> str:
    """Four significant digits, in a width that does not jump about."""
    return f"{loss:.4g}" if loss == 0 or not 1e-3 <= abs(loss) < 1e4 else f"{loss:#.4g}".rstrip(".")


class Display:
    """Shows nothing. A context manager, which leaves the terminal as it was.

    ``wants_updates`` is False where no snapshots are needed between the ends of epochs.
    """

    wants_updates = False

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, snapshot: Snapshot) -> None:
        """Show that some steps have passed."""

    def end_epoch(self, snapshot: Snapshot) -> None:
        """Show that an epoch has ended."""

    def message(self, text: str) -> None:
        """Show a line of its own."""

    def _try(self, show: Callable[[], object]) -> None:
        try:
            show()
        except (OSError, ValueError):
            self.wants_updates = False


class PlainDisplay(Display):
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
        if stream is not None and self.wants_updates:  # pythonw and some services have no stdout
            # Names may hold what the stream's encoding does not have.
            encoding = stream.encoding or "utf-8"
            line = text.encode(encoding, "replace").decode(encoding)
            self._try(lambda: print(line, file=stream, flush=True))


class RichDisplay(Display):
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
        self._try(self._live.stop)

    def update(self, snapshot: Snapshot) -> None:
        from rich.table import Table
        from rich.text import Text

        # Text, not str: a member may be called "[red]", and that is not markup.
        table = Table(title=Text(snapshot.headline()), title_justify="left")
        table.add_column("member", no_wrap=True, overflow="ellipsis")
        table.add_column("loss", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, overflow="ellipsis")
        for row in member_rows(snapshot, self._console.size.height - _LINES_AROUND_TABLE):
            is_dim = bool(row[2]) or not row[1]
            table.add_row(*map(Text, row), style="dim" if is_dim else None)
        self._try(lambda: self._live.update(table, refresh=True))

    def end_epoch(self, snapshot: Snapshot) -> None:
        self.update(snapshot)

    def message(self, text: str) -> None:
        from rich.text import Text

        self._try(lambda: self._live.console.print(Text(text)))


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether the live table can be drawn there: a terminal that moves its cursor and knows Unicode."""
    try:
        if stream is None or not stream.isatty():
            return False
        return os.environ.get("TERM") != "dumb" and (stream.encoding or "").lower().startswith("utf")
    except ValueError:  # a closed stream
        return False


def open_display(progress: str, every_update: bool = False) -> Display:
    """Open the display for ``progress``; ``auto`` is a live table where stdout is a terminal with rich.

    ``every_update`` makes the plain display write a line at each update, not every few seconds.
    """
    if progress == "off":
        return Display()
    has_rich = importlib.util.find_spec("rich") is not None
    if progress == "rich" and not has_rich:
        raise ConfigError(
            "progress='rich' needs the package rich: pip install 'trainmux[cli]', or progress='plain'"
        )
    live = progress == "rich" or (progress == "auto" and has_rich and _is_terminal(sys.stdout))
    return RichDisplay() if live else PlainDisplay(every_s=0.0 if every_update else _PLAIN_EVERY_S)
