"""A step that fails: all members are as before, or the fleet says who is not and takes no more calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    adam,
    assert_alone,
    assert_same,
    assert_same_fleets,
    assert_same_states,
    bn_mlp,
    scheduled,
    state_of,
    states_of,
)
from odd_models import classify
from torch import Tensor

from trainmux import Fleet, Member
from trainmux.errors import FleetError

pytestmark = pytest.mark.usefixtures("built_once")

WIDE, NARROW = 5, 3
"""Classes: a label of 4 is good for one group and bad for the other."""


def member(i: int, num_classes: int, *, dropout: float = 0.0) -> Member:
    model = bn_mlp(i, dropout=dropout, outputs=num_classes)
    return scheduled(adam(model, f"m{i}", 0.02 * (i + 1), seed=i))


def batch(number: int, *, largest: int = NARROW - 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, NARROW, (6,), generator=generator)
    labels[0] = largest
    return inputs, labels


BAD = batch(9, largest=WIDE - 1)


def fleet_of(classes: tuple[int, ...] = (WIDE, NARROW), *, dropout: float = 0.0, **options: Any) -> Fleet:
    members = [member(i, count, dropout=dropout) for i, count in enumerate(classes)]
    return Fleet(members, classify, batch(0), precision="fp64", **options)


def assert_trained_as_alone(fleet: Fleet, classes: tuple[int, ...]) -> None:
    """Two steps, on batches 0 and 1."""
    members = [member(i, count) for i, count in enumerate(classes)]
    assert_alone(fleet, *((each, [batch(0), batch(1)]) for each in members), loss=classify)


WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "three groups, the middle one fails": ((WIDE, NARROW, WIDE + 1), {}),
    "one group": ((NARROW, NARROW), {}),
    "between two updates": ((WIDE, NARROW), {"accumulate": 2}),
    "in sub-arrays": ((WIDE, WIDE, NARROW, NARROW), {"width": 1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_one_group_rejects_changes_no_group(way: str) -> None:
    """Dropout tells by its masks whether draws were counted; what is accumulated shows at the next update."""
    classes, options = WAYS[way]
    fleet, other = (fleet_of(classes, dropout=0.3, **options) for _ in range(2))
    for each in (fleet, other):
        each.step(batch(0))
    with pytest.raises(FleetError, match=r"gather.* at .*odd_models\.py.*out of bounds"):
        fleet.step(BAD)
    assert_same_fleets(fleet, other)
    for number in (1, 2, 3):
        assert torch.equal(fleet.step(batch(number)), other.step(batch(number)))
    assert_same_fleets(fleet, other)


# ---- where members are left at different steps ----------------------------------------------------------


CALLS: dict[str, Callable[[Fleet, Path], Any]] = {
    "step": lambda fleet, path: fleet.step(batch(1)),
    "evaluate": lambda fleet, path: fleet.evaluate([batch(1)]),
    "sync": lambda fleet, path: fleet.sync(),
    "save": lambda fleet, path: fleet.save(path / "other"),
    "drop": lambda fleet, path: fleet.drop("m0"),
    "add": lambda fleet, path: fleet.add(member(7, WIDE)),
    "metrics": lambda fleet, path: fleet.metrics,
    "plan": lambda fleet, path: fleet.plan(),
    "use": lambda fleet, path: fleet.use(None),
    "end_epoch": lambda fleet, path: fleet.end_epoch({}),
    "fit": lambda fleet, path: fleet.fit([batch(1)], epochs=1, progress=False),
}


def test_a_fleet_with_members_at_different_steps_is_frozen_until_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure among the changes of the second group, when the first one is a step ahead."""
    fleet = fleet_of((WIDE, NARROW, NARROW + 1))
    fleet.step(batch(0))
    fleet.save(tmp_path / "saved")
    own = [state_of(each) for each in fleet.members]
    monkeypatch.setattr(fleet._groups[1], "note", lambda *_: 1 / 0)
    with pytest.raises(FleetError) as failed:
        fleet.step(batch(1))
    monkeypatch.undo()
    assert "a step ahead: m0; changed in part: m1; as before: m2" in str(failed.value)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    for name, call in CALLS.items():
        with pytest.raises(FleetError, match="a step ahead: m0"):
            call(fleet, tmp_path)
        assert not (tmp_path / "other").exists(), name
    for each, before in zip(fleet.members, own, strict=True):
        assert_same(state_of(each), before)
    with pytest.raises(Exception, match="elsewhere"):
        fleet.restore(tmp_path / "elsewhere")
    with pytest.raises(FleetError):
        fleet.sync()
    fleet.restore(tmp_path / "saved")
    fleet.step(batch(1))
    assert_trained_as_alone(fleet, (WIDE, NARROW, NARROW + 1))


@pytest.mark.parametrize("place", [0, -1])
def test_a_planned_step_that_fails_changes_nothing_or_freezes(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sub-arrays take turns: when the first one rejects its batch, nothing has been updated."""
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))

    def stacked(number: int) -> tuple[Tensor, Tensor]:
        inputs, labels = batch(number)
        return torch.stack([inputs, inputs]), torch.stack([labels, labels])

    members = [member(0, WIDE), member(1, NARROW)]
    fleet = Fleet(members, classify, stacked(0), precision="fp64", data="per_member")
    plan = fleet.plan(policy="none", device="a100-40gb")
    fleet.use(plan)
    order = [sub_array.members[0] for sub_array in plan.partition]
    assert len(order) == 2
    fleet.step(stacked(0))
    fleet.save(tmp_path / "saved")
    before = states_of(fleet)
    bad = stacked(1)
    bad[1][fleet.names.index(order[place]), 0] = WIDE
    with pytest.raises((RuntimeError, IndexError)) as failed:
        fleet.step(bad)
    assert isinstance(failed.value, FleetError) == (place == -1)
    if place == -1:
        with pytest.raises(FleetError, match="changed in part: m"):
            fleet.sync()
        fleet.restore(tmp_path / "saved")
    assert_same_states(states_of(fleet), before)
    assert fleet.num_steps == 1
    fleet.step(stacked(1))
    assert_trained_as_alone(fleet, (WIDE, NARROW))
