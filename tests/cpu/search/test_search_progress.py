"""What is shown of a search: a live table, best trial first, in terminals of any size; lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.terminals import open_terminal
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

LOADER = [torch.ones(1, 1)]


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def make(number: int, lr: float = 0.1, weight: float = 0.0) -> tm.Candidate:
    """A trial whose loss in its first epoch is the square of its number, counted from 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight or number + 1.0)
    return tm.Candidate(tm.Member(model, torch.optim.SGD(model.parameters(), lr=lr), name=f"[m{number}]"))


def run(count: int, **options: Any) -> tm.Results:
    members = [partial(make, number) for number in reversed(range(count))]
    return tm.sweep(members, **{"loss": square, "loader": LOADER, "slots": 8, **options})


@pytest.mark.parametrize(("width", "height"), [(30, 8), (80, 24), (200, 50)])
def test_the_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int, height: int) -> None:
    terminal = open_terminal(monkeypatch, width, height)
    run(64, slots=32, max_epochs=2)
    frame = terminal.last_frame()
    assert len(frame) < height
    assert max(map(len, frame)) <= width
    assert frame[0].startswith("trial 64/64: 64 complete")
    names = re.findall(r"\[m(\d+)\]", "\n".join(frame))
    # The best ones, best first, though they came last: as many as there are lines for.
    assert [int(name) for name in names] == list(range(max(height - 5, 3)))
    if width == 80:
        assert re.search(r"trials/h, 0:00:00 left", frame[1])
        assert re.search(r"\[m0\] +0\.6\d+ +█▁ +2/2 +complete", "\n".join(frame))


def test_states_are_counted_and_warnings_stand_above(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbuildable() -> tm.Candidate:
        raise RuntimeError("no such model")

    terminal = open_terminal(monkeypatch, 80, 20)
    members: list[Callable[[], tm.Candidate]] = [partial(make, 0), unbuildable, partial(make, 1, 0.1, 1e30)]
    with pytest.warns(tm.TrainmuxWarning):
        tm.sweep(members, loss=square, loader=LOADER, max_epochs=2)
    assert terminal.last_frame()[0] == "trial 3/3: 1 complete, 2 failed"


class Interrupt(tm.Callback):
    def on_epoch_end(self, state: Any) -> None:
        if state.epoch == 2:
            print("a line of the user's")
            raise KeyboardInterrupt


def test_the_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch, 80, 20)
    with pytest.raises(KeyboardInterrupt):
        run(4, max_epochs=3, callbacks=[Interrupt()])
    terminal.assert_left_as_it_was()
    assert "a line of the user's" in terminal.getvalue()


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run(3, max_epochs=2)
    lines = capsys.readouterr().out.splitlines()
    pattern = r"trial 3/3: 3 complete, \d+ trials/h, 0:00:00 left, best loss 0\.6\d+ \(\[m0\]\)"
    assert re.fullmatch(pattern, lines[-1]), lines[-1]
    run(3, progress=False)
    assert capsys.readouterr().out == ""
