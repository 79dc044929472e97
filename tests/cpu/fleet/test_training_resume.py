"""Checkpoints of the fit loop: a resumed run is the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training_fakes import BATCHES, LRS, FakeFleet, Spy, run

from trainmux.errors import CheckpointError
from trainmux.fleet import EarlyStopping
from trainmux.fleet._checkpoint_files import write_checkpoint


def first_columns(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows])


def shuffled(generator: torch.Generator | None = None) -> DataLoader[Any]:
    dataset = TensorDataset(torch.arange(12.0))
    return DataLoader(dataset, 3, shuffle=True, generator=generator, collate_fn=first_columns)


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize(
    ("first", "whole"),
    [
        ({"epochs": 2}, {"epochs": 5}),
        ({"steps": 6}, {"steps": 15}),
        ({"steps": 8}, {"steps": 15}),
        ({"steps": 4, "validate_every": 2}, {"steps": 15, "validate_every": 2}),
        ({"steps": 5, "validate_every": 5}, {"steps": 15, "validate_every": 5}),
    ],
)
def test_resumed_run_equals_the_whole_one(
    tmp_path: Path, first: dict[str, int], whole: dict[str, int], own_generator: bool
) -> None:
    def loaders() -> tuple[Any, dict[str, Any]]:
        make = lambda seed: torch.Generator().manual_seed(seed) if own_generator else None  # noqa: E731
        return shuffled(make(3)), {"fast": list(BATCHES[:2]), "third": shuffled(make(4))}

    lrs = {**LRS, "third": 0.05}
    # With steps= alone, the end of the first run closes an epoch that the whole run does not have; a shuffled
    # validation there would draw random numbers that the whole run does not draw.
    same_epochs = "steps" not in whole or "validate_every" in whole
    validation = shuffled() if same_epochs else None
    torch.manual_seed(0)
    loader, others = loaders()
    straight = FakeFleet(lrs)
    expected = run(straight, loader, member_loaders=others, validation=validation, **whole)

    torch.manual_seed(0)
    loader, others = loaders()
    before = FakeFleet(lrs)
    run(before, loader, member_loaders=others, validation=validation, checkpoint=tmp_path, **first)
    torch.manual_seed(99)
    loader, others = loaders()
    after = FakeFleet(lrs)
    history = run(after, loader, member_loaders=others, validation=validation, checkpoint=tmp_path, **whole)
    assert before.seen + after.seen == straight.seen
    assert torch.equal(after.weights, straight.weights)
    assert history["third"][-1].step == expected["third"][-1].step
    if same_epochs:
        assert history == expected


def test_resume_after_a_crash(tmp_path: Path) -> None:
    straight = FakeFleet({"still": 0.0, "fast": 0.01})
    make = lambda: [EarlyStopping("loss", patience=3), Spy()]  # noqa: E731
    expected = run(straight, epochs=6, callbacks=make())
    crashed = FakeFleet({"still": 0.0, "fast": 0.01})
    crashed.fail_at[8] = RuntimeError("out of power")
    with pytest.raises(RuntimeError):
        run(crashed, epochs=6, callbacks=make(), checkpoint=tmp_path)
    resumed, callbacks = FakeFleet({"still": 0.0, "fast": 0.01}), make()
    history = run(resumed, epochs=6, callbacks=callbacks, checkpoint=tmp_path)
    assert history == expected
    assert torch.equal(resumed.weights, straight.weights)
    assert ("start", 2, 6) in callbacks[1].calls


def test_complete_run_returns_at_once(tmp_path: Path) -> None:
    history = run(FakeFleet(LRS), epochs=2, checkpoint=tmp_path)
    fleet, spy = FakeFleet(LRS), Spy()
    assert run(fleet, epochs=2, checkpoint=tmp_path, callbacks=[spy]) == history
    assert not fleet.seen
    assert spy.calls == [("start", 2, 6), ("end", 2, 6)]


def test_resume_modes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run(FakeFleet(LRS), epochs=1, checkpoint=tmp_path, resume="must")
    run(FakeFleet(LRS), epochs=1, checkpoint=tmp_path, resume="auto")
    fleet = FakeFleet(LRS)
    assert len(run(fleet, epochs=2, checkpoint=tmp_path, resume=True)["fast"]) == 2
    assert len(fleet.seen) == 3
    fleet = FakeFleet(LRS)
    assert len(run(fleet, epochs=1, checkpoint=tmp_path, resume=False)["fast"]) == 1
    assert len(fleet.seen) == 3
    assert "restore" not in fleet.log
    # and it has overwritten what was there
    assert len(run(FakeFleet(LRS), epochs=1, checkpoint=tmp_path, resume="must")["fast"]) == 1


def test_resume_in_another_unit_is_refused(tmp_path: Path) -> None:
    run(FakeFleet(LRS), epochs=1, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="epochs="):
        run(FakeFleet(LRS), steps=9, checkpoint=tmp_path)


def test_checkpoint_without_fit_state_is_refused(tmp_path: Path) -> None:
    FakeFleet(LRS).save(tmp_path)
    with pytest.raises(CheckpointError, match="not saved by fit"):
        run(FakeFleet(LRS), epochs=1, checkpoint=tmp_path)


def test_damaged_checkpoint_is_not_overwritten_by_auto(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {})
    (tmp_path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        run(FakeFleet(LRS), epochs=1, checkpoint=tmp_path)
    assert (tmp_path / "checkpoint.json").read_text() == "{"
