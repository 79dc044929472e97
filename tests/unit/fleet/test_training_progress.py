"""What progress shows, and where."""

from __future__ import annotations

import io
import math
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.errors import ConfigError
from trainmux.fleet import _progress as progress
from trainmux.fleet._fit import Speed
from trainmux.fleet._progress import (
    Snapshot,
    member_rows,
    plain_line,
)


def snapshot(losses: dict[str, float] | None = None, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "epoch": 2,
        "num_epochs": 5,
        "step": 120,
        "num_steps": None,
        "remaining_steps": 500,
        "steps_per_s": 41.23,
        "losses": losses if losses is not None else {"a": 0.5, "b": 0.25},
        "stopped": {},
    }
    return Snapshot(**{**fields, **changes})


def test_headline() -> None:
    assert snapshot().headline() == "epoch 2/5, step 120, 41.2 steps/s, 0:00:12 left"
    assert snapshot(steps_per_s=None, num_epochs=None, num_steps=300).headline() == "epoch 2, step 120/300"
    assert snapshot(remaining_steps=None).headline().endswith("steps/s")


def test_all_members_in_their_order() -> None:
    rows = member_rows(snapshot(stopped={"a": "not finite at step 3"}), 10)
    assert rows == [("a", "0.5000", "not finite at step 3"), ("b", "0.2500", "")]


def test_best_and_worst_when_there_are_too_many() -> None:
    losses = {f"m{index}": float(index) for index in range(20)}
    losses["broken"] = math.nan
    rows = member_rows(snapshot(losses), 6)
    assert [row[0] for row in rows] == ["m0", "m1", "m2", "… 16 more", "m19", "broken"]


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=40), st.integers(-3, 50))
def test_every_member_is_shown_or_counted(losses: list[float], max_rows: int) -> None:
    named = {f"m{index}": loss for index, loss in enumerate(losses)}
    rows = [row[0] for row in member_rows(snapshot(named), max_rows)]
    num_hidden = sum(int(row.split()[1]) for row in rows if row not in named)
    assert len(rows) == len(set(rows)) <= max(max_rows, 3)
    assert sum(row in named for row in rows) + num_hidden == len(losses)
    assert plain_line(snapshot(named)).isascii()


def test_names_cannot_steer_the_terminal() -> None:
    assert member_rows(snapshot({"a\x1b[2J\nb": 1.0}), 5)[0][0] == "a?[2J?b"


def test_plain_line() -> None:
    line = plain_line(snapshot({"a": 0.5, "b": 0.25, "c": math.nan}, stopped={"c": "x", "gone": "x"}))
    assert line == (
        "epoch 2/5, step 120, 41.2 steps/s, 0:00:12 left, loss 0.2500 (b) to nan (c), 1 of 3 stopped"
    )


def test_speed() -> None:
    now = [0.0]
    speed = Speed(100, lambda: now[0])
    assert speed.steps_per_s is None
    now[0] = 2.0
    speed.update(120)
    assert speed.steps_per_s == 10.0
    now[0] = 50.0
    speed.update(120)  # no steps: a pause is not a slow step
    assert speed.steps_per_s == 10.0
    now[0] = 51.0
    speed.update(140)
    assert speed.steps_per_s == pytest.approx(13.0)


# ---- displays


def test_plain_display_writes_seldom() -> None:
    now = [0.0]
    stream = io.StringIO()
    stream_encoding = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = progress.PlainDisplay(5.0, stream, lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        display.update(snapshot())
    assert stream.getvalue().count("\n") == 2
    display.end_epoch(snapshot())
    assert stream.getvalue().endswith("epoch done\n")
    narrow = progress.PlainDisplay(0.0, stream_encoding)
    narrow.update(snapshot({"名": 1.0}))
    stream_encoding.seek(0)
    assert "(?)" in stream_encoding.read()


def test_closed_pipe_is_no_error() -> None:
    class Closed(io.StringIO):
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise BrokenPipeError

    display = progress.PlainDisplay(0.0, Closed())
    display.update(snapshot())
    assert not display.wants_updates
    display.update(snapshot())
    stream = io.StringIO()
    stream.close()
    progress.PlainDisplay(0.0, stream).update(snapshot())


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_choice_of_display(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    assert type(progress.open_display("off")) is progress.Display
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(progress.open_display("auto")) is progress.PlainDisplay
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert type(progress.open_display("auto")) is progress.RichDisplay
    assert type(progress.open_display("plain")) is progress.PlainDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert type(progress.open_display("auto")) is progress.PlainDisplay


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert type(progress.open_display("auto")) is progress.PlainDisplay
    with pytest.raises(ConfigError, match="pip install"):
        progress.open_display("rich")


def test_rich_display_restores_the_terminal() -> None:
    console_module = pytest.importorskip("rich.console")
    stream = io.StringIO()
    console = console_module.Console(
        file=stream, force_terminal=True, width=60, height=12, _environ={"TERM": "xterm"}
    )
    display = progress.RichDisplay(console)
    losses = {f"[red]m{index}": float(index) for index in range(30)}

    def show_and_fail() -> None:
        with display:
            display.update(snapshot(losses, stopped={"[red]m0": "stopped"}))
            display.message("a member stopped")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        show_and_fail()
    shown = stream.getvalue()
    assert "[red]m0" in shown
    assert "… 25 more" in shown
    assert "epoch 2/5" in shown
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert hide in shown
    assert shown.rindex(show) > shown.rindex(hide)
