"""fit with its displays."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from training_fakes import FakeFleet

from trainmux.errors import TrainmuxWarning
from trainmux.fleet._fit import fit

BATCHES = [torch.tensor([1.0]), torch.tensor([2.0])]


def test_plain_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    fit(FakeFleet({"a": 0.1, "b": 0.2}), BATCHES, epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/2, step 2")
    assert lines[1].startswith("epoch 2/2, step 4")
    assert "loss " in lines[1]


def test_log_every_writes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    fit(FakeFleet({"a": 0.1}), BATCHES * 3, epochs=1, log_every=2, progress="plain")
    assert [line.split(",")[1].strip() for line in capsys.readouterr().out.splitlines()] == [
        "step 2",
        "step 4",
        "step 6",
        "step 6",
    ]


def test_silent(capsys: pytest.CaptureFixture[str]) -> None:
    fit(FakeFleet({"a": 0.1}), BATCHES, epochs=2, progress=False)
    assert capsys.readouterr().out == ""


def test_frozen_members_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(TrainmuxWarning):
        fit(FakeFleet({"a": 0.1, "b": 0.1}, poison={"b": 1}), BATCHES, epochs=1)
    out = capsys.readouterr().out
    assert "1 of 2 stopped" in out
    assert "'b' (not finite at step 1)" in out


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_live_table_is_left_properly(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    fleet = FakeFleet({"a": 0.1})
    fleet.fail_at[5] = error()
    with pytest.raises(error):
        fit(fleet, BATCHES, epochs=4, log_every=1)
    assert sys.stdout is stream
    shown = stream.getvalue()
    assert "epoch 2/4" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_remaining_steps_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    fit(FakeFleet({"a": 0.1}), BATCHES, steps=3, progress="plain")
    last = capsys.readouterr().out.splitlines()[-1]
    assert "step 3/3" in last
    assert "0:00 left" in last
