"""A group in sub-arrays trains as one array does, and as its members do alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import CLOSE
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    adam_member,
    assert_close,
    assert_same,
    assert_trains_alone,
    bn_cnn,
    count_work,
    dropout_member,
    images,
    mse,
    state_of,
    states_of,
    train_alone,
    vectors,
)

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")

NUM_MEMBERS = 4


def make_fleet(make: Any = adam_member, num_members: int = NUM_MEMBERS, **options: Any) -> Fleet:
    return Fleet([make(i) for i in range(num_members)], mse, EXAMPLE, **options)


def own_limits(i: int) -> Member:
    """Learning rate, largest norm and largest value are each member's own; one has no limit."""
    limits = {} if i == 1 else {"clip_norm": 0.3 / (i + 1), "clip_value": 0.05 * (i + 1)}
    return adam_member(i, **limits)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adam_member, {"width": 1}),
        (own_limits, {"width": 2, "accumulate": 2}),
        (own_limits, {"width": 1}),
        (adam_member, {"width": 2, "branches": 2}),
        (adam_member, {"width": 3, "branches": 1}),  # does not divide the group: a smaller width is taken
        (adam_member, {"width": 4, "branches": 3}),
        (own_limits, {"width": 9}),
    ],
)
def test_any_width_trains_as_plain_torch_does(make: Any, options: dict[str, Any]) -> None:
    fleet = make_fleet(make, **options)
    assert_trains_alone(fleet, make, BATCHES[:4], accumulate=options.get("accumulate", 1))


@pytest.mark.parametrize("width", [1, 2])
def test_draws_statistics_and_evaluation_are_those_of_one_array(width: int) -> None:
    whole, parts = make_fleet(dropout_member), make_fleet(dropout_member, width=width)
    for batch in BATCHES[:4]:
        torch.testing.assert_close(parts.step(batch), whole.step(batch), rtol=CLOSE, atol=CLOSE)
        for name, value in whole.metrics.items():
            torch.testing.assert_close(parts.metrics[name], value, rtol=CLOSE, atol=CLOSE)
    expected = states_of(whole)
    for name, state in states_of(parts).items():
        assert_close(state, expected[name])
    evaluated = whole.evaluate(BATCHES[:3])
    for name, values in parts.evaluate(BATCHES[:3]).items():
        assert values == pytest.approx(evaluated[name], rel=CLOSE)


def test_convolutions_over_batches_of_each_members_own() -> None:
    def member(i: int) -> Member:
        model = bn_cnn(i)
        return Member(model, torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1)), f"m{i}")

    own = [[images(10 * i + step) for step in range(3)] for i in range(NUM_MEMBERS)]
    stacked = [tuple(map(torch.stack, zip(*rows, strict=True))) for rows in zip(*own, strict=True)]
    members = [member(i) for i in range(NUM_MEMBERS)]
    fleet = Fleet(members, mse, stacked[0], data="per_member", width=2)
    for batch in stacked:
        fleet.step(batch)
    states = states_of(fleet)
    for i in range(NUM_MEMBERS):
        alone = member(i)
        train_alone(alone, own[i])
        assert_close(states[f"m{i}"], state_of(alone), 1e-10)


def test_members_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(width=2)
    work = count_work(monkeypatch)
    alone = {f"m{i}": adam_member(i) for i in range(7)}

    def check(*names: str) -> None:
        assert fleet.names == names
        batch = vectors(fleet.num_steps)
        losses = fleet.step(batch).tolist()
        assert losses == pytest.approx([train_alone(alone[name], [batch])[0] for name in names], rel=CLOSE)

    check("m0", "m1", "m2", "m3")
    fleet.replace("m1", adam_member(4))
    fleet.drop("m2")
    check("m0", "m4", "m3")
    fleet.add(adam_member(5))
    check("m0", "m4", "m3", "m5")
    assert work.total == 0, "expected slots to be refilled without work"
    fleet.add(adam_member(6))  # five: no width of two any more
    check("m0", "m4", "m3", "m5", "m6")
    for name, state in states_of(fleet).items():
        assert_close(state, state_of(alone[name]))


def test_a_stop_touches_no_other_sub_array_and_a_checkpoint_goes_on_at_another_width(tmp_path: Path) -> None:
    fleet, undisturbed = make_fleet(width=2), make_fleet(width=2)
    fleet.stop("m1")
    before = states_of(fleet)["m1"]
    for batch in BATCHES[:3]:
        fleet.step(batch)
        undisturbed.step(batch)
    got, expected = states_of(fleet), states_of(undisturbed)
    assert_same(got["m1"], before)
    for name in ("m0", "m2", "m3"):
        assert_same(got[name], expected[name])
    fleet.save(tmp_path / "saved")
    other = make_fleet(width=1)
    other.restore(tmp_path / "saved")
    torch.testing.assert_close(other.step(BATCHES[2]), fleet.step(BATCHES[2]), rtol=CLOSE, atol=CLOSE)
