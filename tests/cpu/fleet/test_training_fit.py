"""The fit loop on a small stand-in fleet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training_fakes import BATCHES, LRS, FakeFleet, Spy, WatchedTensor, run

from trainmux.errors import BatchError, ConfigError, TrainmuxWarning
from trainmux.fleet import Callback, EarlyStopping, FitState
from trainmux.fleet._fit import fit

# ---- epochs and steps


def test_epochs_call_everything_in_order() -> None:
    fleet, spy = FakeFleet(LRS), Spy()
    history = run(fleet, epochs=2, callbacks=[spy], validation=BATCHES)
    assert spy.calls == [
        ("start", 0, 0),
        *[("step", 1, step) for step in (1, 2, 3)],
        ("epoch", 1, 3),
        *[("step", 2, step) for step in (4, 5, 6)],
        ("epoch", 2, 6),
        ("end", 2, 6),
    ]
    assert fleet.log == ["evaluate", "end_epoch"] * 2 + ["sync"]
    assert list(history) == ["slow", "fast"]
    assert [(r.epoch, r.step, r.stopped) for r in history["fast"]] == [(1, 3, None), (2, 6, None)]


def test_loss_is_the_mean_of_the_epoch() -> None:
    class Losses(Callback):
        def __init__(self) -> None:
            self.rows: list[list[float]] = []

        def on_step_end(self, state: FitState) -> None:
            self.rows.append(state.losses.tolist())

    fleet, losses = FakeFleet(LRS), Losses()
    history = run(fleet, epochs=2, callbacks=[losses])
    for index, name in enumerate(LRS):
        for epoch in range(2):
            rows = losses.rows[3 * epoch : 3 * epoch + 3]
            assert history[name][epoch].loss == pytest.approx(sum(row[index] for row in rows) / 3, rel=1e-12)
    # Metrics of the steps are averaged too; "finite" and what is not per member is left out.
    assert set(history["fast"][0].metrics) == {"grad_norm", "accuracy"}


def test_metrics_with_the_names_of_columns() -> None:
    class Named(FakeFleet):
        def step(self, batch: Any, overrides: Any = None) -> torch.Tensor:
            losses = super().step(batch, overrides)
            self._metrics = {"step": losses * 2, "loss": losses * 3, "total": losses.sum()}
            return losses

    record = run(Named(LRS), BATCHES[:1], epochs=1)["slow"][0]
    assert record.values() == {"loss": 1.0, "train_step": 2.0, "train_loss": 3.0}


def test_means_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = [torch.randn(1) for _ in range(50)]
    expected = run(FakeFleet(LRS), loader, epochs=1)["fast"][0]
    for log_every in (1, 7):
        assert run(FakeFleet(LRS), loader, epochs=1, log_every=log_every)["fast"][0] == expected
    monkeypatch.setattr("trainmux.fleet._recorder._BLOCK_ROWS", 8)
    assert run(FakeFleet(LRS), loader, epochs=1)["fast"][0] == expected


def test_steps_cycle_the_loader() -> None:
    fleet, spy = FakeFleet(LRS), Spy()
    history = run(fleet, steps=7, callbacks=[spy])
    assert [row[0] for row in fleet.seen] == [1, 2, 3, 1, 2, 3, 1]
    assert [call for call in spy.calls if call[0] == "epoch"] == [
        ("epoch", 1, 3),
        ("epoch", 2, 6),
        ("epoch", 3, 7),
    ]
    assert [record.step for record in history["slow"]] == [3, 6, 7]


def test_steps_that_end_with_a_pass() -> None:
    assert [record.step for record in run(FakeFleet(LRS), steps=6)["slow"]] == [3, 6]


def test_steps_take_an_endless_iterator() -> None:
    fleet = FakeFleet(LRS)

    def endless() -> Any:
        while True:
            yield torch.ones(1)

    run(fleet, endless(), steps=4)
    assert fleet.num_steps == 4


def test_set_epoch_is_called_for_each_pass() -> None:
    class Sampler(torch.utils.data.SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = TensorDataset(torch.arange(4.0))
    loader = DataLoader(dataset, batch_size=2, sampler=Sampler(dataset), collate_fn=lambda items: items[0][0])
    run(FakeFleet(LRS), loader, epochs=3)
    assert Sampler.epochs == [0, 1, 2]


def test_member_loaders_are_cycled() -> None:
    fleet = FakeFleet(LRS)
    run(fleet, epochs=2, member_loaders={"fast": [torch.tensor(10.0), torch.tensor(20.0)]})
    assert [row[0] for row in fleet.seen] == [1, 2, 3, 1, 2, 3]
    assert [row[1] for row in fleet.seen] == [10, 20, 10, 20, 10, 20]


# ---- refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "exactly one"),
        ({"epochs": 1, "steps": 1}, "exactly one"),
        ({"epochs": 0}, "epochs must be"),
        ({"epochs": True}, "epochs must be"),
        ({"steps": -1}, "steps must be"),
        ({"steps": 2.0}, "steps must be"),
        ({"epochs": 1, "log_every": 0}, "log_every"),
        ({"epochs": 1, "validate_every": 2}, "validate_every"),
        ({"epochs": 1, "metric_fn": print}, "metric_fn"),
        ({"epochs": 1, "validation": iter(BATCHES)}, "validation"),
        ({"epochs": 2, "loader": iter(BATCHES)}, "iterated again"),
        ({"epochs": 1, "callbacks": [Spy]}, "brackets"),
        ({"epochs": 1, "callbacks": [print]}, "Callback"),
        ({"epochs": 1, "resume": "perhaps"}, "resume"),
        ({"epochs": 1, "resume": "must"}, "checkpoint="),
        ({"epochs": 1, "resume": []}, "resume"),
        ({"epochs": 1, "member_loaders": {"who": BATCHES}}, "who"),
    ],
)
def test_refused_arguments(options: dict[str, Any], says: str) -> None:
    fleet = FakeFleet(LRS)
    with pytest.raises(ConfigError, match=says):
        run(fleet, options.pop("loader", BATCHES), **options)
    assert fleet.num_steps == 0


def test_unknown_progress_is_refused() -> None:
    with pytest.raises(ConfigError, match="progress"):
        fit(FakeFleet(LRS), BATCHES, epochs=1, progress="loud")


@pytest.mark.parametrize("options", [{"epochs": 1}, {"steps": 5}])
def test_empty_loader(options: dict[str, int]) -> None:
    with pytest.raises(BatchError, match="no batches"):
        run(FakeFleet(LRS), [], **options)
    with pytest.raises(BatchError, match="member 'fast'"):
        run(FakeFleet(LRS), member_loaders={"fast": []}, **options)


def test_loader_that_runs_out() -> None:
    with pytest.raises(BatchError, match="only once"):
        run(FakeFleet(LRS), iter(BATCHES), steps=5)
    with pytest.raises(BatchError, match="iterable"):
        run(FakeFleet(LRS), 5, steps=5)


# ---- no waiting for the device


def test_steps_do_not_wait_for_the_device() -> None:
    fleet = FakeFleet(LRS)
    fleet.step_type = WatchedTensor
    WatchedTensor.calls.clear()
    run(fleet, [torch.ones(1)] * 300, epochs=1)
    allowed = {"detach", "copy_", "__get__"}
    assert set(WatchedTensor.calls) <= allowed
    assert fleet.num_stopped_calls <= 4


def test_log_every_moves_blocks() -> None:
    fleet = FakeFleet(LRS)
    run(fleet, [torch.ones(1)] * 100, epochs=1, log_every=10)
    assert 10 <= fleet.num_stopped_calls <= 14


# ---- members that stop


def test_frozen_member_is_reported_once() -> None:
    fleet = FakeFleet({"a": 0.1, "b": 0.1, "c": 0.1}, poison={"b": 5})
    with pytest.warns(TrainmuxWarning, match=r"epoch 2: 1 of 3 .*'b' \(not finite at step 5\)") as caught:
        history = fit(fleet, BATCHES, epochs=4, progress=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the user's line, not one of the package
    assert [record.stopped for record in history["b"]] == [None, "not finite at step 5"]
    assert len(history["a"]) == 4
    # Only step 4 counts in epoch 2: step 5 was not finite, step 6 one of frozen weights.
    reference = run(FakeFleet({"b": 0.1}), BATCHES[:1], steps=1)
    assert reference["b"][0].loss == 1.0
    clean = FakeFleet({"b": 0.1})
    run(clean, steps=3)
    assert history["b"][1].loss == pytest.approx((float(clean.weights[0]) - 1.0) ** 2)
    assert set(fleet.monitored[1]) == {"a", "b", "c"}
    assert set(fleet.monitored[2]) == {"a", "c"}


@pytest.mark.parametrize("log_every", [None, 1, 2])
def test_frozen_means_do_not_depend_on_the_blocks(log_every: int | None) -> None:
    fleet = FakeFleet({"a": 0.1, "b": 0.1}, poison={"b": 3})
    with pytest.warns(TrainmuxWarning):
        history = run(fleet, [torch.ones(1)] * 6, epochs=1, log_every=log_every)
    assert history["b"][0].loss == pytest.approx((1.0 + 0.9**2) / 2)


def test_fit_ends_when_all_are_frozen() -> None:
    fleet = FakeFleet(LRS, poison={"slow": 2, "fast": 4})
    with pytest.warns(TrainmuxWarning):
        history = run(fleet, epochs=10)
    assert fleet.num_steps == 6
    assert [len(history[name]) for name in LRS] == [1, 2]


def test_warning_names_only_some_of_many() -> None:
    names = {f"m{index}": 0.1 for index in range(15)}
    with pytest.warns(TrainmuxWarning, match="15 of 15 .* and 5 more"):
        run(FakeFleet(names, poison=dict.fromkeys(names, 1)), epochs=1)


def test_warning_as_error_comes_after_the_save(tmp_path: Path) -> None:
    fleet = FakeFleet(LRS, poison={"slow": 2})
    with pytest.raises(TrainmuxWarning):  # warnings are errors here
        run(fleet, epochs=2, checkpoint=tmp_path)
    assert fleet.log == ["end_epoch", "save", "sync"]
    history = run(FakeFleet(LRS), epochs=2, checkpoint=tmp_path)
    assert [len(history[name]) for name in LRS] == [1, 2]


def test_members_stopped_before_have_no_records() -> None:
    fleet = FakeFleet(LRS)
    fleet.stop("slow")
    assert list(run(fleet, epochs=1)) == ["fast"]
    fleet.stop("fast")
    assert len(run(fleet, epochs=1)) == 0
    assert fleet.num_steps == 3


def test_stop_member_within_an_epoch() -> None:
    class StopAtTwo(Callback):
        def on_step_end(self, state: FitState) -> None:
            if state.step == 2:
                state.stop_member("slow")

    fleet = FakeFleet(LRS)
    history = run(fleet, [torch.ones(1)] * 5, epochs=2, callbacks=[StopAtTwo()])
    assert len(history["slow"]) == 1
    assert history["slow"][0].stopped == "stopped"
    assert history["slow"][0].loss == pytest.approx((1.0 + 0.99**2) / 2)


def test_end_fit_within_an_epoch(tmp_path: Path) -> None:
    class EndAtFour(Callback):
        def on_step_end(self, state: FitState) -> None:
            if state.step == 4:
                state.end_fit()

    fleet = FakeFleet(LRS)
    history = run(fleet, epochs=5, callbacks=[EndAtFour()], checkpoint=tmp_path)
    assert [record.step for record in history["fast"]] == [3, 4]
    # A later fit goes on with the next epoch, from the loader's first batch.
    again = FakeFleet(LRS)
    history = run(again, epochs=3, checkpoint=tmp_path)
    assert [record.step for record in history["fast"]] == [3, 4, 7]
    assert [row[0] for row in again.seen] == [1, 2, 3]


def test_early_stopping_ends_the_fit() -> None:
    fleet = FakeFleet({"a": 0.0, "b": 0.0})
    history = run(fleet, epochs=50, callbacks=[EarlyStopping("loss", patience=1)])
    assert [len(history[name]) for name in "ab"] == [2, 2]


def test_early_stopping_unknown_monitor() -> None:
    fleet = FakeFleet(LRS)
    with pytest.raises(ConfigError, match="accuracy"):
        run(fleet, epochs=1, callbacks=[EarlyStopping("val_loss", patience=1)])
    assert fleet.log[-1] == "sync"


def test_members_may_change_between_steps() -> None:
    class Swap(Callback):
        def on_step_end(self, state: FitState) -> None:
            if state.step == 2:
                fleet._names = ("fast", "new")

    fleet = FakeFleet(LRS)
    history = run(fleet, [torch.ones(1)] * 4, epochs=1, callbacks=[Swap()])
    assert list(history) == ["fast", "new"]
    assert math.isfinite(history["new"][0].loss)


# ---- exceptions


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("device lost")])
def test_sync_before_the_exception_goes_on(error: BaseException) -> None:
    fleet, spy = FakeFleet(LRS), Spy()
    fleet.fail_at[5] = error
    with pytest.raises(type(error)) as caught:
        run(fleet, epochs=3, callbacks=[spy])
    assert caught.value is error
    assert fleet.log == ["end_epoch", "sync"]
    assert spy.calls[-1] == ("step", 2, 4)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_step_end", "on_epoch_end", "on_fit_end"])
def test_exception_in_a_callback(hook: str) -> None:
    def fail(self: Callback, state: FitState) -> None:
        raise ZeroDivisionError

    fleet = FakeFleet(LRS)
    with pytest.raises(ZeroDivisionError):
        run(fleet, epochs=1, callbacks=[type("Failing", (Callback,), {hook: fail})()])
    assert fleet.log[-1] == "sync"


def test_first_error_is_not_hidden_by_sync() -> None:
    class Broken(FakeFleet):
        def sync(self) -> None:
            raise RuntimeError("sync failed")

    fleet = Broken(LRS)
    fleet.fail_at[1] = BatchError("bad batch")
    with pytest.raises(BatchError, match="bad batch") as caught:
        run(fleet, epochs=1)
    assert "sync failed" in caught.value.__notes__[0]
