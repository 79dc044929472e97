"""``fit`` on a real fleet: epochs, validation, stopping, logs, checkpoints, interruptions."""

from __future__ import annotations

import csv
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    adam_member,
    assert_close,
    assert_same,
    dropout_member,
    mlp,
    mse,
    sgd_member,
    state_of,
    states_of,
    train_alone,
    vectors,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from trainmux import Callback, CSVLog, EarlyStopping, Fleet, Member
from trainmux.engine import ReferenceEngine
from trainmux.errors import BatchError, TrainmuxWarning
from trainmux.fleet import FitState

pytestmark = pytest.mark.usefixtures("built_once")

LOADER = BATCHES[:3]
VALIDATION = [BATCHES[8], BATCHES[9]]


def as_tuple(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(leaves) for leaves in zip(*rows, strict=True))


def shuffled() -> DataLoader[Any]:
    dataset = TensorDataset(*vectors(5, size=15))
    return DataLoader(dataset, batch_size=5, shuffle=True, collate_fn=as_tuple)


def error(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"error": (model(batch[0]) - batch[1]).abs().mean()}


class At(Callback):
    """Calls a function once, after a given step."""

    def __init__(self, step: int, act: Callable[[FitState], None]) -> None:
        self._step = step
        self._act = act

    def on_step_end(self, state: FitState) -> None:
        if state.step == self._step:
            self._act(state)


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
            with torch.no_grad():
                wanted = sum(error(alone.model, batch)["error"].item() for batch in VALIDATION) / 2
            assert record.metrics["val_error"] == pytest.approx(wanted, rel=TOLERANCE)
            assert record.metrics["grad_norm"] > 0.0
        # No sync was needed: fit ends with one.
        assert_close(state_of(fleet.members[i]), state_of(alone))
    assert fleet.num_steps == 6


def test_steps_and_epoch_schedules() -> None:
    def make(i: int) -> Member:
        member = adam_member(i)
        if i == 0:
            member.scheduler = lr_scheduler.StepLR(member.optimizer, 1, 0.5)
            member.scheduler_interval = "epoch"
        else:
            member.scheduler = lr_scheduler.ReduceLROnPlateau(member.optimizer, factor=0.1, patience=0)
            member.scheduler_monitor = "val_error"
        return member

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE)
    history = fleet.fit(
        LOADER, steps=5, validate_every=2, validation=VALIDATION, metric_fn=error, progress=False
    )
    assert [record.step for record in history["m0"]] == [2, 4, 5]
    batches = [*LOADER, *LOADER][:5]
    for i in range(2):
        alone = make(i)
        for part in (batches[:2], batches[2:4], batches[4:]):
            train_alone(alone, part)
            with torch.no_grad():
                values = [error(alone.model, batch)["error"].item() for batch in VALIDATION]
            alone.scheduler.step(*([sum(values) / 2] if i else []))
        assert_close(state_of(fleet.members[i]), state_of(alone))
        assert fleet.members[i].optimizer.param_groups[0]["lr"] == alone.optimizer.param_groups[0]["lr"]


def test_early_stopping_is_each_members_own(tmp_path: Path) -> None:
    """One member cannot improve (it does not move); the other goes on, and the log shows both."""

    def make(i: int) -> Member:
        member = adam_member(i)
        if i == 0:
            member.optimizer.param_groups[0]["lr"] = 0.0
        return member

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE)
    log = tmp_path / "log.csv"
    history = fleet.fit(
        LOADER,
        epochs=4,
        validation=VALIDATION,
        metric_fn=error,
        callbacks=[EarlyStopping("loss", patience=1), CSVLog(log)],
        progress=False,
    )
    assert [record.epoch for record in history["m0"]] == [1, 2]
    assert history["m0"][-1].stopped == "stopped"
    assert [record.epoch for record in history["m1"]] == [1, 2, 3, 4]
    assert fleet.stopped() == {"m0": "stopped"}
    assert_same(
        {k: v for k, v in state_of(fleet.members[0]).items() if k.startswith("parameter")},
        {k: v for k, v in state_of(make(0)).items() if k.startswith("parameter")},
    )
    alone = make(1)
    train_alone(alone, LOADER * 4)
    assert_close(state_of(fleet.members[1]), state_of(alone))
    with open(log, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["member"]) for row in rows] == [
        ("1", "m0"),
        ("1", "m1"),
        ("2", "m0"),
        ("2", "m1"),
        ("3", "m1"),
        ("4", "m1"),
    ]
    assert float(rows[-1]["loss"]) == pytest.approx(history["m1"][-1].loss)
    assert float(rows[-1]["val_error"]) == pytest.approx(history["m1"][-1].metrics["val_error"])


def test_a_frozen_member_is_warned_about_and_the_rest_goes_on() -> None:
    broken = adam_member(1)
    with torch.no_grad():
        broken.model[2].bias.fill_(math.nan)
    fleet = Fleet([adam_member(0), broken], mse, EXAMPLE)
    with pytest.warns(TrainmuxWarning, match=r"'m1' \(not finite at step 1\)"):
        history = fleet.fit(LOADER, epochs=2, progress=False)
    assert math.isnan(history["m1"][0].loss)
    assert len(history["m0"]) == 2
    alone = adam_member(0)
    train_alone(alone, LOADER * 2)
    assert_close(state_of(fleet.members[0]), state_of(alone))


def test_members_with_loaders_of_their_own() -> None:
    own = [vectors(60, size=2), vectors(61, size=2)]
    fleet = Fleet([adam_member(0), adam_member(1, example_batch=own[0])], mse, EXAMPLE)
    fleet.fit(LOADER, epochs=1, member_loaders={"m1": own}, validation=VALIDATION, progress=False)
    for i, batches in enumerate((LOADER, [own[0], own[1], own[0]])):
        alone = adam_member(i)
        train_alone(alone, batches)
        assert_close(state_of(fleet.members[i]), state_of(alone))


def test_members_that_come_and_go_during_a_fit() -> None:
    fleet = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE)
    changes = [
        At(2, lambda state: state.fleet.drop("m1")),
        At(4, lambda state: state.fleet.replace("m0", adam_member(4))),
        At(5, lambda state: state.fleet.add(adam_member(5))),
    ]
    history = fleet.fit(LOADER, epochs=3, callbacks=changes, progress=False)
    assert fleet.names == ("m4", "m2", "m5")
    batches = LOADER * 3
    for i, part in ((2, batches), (4, batches[4:]), (5, batches[5:])):
        alone = adam_member(i)
        losses = train_alone(alone, part)
        assert_close(state_of(fleet.members[fleet.names.index(f"m{i}")]), state_of(alone))
        assert history[f"m{i}"][-1].loss == pytest.approx(sum(losses[-3:]) / 3, rel=TOLERANCE)


# ---- checkpoints ---------------------------------------------------------------------------------------


def resumable(i: int) -> Member:
    model = mlp(i, dropout=0.4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1))
    return Member(model, optimizer, f"m{i}", scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 20))


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_a_resumed_fit_equals_the_whole_one(tmp_path: Path, unit: str) -> None:
    """Dropout, schedules and a shuffled loader included, bit for bit."""
    first, whole = {"epochs": (2, 4), "steps": (5, 11)}[unit]

    def run(fleet: Fleet, amount: int, seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        loader: Any = shuffled()
        return fleet.fit(loader, **{unit: amount}, progress=False, **options)

    straight = Fleet([resumable(i) for i in range(2)], mse, EXAMPLE)
    expected = run(straight, whole, seed=0)
    run(Fleet([resumable(i) for i in range(2)], mse, EXAMPLE), first, seed=0, checkpoint=tmp_path)
    resumed = Fleet([resumable(i) for i in range(2)], mse, EXAMPLE)
    history = run(resumed, whole, seed=99, checkpoint=tmp_path)
    states, wanted = states_of(resumed), states_of(straight)
    for name in straight.names:
        assert_same(states[name], wanted[name])
        assert history[name][-1].step == expected[name][-1].step
        if unit == "epochs":
            assert [record.loss for record in history[name]] == [record.loss for record in expected[name]]
    for one, other in zip(resumed.members, straight.members, strict=True):
        assert one.scheduler.state_dict() == other.scheduler.state_dict()


def test_a_killed_fit_goes_on_from_its_last_epoch(tmp_path: Path) -> None:
    """Amid an epoch, with an early stopping that has begun to count and a member already stopped."""

    def members() -> list[Member]:
        models = [mlp(i, dropout=0.4) for i in range(2)]
        return [
            Member(model, torch.optim.Adam(model.parameters(), lr=0.02 * i), f"m{i}")
            for i, model in enumerate(models)
        ]

    def kill(state: FitState) -> None:
        raise SystemExit("killed")

    def fit(fleet: Fleet, *callbacks: Callback, **options: Any) -> Any:
        torch.manual_seed(0)
        stopping = EarlyStopping("val_loss", patience=1)
        return fleet.fit(
            shuffled(),
            epochs=3,
            validation=[vectors(5, size=15)],
            callbacks=[stopping, *callbacks],
            progress=False,
            **options,
        )

    straight = Fleet(members(), mse, EXAMPLE)
    expected = fit(straight)
    killed = Fleet(members(), mse, EXAMPLE)
    with pytest.raises(SystemExit, match="killed"):
        fit(killed, At(8, kill), checkpoint=tmp_path)
    resumed = Fleet(members(), mse, EXAMPLE)
    history = fit(resumed, checkpoint=tmp_path)
    assert resumed.stopped() == straight.stopped()
    for name in straight.names:
        assert history[name] == expected[name]
        assert_same(states_of(resumed)[name], states_of(straight)[name])


# ---- interruptions -------------------------------------------------------------------------------------


def test_ctrl_c_in_a_callback_leaves_the_members_synced() -> None:
    def interrupt(state: FitState) -> None:
        raise KeyboardInterrupt

    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    with pytest.raises(KeyboardInterrupt):
        fleet.fit(LOADER, epochs=3, callbacks=[At(4, interrupt)], progress=False)
    for i in range(2):
        alone = adam_member(i)
        train_alone(alone, (LOADER * 2)[:4])
        assert_close(state_of(fleet.members[i]), state_of(alone))


def test_a_bad_batch_leaves_the_members_synced() -> None:
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    with pytest.raises(BatchError, match="float32"):
        fleet.fit([*LOADER, tuple(leaf.float() for leaf in EXAMPLE)], epochs=1, progress=False)
    alone = adam_member(0)
    train_alone(alone, LOADER)
    assert_close(state_of(fleet.members[0]), state_of(alone))


@pytest.fixture
def sigint_during() -> Iterator[Callable[[pytest.MonkeyPatch, int], None]]:
    """Sends this process a SIGINT while the engine runs for the n-th time."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def arm(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        original = ReferenceEngine.begin
        calls = 0

        def begin(self: ReferenceEngine, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGINT)
            return original(self, *args)

        monkeypatch.setattr(ReferenceEngine, "begin", begin)

    yield arm
    signal.signal(signal.SIGINT, handler)


def stepped(member: Member) -> Member:
    member.scheduler = lr_scheduler.StepLR(member.optimizer, 1, 0.5)
    return member


Arm = Callable[[pytest.MonkeyPatch, int], None]


def test_ctrl_c_during_a_step_waits_for_its_end(monkeypatch: pytest.MonkeyPatch, sigint_during: Arm) -> None:
    """The step is whole: weights, state, the schedule and the count of steps belong together."""

    def make(i: int) -> Member:
        return stepped(adam_member(i))

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE)
    sigint_during(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        fleet.fit(BATCHES[:6], epochs=1, progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for i in range(2):
        alone = make(i)
        train_alone(alone, BATCHES[:3])
        assert_close(state_of(fleet.members[i]), state_of(alone))
        assert fleet.members[i].scheduler.last_epoch == 3
    assert fleet.num_steps == 3
    # And the fleet is as good as new.
    for batch in BATCHES[3:5]:
        fleet.step(batch)
    alone = make(0)
    train_alone(alone, BATCHES[:5])
    assert_close(states_of(fleet)["m0"], state_of(alone))


def test_ctrl_c_between_two_groups(monkeypatch: pytest.MonkeyPatch, sigint_during: Arm) -> None:
    """No group is a step ahead of another."""
    fleet = Fleet([adam_member(0), sgd_member(1)], mse, EXAMPLE)
    sigint_during(monkeypatch, 3)  # the first group's second step
    with pytest.raises(KeyboardInterrupt):
        fleet.fit(BATCHES[:6], epochs=1, progress=False)
    for i, make in enumerate((adam_member, sgd_member)):
        alone = make(i)
        train_alone(alone, BATCHES[:2])
        assert_close(state_of(fleet.members[i]), state_of(alone))
    assert fleet.num_steps == 2


def test_ctrl_c_amid_accumulation(monkeypatch: pytest.MonkeyPatch, sigint_during: Arm) -> None:
    """A micro-batch that was computed is counted: the next update takes as many as it should."""
    settings: dict[str, Any] = {"accumulate": 2, "precision": "fp64"}
    fleet = Fleet([adam_member(0)], mse, EXAMPLE, **settings)
    sigint_during(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        fleet.step(BATCHES[0])
    fleet.step(BATCHES[1])
    alone = adam_member(0)
    train_alone(alone, BATCHES[:2], accumulate=2)
    assert_close(states_of(fleet)["m0"], state_of(alone))


def test_ctrl_c_during_evaluation_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, sigint_during: Arm
) -> None:
    fleet = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    before = states_of(fleet)
    sigint_during(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        fleet.evaluate(VALIDATION)
    assert all(module.training for member in fleet.members for module in member.model.modules())
    after = states_of(fleet)
    for name in fleet.names:
        assert_same(after[name], before[name])
