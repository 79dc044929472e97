"""The fit loop: epochs and steps, records, callbacks, members that stop, and fits that end badly."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_cases import BATCHES as NUMBERS
from fit_cases import HUGE, At, Spy, first_column, points, run, weights
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    adam_member,
    assert_alone,
    assert_close,
    assert_same_states,
    dropout_member,
    mse,
    scheduled,
    sgd_member,
    state_of,
    states_of,
    train_alone,
    vectors,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from trainmux import Callback, EarlyStopping, Fleet, Member
from trainmux.engine import ReferenceEngine
from trainmux.errors import BatchError, ConfigError, TrainmuxWarning
from trainmux.fleet import FitState

pytestmark = pytest.mark.usefixtures("built_once")

LOADER = BATCHES[:3]
VALIDATION = [BATCHES[8], BATCHES[9]]


def error(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"error": (model(batch[0]) - batch[1]).abs().mean()}


def validated(member: Member) -> float:
    with torch.no_grad():
        return sum(error(member.model, batch)["error"].item() for batch in VALIDATION) / len(VALIDATION)


# ---- epochs and steps ----------------------------------------------------------------------------------


def test_epochs_with_validation_equal_plain_loops() -> None:
    loader = [*BATCHES[:2], vectors(70, size=2)]
    fleet = Fleet([adam_member(0), sgd_member(1)], mse, EXAMPLE)
    history = fleet.fit(loader, epochs=2, validation=VALIDATION, metric_fn=error, progress=False)
    for i, make in enumerate((adam_member, sgd_member)):
        alone = make(i)
        records = history[f"m{i}"]
        assert [(record.epoch, record.step) for record in records] == [(1, 3), (2, 6)]
        for record in records:
            losses = train_alone(alone, loader)
            assert record.loss == pytest.approx(sum(losses) / 3, rel=TOLERANCE)
            assert record.metrics["val_error"] == pytest.approx(validated(alone), rel=TOLERANCE)
            assert record.metrics["grad_norm"] > 0.0
        # No sync was needed: fit ends with one.
        assert_close(state_of(fleet.members[i]), state_of(alone))
    assert fleet.num_steps == 6


def test_steps_and_epoch_schedules() -> None:
    def make(i: int) -> Member:
        if i == 0:
            return scheduled(adam_member(0), interval="epoch")
        plateau = functools.partial(lr_scheduler.ReduceLROnPlateau, factor=0.1, patience=0)
        return scheduled(adam_member(1), plateau, scheduler_monitor="val_error")

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE)
    history = run(fleet, LOADER, steps=5, validate_every=2, validation=VALIDATION, metric_fn=error)
    assert [record.step for record in history["m0"]] == [2, 4, 5]
    batches = [*LOADER, *LOADER][:5]
    for i in range(2):
        alone = make(i)
        for part in (batches[:2], batches[2:4], batches[4:]):
            train_alone(alone, part)
            alone.scheduler.step(*([validated(alone)] if i else []))
        assert_close(state_of(fleet.members[i]), state_of(alone))
        assert fleet.members[i].optimizer.param_groups[0]["lr"] == alone.optimizer.param_groups[0]["lr"]


def test_hooks_are_called_in_order_and_losses_are_means_of_the_epoch() -> None:
    spy = Spy()
    history = run(points(), epochs=2, callbacks=[spy], validation=NUMBERS)
    steps = [[("step", epoch, 3 * epoch - 2 + i) for i in range(3)] for epoch in (1, 2)]
    assert spy.calls == [
        ("start", 0, 0),
        *steps[0],
        ("epoch", 1, 3),
        *steps[1],
        ("epoch", 2, 6),
        ("end", 2, 6),
    ]
    assert list(history) == ["slow", "fast"]
    for index, name in enumerate(history):
        for epoch, record in enumerate(history[name]):
            losses = [row[index] for row in spy.losses[3 * epoch : 3 * epoch + 3]]
            assert record.loss == pytest.approx(sum(losses) / 3, rel=1e-12)
    # A metric named like a column is renamed; "finite" has no mean.
    trained = {"grad_norm", "accuracy", "train_step"}
    assert set(history["fast"][0].metrics) == trained | {"val_loss", "val_accuracy", "val_step"}


def test_steps_cycle_the_loader() -> None:
    spy = Spy()
    history = run(points({"still": 0.0}), steps=7, callbacks=[spy])
    assert spy.seen() == [1, 2, 3, 1, 2, 3, 1]
    assert [record.step for record in history["still"]] == [3, 6, 7]
    assert [record.step for record in run(points(), steps=6)["slow"]] == [3, 6]
    fleet = points()
    run(fleet, iter(NUMBERS * 2), steps=4)  # an iterator that does not end before is fine
    assert fleet.num_steps == 4


def test_samplers_are_told_the_epoch() -> None:
    class Sampler(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = TensorDataset(torch.arange(4.0, dtype=torch.float64))
    loader = DataLoader(dataset, 2, sampler=Sampler(dataset), collate_fn=first_column)
    run(points(), loader, epochs=3)
    assert Sampler.epochs == [0, 1, 2]


def test_members_with_loaders_of_their_own() -> None:
    own = [vectors(60, size=2), vectors(61, size=2)]
    fleet = Fleet([adam_member(0), adam_member(1, example_batch=own[0])], mse, EXAMPLE)
    run(fleet, LOADER, epochs=2, member_loaders={"m1": own}, validation=VALIDATION)
    assert_alone(fleet, (adam_member(0), LOADER * 2), (adam_member(1), own * 3))


def test_members_that_come_and_go_during_a_fit() -> None:
    fleet = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE)
    changes = [
        At(2, lambda state: state.fleet.drop("m1")),
        At(4, lambda state: state.fleet.replace("m0", adam_member(4))),
        At(5, lambda state: state.fleet.add(adam_member(5))),
    ]
    history = run(fleet, LOADER, epochs=3, callbacks=changes)
    assert fleet.names == ("m4", "m2", "m5")
    batches = LOADER * 3
    for i, part in ((2, batches), (4, batches[4:]), (5, batches[5:])):
        alone = adam_member(i)
        losses = train_alone(alone, part)
        assert_close(state_of(fleet.members[fleet.names.index(f"m{i}")]), state_of(alone))
        assert history[f"m{i}"][-1].loss == pytest.approx(sum(losses[-3:]) / 3, rel=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"loader": [], "epochs": 1},
        {"loader": [], "steps": 5},
        {"epochs": 1, "member_loaders": {"fast": []}},
        {"loader": iter(NUMBERS), "steps": 5},
        {"loader": 5, "steps": 5},
    ],
)
def test_loaders_without_enough_batches(options: dict[str, Any]) -> None:
    with pytest.raises(BatchError):
        run(points(), options.pop("loader", NUMBERS), **options)


# ---- no waiting for the device -------------------------------------------------------------------------


def test_host_reads_do_not_grow_with_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def call(self: Tensor, *args: Any) -> Any:
            reads.append(name)
            return original(self, *args)

        return call

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, counted(name))

    def num_reads(num_steps: int, **options: Any) -> int:
        fleet = points()
        reads.clear()
        run(fleet, NUMBERS[:1] * num_steps, epochs=1, **options)
        return len(reads)

    few = num_reads(100)
    assert num_reads(200) == few
    assert num_reads(100, log_every=10) > few


def test_means_do_not_depend_on_when_losses_are_read() -> None:
    loader = [torch.randn(1, dtype=torch.float64) for _ in range(520)]  # more than are kept on the device
    expected = run(points(), loader, epochs=1)["fast"][0]
    assert run(points(), loader, epochs=1, log_every=50)["fast"][0] == expected
    diverges = {"log_every": 2, "callbacks": [At(1, diverge("b"))]}
    with pytest.warns(TrainmuxWarning):
        history = run(points({"a": 0.1, "b": 0.1}), NUMBERS[:1] * 6, epochs=1, **diverges)
    assert history["b"][0].loss == pytest.approx((1.0 + 0.9**2) / 2)  # of the steps before it was frozen


# ---- members that stop ---------------------------------------------------------------------------------


def diverge(name: str) -> Callable[[FitState], None]:
    def act(state: FitState) -> None:
        member = state.fleet.members[state.fleet.names.index(name)]
        member.optimizer.param_groups[0]["lr"] = HUGE

    return act


def test_a_frozen_member_is_reported_once_and_the_rest_goes_on() -> None:
    fleet = points({"a": 0.1, "b": 0.1, "c": 0.1})
    with pytest.warns(TrainmuxWarning, match=r"epoch 2: 1 of 3 .*'b' \(not finite at step 5\)") as caught:
        history = fleet.fit(NUMBERS, epochs=4, callbacks=[At(3, diverge("b"))], progress=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the user's line, not one of the package
    assert [record.stopped for record in history["b"]] == [None, "not finite at step 5"]
    # Only step 4 counts in epoch 2: step 5 was not finite, step 6 one of frozen weights.
    control = points({"a": 0.1, "b": 0.1, "c": 0.1})
    spy = Spy()
    expected = run(control, epochs=4, callbacks=[spy])
    assert history["b"][1].loss == spy.losses[3][1]
    assert history["a"] == expected["a"]
    assert history["c"] == expected["c"]
    assert weights(fleet)[::2] == weights(control)[::2]


def test_a_fit_ends_when_nobody_trains_any_more() -> None:
    names = {f"m{index}": HUGE for index in range(15)}
    fleet = points(names)
    with pytest.warns(TrainmuxWarning, match="15 of 15 .* and 5 more"):
        history = run(fleet, epochs=10)
    assert fleet.num_steps == 3
    assert [len(records) for records in history.values()] == [1] * 15
    assert len(run(fleet, epochs=1)) == 0  # those stopped before have no records
    assert fleet.num_steps == 3


def test_a_warning_that_is_an_error_comes_after_the_save(tmp_path: Path) -> None:
    fleet = points()
    with pytest.raises(TrainmuxWarning):  # warnings are errors here
        run(fleet, epochs=2, checkpoint=tmp_path, callbacks=[At(1, diverge("slow"))])
    assert weights(fleet)[0] > 1e190  # synced
    history = run(points(), epochs=2, checkpoint=tmp_path)
    assert [len(history[name]) for name in ("slow", "fast")] == [1, 2]


def test_a_fit_ended_within_an_epoch(tmp_path: Path) -> None:
    end = At(4, lambda state: state.end_fit())
    history = run(points({"still": 0.0}), epochs=5, callbacks=[end], checkpoint=tmp_path)
    assert [record.step for record in history["still"]] == [3, 4]
    # A later fit goes on with the next epoch, from the loader's first batch.
    spy = Spy()
    history = run(points({"still": 0.0}), epochs=3, checkpoint=tmp_path, callbacks=[spy])
    assert [record.step for record in history["still"]] == [3, 4, 7]
    assert spy.seen() == [1, 2, 3]


def test_early_stopping_is_each_members_own() -> None:
    """One member does not move and is stopped; the other goes on until it ends, too."""
    fleet = points({"still": 0.0, "fast": 0.1})
    stopping = EarlyStopping("val_loss", patience=1, min_delta=1e-3)
    history = run(fleet, epochs=50, callbacks=[stopping], validation=NUMBERS)
    assert [record.stopped for record in history["still"]] == [None, "stopped"]
    assert 2 < len(history["fast"]) < 50
    assert weights(fleet)[0] == 0.0
    assert fleet.stopped() == {"still": "stopped", "fast": "stopped"}


def test_early_stopping_on_something_nobody_measures() -> None:
    fleet = points()
    with pytest.raises(ConfigError):
        run(fleet, epochs=2, callbacks=[EarlyStopping("val_loss", patience=1)])
    assert fleet.num_steps == 3
    assert weights(fleet)[1] > 0.0


# ---- fits that end badly: the members are synced -------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_fit_start", "on_step_end", "on_epoch_end", "on_fit_end"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()], ids=repr)
def test_an_exception_in_a_callback(hook: str, error: BaseException) -> None:
    def fail(self: Callback, state: FitState) -> None:
        raise error

    fleet = points()
    fleet.step(NUMBERS[0])
    with pytest.raises(type(error)) as caught:
        run(fleet, epochs=1, callbacks=[type("Failing", (Callback,), {hook: fail})()])
    assert caught.value is error
    assert 0.0 not in weights(fleet)


def test_the_first_error_is_not_hidden_by_a_sync_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(fleet: Fleet) -> None:
        raise RuntimeError("sync failed")

    fleet = points()
    monkeypatch.setattr(Fleet, "sync", sync)
    with pytest.raises(BatchError) as caught:
        run(fleet, ["no batch"], epochs=1)
    assert "sync failed" in caught.value.__notes__[0]


@pytest.fixture
def sigint_during(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sends this process a SIGINT while the engine runs for the n-th time."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def arm(number: int) -> None:
        original, calls = ReferenceEngine.begin, []

        def begin(self: ReferenceEngine, *args: Any) -> Any:
            calls.append(self)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return original(self, *args)

        monkeypatch.setattr(ReferenceEngine, "begin", begin)

    yield arm
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(("call", "num_steps"), [(3, 2), (4, 2), (5, 3)])
def test_ctrl_c_during_a_step_waits_for_its_end(
    sigint_during: Callable[[int], None], call: int, num_steps: int
) -> None:
    """Weights, state, schedules and the count of steps belong together, and no group is ahead of another."""
    makes = (lambda: scheduled(adam_member(0)), lambda: scheduled(sgd_member(1)))  # a group of its own each
    fleet = Fleet([make() for make in makes], mse, EXAMPLE)
    sigint_during(call)
    with pytest.raises(KeyboardInterrupt):
        run(fleet, BATCHES[:6], epochs=1)
    assert fleet.num_steps == num_steps
    for batch in BATCHES[num_steps:5]:  # and the fleet is as good as new
        fleet.step(batch)
    assert_alone(fleet, *((make(), BATCHES[:5]) for make in makes))
    assert [member.scheduler.last_epoch for member in fleet.members] == [5, 5]


def test_ctrl_c_amid_accumulation(sigint_during: Callable[[int], None]) -> None:
    """A micro-batch that was computed is counted: the next update takes as many as it should."""
    fleet = Fleet([adam_member(0)], mse, EXAMPLE, accumulate=2, precision="fp64")
    sigint_during(1)
    with pytest.raises(KeyboardInterrupt):
        fleet.step(BATCHES[0])
    fleet.step(BATCHES[1])
    assert_alone(fleet, (adam_member(0), BATCHES[:2]), accumulate=2)


def test_ctrl_c_during_evaluation_changes_nothing(sigint_during: Callable[[int], None]) -> None:
    fleet = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    before = states_of(fleet)
    sigint_during(2)
    with pytest.raises(KeyboardInterrupt):
        fleet.evaluate(VALIDATION)
    assert all(module.training for member in fleet.members for module in member.model.modules())
    assert_same_states(states_of(fleet), before)
