"""Members that come between two updates of a fleet that accumulates: they begin with the next whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    adam_member,
    assert_close,
    assert_same,
    bn_mlp,
    dropout_member,
    mse,
    state_of,
    states_of,
    train_alone,
)
from torch.optim import lr_scheduler

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


def member(i: int) -> Member:
    """With running statistics, a schedule and optimizer state: all of them tell what it has seen."""
    model = bn_mlp(i)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1))
    return Member(model, optimizer, f"m{i}", scheduler=lr_scheduler.ExponentialLR(optimizer, 0.8))


def fleet_of(make: Callable[[int], Member] = member, num_members: int = 2) -> Fleet:
    return Fleet([make(i) for i in range(num_members)], mse, EXAMPLE, accumulate=3, precision="fp64")


def step(fleet: Fleet, first: int, end: int) -> None:
    for batch in BATCHES[first:end]:
        fleet.step(batch)


JOINS: dict[str, Callable[[Fleet, Member], object]] = {
    "add": lambda fleet, new: fleet.add(new),
    "replace": lambda fleet, new: fleet.replace("m0", new),
    "into a free slot": lambda fleet, new: (fleet.drop("m0"), fleet.add(new)),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_a_newcomer_trains_as_alone_from_the_next_whole_update(join: str, num_before: int) -> None:
    fleet = fleet_of()
    step(fleet, 0, num_before)
    JOINS[join](fleet, member(5))
    step(fleet, num_before, 3)
    fresh = member(5)
    assert_close(states_of(fleet)["m5"], state_of(fresh))
    step(fleet, 3, 9)
    states = states_of(fleet)
    train_alone(fresh, BATCHES[3:9], accumulate=3)
    assert_close(states["m5"], state_of(fresh))
    rates = [each.optimizer.param_groups[0]["lr"] for each in (fleet.members[fleet.names.index("m5")], fresh)]
    assert rates[0] == rates[1]
    neighbour = member(1)
    train_alone(neighbour, BATCHES[:9], accumulate=3)
    assert_close(states["m1"], state_of(neighbour))


def test_draws_are_counted_from_the_first_batch_that_it_trains_on() -> None:
    late = fleet_of(dropout_member)
    step(late, 0, 1)
    late.add(dropout_member(5))
    step(late, 1, 9)
    other = Fleet([dropout_member(5)], mse, EXAMPLE, accumulate=3, precision="fp64")
    step(other, 3, 9)
    assert_close(states_of(late)["m5"], states_of(other)["m5"])
    assert late.members[2].num_draws == other.members[0].num_draws == 6


def test_a_member_taken_out_and_in_again_between_updates_loses_what_was_accumulated() -> None:
    fleet = fleet_of(adam_member)
    step(fleet, 0, 4)
    fleet.add(fleet.drop("m0"))
    step(fleet, 4, 9)
    alone = adam_member(0)
    train_alone(alone, [*BATCHES[:3], *BATCHES[6:9]], accumulate=3)
    assert_close(states_of(fleet)["m0"], state_of(alone))


def test_a_checkpoint_has_who_waits(tmp_path: Path) -> None:
    fleet = fleet_of(dropout_member)
    step(fleet, 0, 1)
    fleet.add(dropout_member(5))
    step(fleet, 1, 2)
    fleet.save(tmp_path)
    step(fleet, 2, 9)
    again = Fleet([dropout_member(i) for i in (0, 1, 5)], mse, EXAMPLE, accumulate=3, precision="fp64")
    again.restore(tmp_path)
    step(again, 2, 9)
    expected = states_of(fleet)
    for name, state in states_of(again).items():
        assert_same(state, expected[name])
    fleet.restore(tmp_path)  # where it no longer waits, it does again
    step(fleet, 2, 9)
    for name, state in states_of(fleet).items():
        assert_same(state, expected[name])


def test_one_that_is_stopped_while_it_waits_never_begins() -> None:
    fleet = fleet_of()
    step(fleet, 0, 1)
    fleet.add(member(5))
    assert fleet.stopped() == {}
    fleet.stop("m5")
    step(fleet, 1, 6)
    assert fleet.stopped() == {"m5": "stopped"}
    assert_close(states_of(fleet)["m5"], state_of(member(5)))


def test_a_newcomer_under_a_plan_waits_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
    planned, plain = fleet_of(), fleet_of()
    planned.use(planned.plan(policy="none", device="a100-40gb"))
    for fleet in (planned, plain):
        step(fleet, 0, 1)
        fleet.replace("m0", member(5))
        step(fleet, 1, 6)
    expected = states_of(plain)
    for name, state in states_of(planned).items():
        assert_close(state, expected[name])
