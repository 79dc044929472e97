"""Per-member learning-rate schedules: as in a plain torch loop, without building anything anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    adam_member,
    assert_close,
    assert_trains_alone,
    count_work,
    mlp,
    mse,
    state_of,
    states_of,
    train_alone,
)
from torch.optim import lr_scheduler

from trainmux import Fleet, Member
from trainmux.errors import MemberError

pytestmark = pytest.mark.usefixtures("built_once")

Optimizer = torch.optim.Optimizer


def sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, 6, eta_min=1e-3),
        ],
        milestones=[3],
    )


def one_cycle(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """Moves the momentum (SGD) or the first beta (Adam) as well."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12, cycle_momentum=True)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(
        o, [lambda count: 0.9**count, lambda count: 1.0 / (count + 1)][: len(o.param_groups)]
    ),
    "one-cycle": one_cycle,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 7], 0.3),
    "sequential": sequential,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "none": lambda o: None,
}


def make_optimizer(kind: str, model: Any) -> Optimizer:
    if kind == "sgd":  # in two groups, each with a rate of its own
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_every_member_has_its_own_schedule(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """All schedules in one group, which is traced and fused once for all of their steps."""
    makers = list(SCHEDULERS.items())

    def make(i: int) -> Member:
        name, schedule = makers[i]
        model = mlp(i)
        optimizer = make_optimizer(kind, model)
        return Member(model, optimizer, name, scheduler=schedule(optimizer))

    work = count_work(monkeypatch)
    fleet = Fleet([make(i) for i in range(len(makers))], mse, EXAMPLE)
    assert (work.traces, work.fusions) == (1, 1)
    assert_trains_alone(fleet, make, BATCHES[:11])
    assert (work.traces, work.fusions) == (1, 1)


def test_weight_decay_may_be_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that nobody used is not in the fused update: it is built anew, from the same trace."""
    fleet = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE)
    alone = adam_member(1)
    work = count_work(monkeypatch)
    for number, batch in enumerate(BATCHES[:6]):
        for member in (fleet.members[1], alone):
            member.optimizer.param_groups[0]["weight_decay"] = 0.2 * (number % 2)
        fleet.step(batch)
        train_alone(alone, [batch])
    assert_close(states_of(fleet)["m1"], state_of(alone))
    assert work.traces == 0
    assert work.fusions == 1


def test_a_schedule_counts_updates_not_micro_batches() -> None:
    def make(i: int) -> Member:
        model = mlp(i)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Member(model, optimizer, f"m{i}", scheduler=lr_scheduler.StepLR(optimizer, 1, 0.5))

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE, accumulate=2)
    assert_trains_alone(fleet, make, BATCHES[:6], accumulate=2)
    fleet.stop("m1")
    for batch in BATCHES[:2]:
        fleet.step(batch)
    assert [member.scheduler.last_epoch for member in fleet.members] == [4, 3]


def scheduled(i: int, **options: Any) -> Member:
    """Member ``i`` with a step schedule."""
    member = adam_member(i)
    member.scheduler = lr_scheduler.StepLR(member.optimizer, 1, 0.5)
    for name, value in options.items():
        setattr(member, name, value)
    return member


# ---- by epoch ------------------------------------------------------------------------------------------


def test_epoch_schedules_advance_with_end_epoch() -> None:
    fleet = Fleet([scheduled(0), scheduled(1, scheduler_interval="epoch")], mse, EXAMPLE)
    alone = scheduled(1, scheduler_interval="epoch")
    for epoch in range(2):
        for batch in BATCHES[2 * epoch : 2 * epoch + 2]:
            fleet.step(batch)
            train_alone(alone, [batch])
        fleet.end_epoch({})
        alone.scheduler.step()
    assert [member.scheduler.last_epoch for member in fleet.members] == [4, 2]
    assert_close(states_of(fleet)["m1"], state_of(alone))


def plateau(i: int, **options: Any) -> Member:
    """Member ``i`` whose rate falls tenfold after one epoch without improvement."""
    member = adam_member(i, **options)
    member.scheduler = lr_scheduler.ReduceLROnPlateau(member.optimizer, factor=0.1, patience=0)
    return member


def test_plateau_schedules_look_at_their_own_members_value() -> None:
    fleet = Fleet([plateau(0), plateau(1, scheduler_monitor="val_error"), adam_member(2)], mse, EXAMPLE)
    rates = [member.optimizer.param_groups[0]["lr"] for member in fleet.members]
    fleet.step(BATCHES[0])
    fleet.end_epoch({name: {"loss": 1.0, "val_error": 1.0} for name in fleet.names})
    fleet.end_epoch(
        {
            "m0": {"loss": 0.5, "val_error": 2.0},
            "m1": {"loss": 0.5, "val_error": 2.0},
            "m2": {"loss": 0.5},
        }
    )
    now = [member.optimizer.param_groups[0]["lr"] for member in fleet.members]
    assert now == [rates[0], pytest.approx(0.1 * rates[1]), rates[2]]
    # Whoever is not in the mapping did not train in this epoch.
    fleet.end_epoch({"m0": {"loss": 0.7}})
    now = [member.optimizer.param_groups[0]["lr"] for member in fleet.members]
    assert now == [pytest.approx(0.1 * rates[0]), pytest.approx(0.1 * rates[1]), rates[2]]


def test_an_unknown_monitor_steps_no_schedule_at_all() -> None:
    members = [scheduled(0, scheduler_interval="epoch"), plateau(1, scheduler_monitor="val_f1")]
    fleet = Fleet(members, mse, EXAMPLE)
    fleet.step(BATCHES[0])
    values = {name: {"loss": 1.0, "val_error": 1.0} for name in fleet.names}
    with pytest.raises(MemberError, match="'m1'"):
        fleet.end_epoch(values)
    assert fleet.members[0].scheduler.last_epoch == 0


def test_a_schedule_that_ends_names_its_member() -> None:
    """OneCycleLR refuses to go past its end: the user has to see which of many members that was."""
    first, second = scheduled(0), adam_member(1)
    second.scheduler = lr_scheduler.OneCycleLR(second.optimizer, max_lr=0.2, total_steps=2)
    fleet = Fleet([first, second], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    with pytest.raises(Exception, match="Tried to step") as caught:
        fleet.fit(BATCHES[1:4], epochs=1, progress=False)
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "'m1'" in told
