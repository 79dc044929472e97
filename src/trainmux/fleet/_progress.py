"""Displays of what is running: a live table in a terminal, plain lines elsewhere, or nothing.

No display may end a training run: one that cannot be written to (a closed pipe) falls silent. The table is
drawn by a thread of its own, so that no step waits for it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TextIO

import torch

from trainmux.errors import ConfigError
from trainmux.fleet._config import require_choice
from trainmux.runtime import device_memory
from trainmux.sizes import format_bytes

_PLAIN_EVERY_S = 5.0
_REDRAW_S = 0.5
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 16
_LINES_AROUND_TABLE = 3
"""The bar, the header, and a line for the prompt."""
_MOST_COLUMNS = 4
"""Of rows, side by side, where there are more than lines."""
_NAME_WIDTHS = (6, 28)
_NOTE_WIDTH = 30
_GAP = 2


@dataclass(frozen=True)
class Row:
    """One member or trial as shown. ``place`` is how far it is, ``look`` a style: best, dim or none."""

    name: str
    value: float | None
    curve: Sequence[float] = ()
    place: str = ""
    note: str = ""
    look: str = ""


class View(Protocol):
    """Rows and totals for displays, which may ask from another thread than the one that trains."""

    @property
    def head(self) -> str:
        """The line above the names."""
        ...

    @property
    def value_name(self) -> str: ...

    def headlines(self) -> list[str]: ...

    def line(self) -> str:
        """Everything in one line."""
        ...

    def share_done(self) -> float | None: ...

    def ranked(self, max_rows: int) -> Sequence[Any]:
        """The keys of rows, best first; more than ``max_rows`` only where none may be left out."""
        ...

    def row(self, key: Any) -> Row: ...


class Display:
    """Shows nothing. A context manager, which leaves the terminal as it was.

    ``wants_updates`` is False where no views are needed between the ends of epochs.
    """

    wants_updates = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, view: View, *, ends_epoch: bool = False) -> None:
        """Show that some steps have passed, or that an epoch has ended."""

    def follow(self, view: View) -> None:
        """Show a view that changes by itself, now and then until the end."""

    def message(self, text: str) -> None:
        """Show a line of its own."""

    def _try(self, show: Callable[[], object]) -> None:
        try:
            show()
        except (OSError, ValueError):
            self.wants_updates = False


class _Repeat:
    """Calls a function every ``every_s`` seconds from a thread, and once more at the end."""

    def __init__(self, every_s: float, call: Callable[[], object]) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every_s, call), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self, every_s: float, call: Callable[[], object]) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(every_s)
            with suppress(RuntimeError):  # what is shown was changed meanwhile: the next one will do
                call()


class PlainDisplay(Display):
    """One line every ``every_s`` seconds and at the end of each epoch."""

    wants_updates = True

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_s = time.monotonic()
        self._repeat: _Repeat | None = None

    def __exit__(self, *_: object) -> None:
        if self._repeat is not None:
            self._repeat.end()

    def show(self, view: View, *, ends_epoch: bool = False) -> None:
        if ends_epoch or time.monotonic() - self._last_s >= self._every_s:
            self.message(view.line() + (", epoch done" if ends_epoch else ""))

    def follow(self, view: View) -> None:
        self._repeat = _Repeat(self._every_s, lambda: self.message(view.line()))

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

        self._live = Live(console=Console(), auto_refresh=False, vertical_overflow="crop")
        self._view: View | None = None
        self._is_drawn = True
        self._follows = False
        self._repeat: _Repeat | None = None

    def __enter__(self) -> RichDisplay:
        self._live.start()
        self._repeat = _Repeat(_REDRAW_S, self._draw)
        return self

    def __exit__(self, *_: object) -> None:
        if self._repeat is not None:
            self._repeat.end()
        self._try(self._live.stop)

    def show(self, view: View, *, ends_epoch: bool = False) -> None:
        self._view, self._is_drawn = view, False

    def follow(self, view: View) -> None:
        self._view, self._follows = view, True

    def message(self, text: str) -> None:
        from rich.text import Text

        self._try(lambda: self._live.console.print(Text(text)))

    def _draw(self) -> None:
        view = self._view
        if view is None or (self._is_drawn and not self._follows):
            return
        self._is_drawn = True
        width, height = self._live.console.size
        table = _table(view, width, height)
        self._try(lambda: self._live.update(table, refresh=True))


def _table(view: View, width: int, height: int) -> Any:
    """The whole picture as one rich text: rich's own tables take ten times as long to draw."""
    from rich.text import Text

    # Texts, not markup: a member may be called "[red]".
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    heads = view.headlines()
    for number, head in enumerate(heads):
        text.append(f"{head}\n", "bold" if number == 0 else "")
    share = view.share_done()
    if share is not None:
        num_done = round(min(max(share, 0.0), 1.0) * min(width, 100))
        text.append("━" * num_done, "green")
        text.append("━" * (min(width, 100) - num_done) + "\n", "bright_black")
    num_lines = max(height - len(heads) - _LINES_AROUND_TABLE, 3)
    ranked = view.ranked(num_lines)
    rows = _cut(view, ranked, num_lines)
    widths = _widths(rows, view, width)
    if len(ranked) > num_lines:
        # Notes are for whoever has a line of his own.
        widths = _CellWidths(widths.name, widths.value, widths.curve, widths.place, 0)
        num_columns = min((width + _GAP) // (widths.total + 2 * _GAP), _MOST_COLUMNS)
        num_columns = max(1, min(num_columns, -(-len(ranked) // num_lines)))
        rows = _cut(view, view.ranked(num_lines * num_columns), num_lines * num_columns)
        widths = _widths(rows, view, width // num_columns - 2 * _GAP, has_notes=False)
    columns = [rows[first : first + num_lines] for first in range(0, len(rows), num_lines)]
    heading = widths.text(view.head, view.value_name, "", "", "")
    text.append((" " * 2 * _GAP).join([heading] * len(columns)).rstrip() + "\n", "dim")
    for line in range(len(columns[0]) if columns else 0):
        for number, column in enumerate(columns):
            if line < len(column):
                text.append(" " * 2 * _GAP if number else "")
                _append(text, column[line], widths)
        text.append("\n")
    text.right_crop(1)
    return text


def _append(text: Any, row: Row, widths: _CellWidths) -> None:
    style = {"best": "bold green", "dim": "dim"}.get(row.look, "")
    value = "" if row.value is None else value_text(row.value)
    name, value, curve, place, note = widths.cells(row.name, value, sparkline(row.curve), row.place, row.note)
    text.append(name + value, style)
    text.append(curve, "dim cyan" if row.look == "dim" else "cyan")
    text.append(place + note, style or "dim")


@dataclass(frozen=True)
class _CellWidths:
    """Cells of a line; a cell of width 0 is left out."""

    name: int
    value: int
    curve: int
    place: int
    note: int

    @property
    def total(self) -> int:
        parts = (self.name, self.value, self.curve, self.place, self.note)
        return sum(parts) + _GAP * (sum(map(bool, parts)) - 1)

    def cells(self, name: str, value: str, curve: str, place: str, note: str) -> list[str]:
        from rich.cells import set_cell_size

        def fit(content: str, width: int) -> str:
            if not width:
                return ""
            if len(content) > width:
                content = content[: width - 1] + "…"
            return set_cell_size(content, width)

        gap = " " * _GAP
        after = [fit(curve, self.curve), fit(place.rjust(self.place), self.place), fit(note, self.note)]
        value = gap + fit(value.rjust(self.value), self.value)
        return [fit(name, self.name), value, *(gap + cell if cell else "" for cell in after)]

    def text(self, *cells: str) -> str:
        return "".join(self.cells(*cells))


def _widths(rows: Sequence[Row], view: View, width: int, *, has_notes: bool = True) -> _CellWidths:
    """Widths that hold these rows; where the terminal is narrow, without curves, places, long names."""
    values = ["" if row.value is None else value_text(row.value) for row in rows]
    value = max([len(view.value_name), 8, *map(len, values)])
    least, most = _NAME_WIDTHS
    name = min(max([least, len(view.head), *(len(row.name) for row in rows)]), most)
    place = max((len(row.place) for row in rows), default=0)
    note = min(max((len(row.note) for row in rows), default=0), _NOTE_WIDTH) if has_notes else 0
    curve = _CURVE_WIDTH if any(len(row.curve) > 1 for row in rows) else 0
    found = _CellWidths(name, value, curve, place, note)
    for less in ({"note": 0}, {"curve": _CURVE_WIDTH // 2}, {"curve": 0}, {"place": 0}):
        if found.total <= width:
            break
        found = _CellWidths(
            **{**vars(found), **{key: min(vars(found)[key], most) for key, most in less.items()}}
        )
    short = found.total - width
    return _CellWidths(max(found.name - max(short, 0), least), *list(vars(found).values())[1:])


def _cut(view: View, ranked: Sequence[Any], max_rows: int) -> list[Row]:
    """The rows of as many as there is room for: the best, how many are left out, and the worst."""
    if len(ranked) <= max_rows:
        return [view.row(key) for key in ranked]
    num_worst = max_rows // 4
    num_best, num_hidden = max_rows - 1 - num_worst, len(ranked) - max_rows + 1
    best, worst = ranked[:num_best], ranked[len(ranked) - num_worst :]
    more = Row(f"… {num_hidden} more", None, look="dim")
    return [*map(view.row, best), more, *map(view.row, worst)]


def sparkline(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """The course of some values in so many letters at most; on a logarithmic scale where all are positive."""
    count = len(values)
    if count > width:
        values = [values[(place + 1) * count // width - 1] for place in range(width)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    scale = math.log if min(finite) > 0 else float
    low, high = scale(min(finite)), scale(max(finite))
    unit = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((scale(value) - low) * unit)] if math.isfinite(value) else " " for value in values
    )


def value_text(value: float) -> str:
    """Four significant digits, in a width that does not jump about."""
    return f"{value:.4g}" if value == 0 or not 1e-3 <= abs(value) < 1e4 else f"{value:#.4g}".rstrip(".")


def rate_text(rate: float, unit: str) -> str:
    """``41.2 steps/s``, ``1240 trials/h``."""
    return f"{rate:.3g} {unit}" if rate < 100 else f"{rate:.0f} {unit}"


def left_text(seconds: float) -> str:
    """``0:12:30 left``."""
    return f"{timedelta(seconds=round(seconds))} left"


def memory_text(device: torch.device) -> str | None:
    """``device 12.30 of 139.81 GiB``; ``None`` where that is not known."""
    memory = device_memory(device)
    if memory is None:
        return None
    used, total = map(format_bytes, memory)
    return f"device {used.removesuffix(' GiB')} of {total}"


def printable(name: str) -> str:
    """``name`` without what would break a line or steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether the live table can be drawn there: a terminal that moves its cursor and knows Unicode."""
    try:
        if stream is None or not stream.isatty():
            return False
        return os.environ.get("TERM") != "dumb" and (stream.encoding or "").lower().startswith("utf")
    except ValueError:  # a closed stream
        return False


def open_display(progress: str, *, every_update: bool = False) -> Display:
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


def progress_setting(progress: str | bool) -> str:
    """Read ``progress=``; refuse what it does not know."""
    setting = progress if isinstance(progress, str) else "auto" if progress else "off"
    require_choice("progress", setting, ("auto", "rich", "plain", "off"))
    return setting
