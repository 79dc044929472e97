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
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from trainmux.errors import ConfigError
from trainmux.fleet._fit_options import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_EVERY_S = 5.0
# The table's borders and header, the headline, and a line for the prompt.
_LINES_AROUND_TABLE = 6


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


@dataclass(frozen=True)
class MemberRow:
    """One member's line: its loss as text, and why it is stopped (empty while it trains)."""

    name: str
    loss: str
    mark: str


@dataclass(frozen=True)
class ProgressView:
    """A headline and the members' lines. ``num_hidden`` members are left out between ``top`` and ``bottom``.

    When nothing is hidden, ``top`` has all members in their own order and ``bottom`` none; otherwise ``top``
    are the best and ``bottom`` the worst, by loss.
    """

    headline: str
    top: tuple[MemberRow, ...]
    num_hidden: int
    bottom: tuple[MemberRow, ...]


def progress_view(snapshot: Snapshot, max_rows: int) -> ProgressView:
    """The view in at most ``max_rows`` lines below the headline (but never fewer than 3)."""
    max_rows = max(max_rows, 3)
    names = list(snapshot.losses)
    if len(names) <= max_rows:
        return ProgressView(headline(snapshot), tuple(_row(snapshot, name) for name in names), 0, ())
    ordered = ranked(snapshot)
    num_shown = max_rows - 1  # one line says how many are left out
    num_top = (num_shown + 1) // 2
    num_bottom = num_shown - num_top
    return ProgressView(
        headline=headline(snapshot),
        top=tuple(_row(snapshot, name) for name in ordered[:num_top]),
        num_hidden=len(names) - num_shown,
        bottom=tuple(_row(snapshot, name) for name in ordered[len(ordered) - num_bottom :]),
    )


def headline(snapshot: Snapshot) -> str:
    """``epoch 2/5, step 120/500, 41.2 steps/s, 0:12 left``; what is not known is left out."""
    parts = [
        _of("epoch", snapshot.epoch, snapshot.num_epochs),
        _of("step", snapshot.step, snapshot.num_steps),
    ]
    rate = snapshot.steps_per_s
    if rate:
        parts.append(f"{rate:.3g} steps/s" if rate < 100 else f"{rate:.0f} steps/s")
        if snapshot.remaining_steps is not None:
            parts.append(f"{clock(snapshot.remaining_steps / rate)} left")
    return ", ".join(parts)


def plain_line(snapshot: Snapshot) -> str:
    """Everything in one line: the headline, the best and the worst loss, how many are stopped."""
    parts = [headline(snapshot)]
    ordered = ranked(snapshot)
    if ordered:
        best, worst = ordered[0], ordered[-1]
        parts.append(f"loss {format_loss(snapshot.losses[best])} ({printable(best)})")
        if worst != best:
            parts[-1] += f" to {format_loss(snapshot.losses[worst])} ({printable(worst)})"
    num_stopped = sum(name in snapshot.stopped for name in snapshot.losses)
    if num_stopped:
        parts.append(f"{num_stopped} of {len(snapshot.losses)} stopped")
    return ", ".join(parts)


def ranked(snapshot: Snapshot) -> list[str]:
    """The members by loss, smallest first, NaN last; equal ones in their own order."""
    losses = snapshot.losses
    return sorted(losses, key=lambda name: (math.isnan(losses[name]), losses[name]))


def format_loss(loss: float) -> str:
    """Four significant digits, in a width that does not jump about."""
    return f"{loss:.4g}" if loss == 0 or not 1e-3 <= abs(loss) < 1e4 else f"{loss:#.4g}".rstrip(".")


def printable(name: str) -> str:
    """``name`` without what would break a line or steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def clock(seconds: float) -> str:
    """``0:07``, ``12:30``, ``3:05:00``, ``2d 03:05:00``."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _row(snapshot: Snapshot, name: str) -> MemberRow:
    return MemberRow(printable(name), format_loss(snapshot.losses[name]), snapshot.stopped.get(name, ""))


def _of(what: str, number: int, total: int | None) -> str:
    return f"{what} {number}" if total is None else f"{what} {number}/{total}"


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
        if stream is None or not self.wants_updates:  # pythonw and some services have no stdout
            return
        try:
            # Names may hold what the stream's encoding does not have.
            encoding = stream.encoding or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
        except (OSError, ValueError):
            self.wants_updates = False


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


def open_display(progress: Progress, every_update: bool = False) -> Display:
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
