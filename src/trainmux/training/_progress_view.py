"""What to show of a running fit: pure functions from numbers to texts. Drawing is ``_progress.py``'s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


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
