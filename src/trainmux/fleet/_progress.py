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
from typing import TextIO

from trainmux.errors import ConfigError
from trainmux.fleet._callbacks import FitState

_PLAIN_EVERY_S = 5.0
_LINES_AROUND_TABLE = 6
"""The table's borders and header, the headline, and a line for the prompt."""


@dataclass(frozen=True)
class Snapshot:
    """The fit as last seen on the host. ``remaining_steps`` and ``steps_per_s`` are None where not known."""

    state: FitState
    losses: Mapping[str, float]
    steps_per_s: float | None
    remaining_steps: int | None

    def headline(self) -> str:
        """``epoch 2/5, step 120/500, 41.2 steps/s, 0:00:12 left``; what is not known is left out."""
        state, rate = self.state, self.steps_per_s
        counts = (("epoch", state.epoch, state.num_epochs), ("step", state.step, state.num_steps))
        parts = [f"{what} {number}" + (f"/{total}" if total else "") for what, number, total in counts]
        if rate:
            parts.append(f"{rate:.3g} steps/s" if rate < 100 else f"{rate:.0f} steps/s")
            if self.remaining_steps is not None:
                parts.append(f"{timedelta(seconds=round(self.remaining_steps / rate))} left")
        return ", ".join(parts)

    def ranked(self) -> list[str]:
        """The members by loss, smallest first, NaN last; equal ones in their own order."""
        return sorted(self.losses, key=lambda name: (math.isnan(self.losses[name]), self.losses[name]))

    def rows(self, max_rows: int) -> list[tuple[str, str, str]]:
        """Name, loss and why it is stopped of each member, in at most ``max_rows`` rows (but at least 3).

        Of too many members the best and the worst by loss stand around a row that counts the others.
        """
        max_rows, stopped = max(max_rows, 3), self.state.stopped
        is_cut = len(self.losses) > max_rows
        names = self.ranked() if is_cut else list(self.losses)
        rows = [(printable(name), _loss_text(self.losses[name]), stopped.get(name, "")) for name in names]
        if is_cut:
            num_top, num_hidden = max_rows // 2, len(names) - max_rows + 1
            rows[num_top : num_top + num_hidden] = [(f"… {num_hidden} more", "", "")]
        return rows

    def line(self) -> str:
        """Everything in one line: the headline, the best and the worst loss, how many are stopped."""
        parts, ordered = [self.headline()], self.ranked()
        if ordered:
            ends = dict.fromkeys((ordered[0], ordered[-1]))
            losses = [f"{_loss_text(self.losses[name])} ({printable(name)})" for name in ends]
            parts.append("loss " + " to ".join(losses))
        num_stopped = sum(name in self.state.stopped for name in self.losses)
        if num_stopped:
            parts.append(f"{num_stopped} of {len(self.losses)} stopped")
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

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, snapshot: Snapshot, *, ends_epoch: bool = False) -> None:
        """Show that some steps have passed, or that an epoch has ended."""

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

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_s = time.monotonic()

    def show(self, snapshot: Snapshot, *, ends_epoch: bool = False) -> None:
        if ends_epoch or time.monotonic() - self._last_s >= self._every_s:
            self.message(snapshot.line() + (", epoch done" if ends_epoch else ""))

    def message(self, text: str) -> None:
        self._last_s = time.monotonic()
        stream = sys.stdout
        if stream is not None and self.wants_updates:  # pythonw and some services have no stdout
            # Names may hold what the stream's encoding does not have.
            encoding = stream.encoding or "utf-8"
            line = text.encode(encoding, "replace").decode(encoding)
            self._try(lambda: print(line, file=stream, flush=True))


class RichDisplay(Display):
    """A table that is redrawn in place. Needs rich."""

    wants_updates = True

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # Redrawn by us alone: a refresh thread would only repeat what has not changed.
        self._live = Live(console=Console(), auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> RichDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._try(self._live.stop)

    def show(self, snapshot: Snapshot, *, ends_epoch: bool = False) -> None:
        from rich.table import Table
        from rich.text import Text

        # Text, not str: a member may be called "[red]", and that is not markup.
        table = Table(title=Text(snapshot.headline()), title_justify="left")
        table.add_column("member", no_wrap=True, overflow="ellipsis")
        table.add_column("loss", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, overflow="ellipsis")
        for row in snapshot.rows(self._live.console.size.height - _LINES_AROUND_TABLE):
            is_dim = bool(row[2]) or not row[1]
            table.add_row(*map(Text, row), style="dim" if is_dim else None)
        self._try(lambda: self._live.update(table, refresh=True))

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


def open_display(progress: str, *, every_update: bool) -> Display:
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
    return RichDisplay() if live else PlainDisplay(0.0 if every_update else _PLAIN_EVERY_S)
