"""Progress of a fit: a live table in a terminal, plain lines elsewhere, silence where nobody can read."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from typing import Any

import pytest
from fit_cases import BATCHES, HUGE, failing_at, points
from tests.terminals import open_terminal

from trainmux.errors import ConfigError, TrainmuxWarning

pytestmark = pytest.mark.usefixtures("built_once")


def test_plain_lines_in_a_pipe_or_silence(capsys: pytest.CaptureFixture[str]) -> None:
    points().fit(BATCHES, epochs=2, progress=False)
    assert capsys.readouterr().out == ""
    points({"a": 0.1, "b\x1b[2J\n": 0.2}).fit(BATCHES, epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    pattern = (
        r"epoch {0}/2, step {1}, [\d.]+ steps/s, [\d:]+ left, loss \d.*\(b\?\[2J\?\) to \d.*\(a\), .*done"
    )
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(pattern.format(number, 3 * number), line), line


def test_frozen_members_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(TrainmuxWarning):
        points({"a": 0.1, "b": HUGE}).fit(BATCHES, epochs=1)
    out = capsys.readouterr().out
    assert "1 of 2 stopped" in out
    assert "'b' (not finite at step 2)" in out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError()], ids=repr)
def test_the_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    terminal = open_terminal(monkeypatch)
    names = {f"[red]m{index}": 0.01 * index for index in range(30)}
    with pytest.raises(type(error)):
        points(names).fit(BATCHES, epochs=4, log_every=1, callbacks=[failing_at(5, error)])
    terminal.assert_left_as_it_was()
    shown = terminal.getvalue()
    assert "epoch 2/4" in shown
    # Best and worst, by name: the best at first is the slowest; brackets are no markup.
    assert "[red]m0" in shown
    assert "[red]m15" not in shown
    assert "… 23 more" in shown


@pytest.mark.parametrize(("count", "num_hidden"), [(64, 0), (500, 397)])
def test_many_members_stand_side_by_side(
    monkeypatch: pytest.MonkeyPatch, count: int, num_hidden: int
) -> None:
    terminal = open_terminal(monkeypatch, 160, 30)
    points({f"m{index}": 0.001 * index for index in range(count)}).fit(BATCHES, epochs=1)
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", terminal.getvalue().rpartition("epoch 1/1")[2])
    assert len({int(name) for name in re.findall(r"\bm(\d+)\b", shown)}) == count - num_hidden
    assert (f"… {num_hidden} more" in shown) == bool(num_hidden)
    assert max(map(len, shown.splitlines())) <= 160


@pytest.mark.parametrize("how", ["no rich", "dumb terminal", "plain"])
def test_plain_lines_in_a_terminal(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    fleet, terminal = points(), open_terminal(monkeypatch)
    if how == "dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    if how == "no rich":
        original = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name == "rich" else original(name, *more)
        )
        with pytest.raises(ConfigError, match="pip install"):
            fleet.fit(BATCHES, epochs=1, progress="rich")
        assert fleet.num_steps == 0
    fleet.fit(BATCHES, epochs=1, progress="plain" if how == "plain" else "auto")
    shown = terminal.getvalue()
    assert shown.startswith("epoch 1/1, step 3")
    assert "\x1b" not in shown


class Closed(io.StringIO):
    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_stream_that_cannot_be_written_ends_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    closed = io.StringIO()
    closed.close()
    for stream in (Closed(), closed, None, narrow):
        fleet: Any = points({"名": 0.1})
        monkeypatch.setattr(sys, "stdout", stream)
        fleet.fit(BATCHES, epochs=2, log_every=1)
        assert fleet.num_steps == 6
    narrow.seek(0)
    assert "(?)" in narrow.read()
