"""A group in sub-arrays trains as one array does, and as its members do alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
    mse_with_metrics,
    state_of,
    states_of,
    train_alone,
    vectors,
)

from trainmux import Fleet, Member
from trainmux.engine._sub_arrays import SubArrays

pytestmark = pytest.mark.usefixtures("built_once")

NUM_MEMBERS = 4


def make_fleet(make: Any = adam_member, num_members: int = NUM_MEMBERS, **options: Any) -> Fleet:
    return Fleet([make(i) for i in range(num_members)], mse, EXAMPLE, **options)


def own_limits(i: int) -> Member:
    """Learning rate, largest norm and largest value are each member's own; one has no limit."""
    limits = {} if i == 1 else {"clip_norm": 0.3 / (i + 1), "clip_value": 0.05 * (i + 1)}
    return adam_member(i, **limits)


def image_member(i: int) -> Member:
    model = bn_cnn(i)
    return Member(model, torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1)), f"m{i}")


@pytest.mark.parametrize(("width", "branches"), [(1, None), (2, None), (2, 2), (3, 1), (4, 3), (9, None)])
def test_any_width_trains_as_plain_torch_does(width: int, branches: int | None) -> None:
    assert_trains_alone(make_fleet(width=width, branches=branches), adam_member, BATCHES[:4])


@pytest.mark.parametrize("width", [1, 2])
def test_settings_and_limits_stay_with_their_member(width: int) -> None:
    assert_trains_alone(make_fleet(own_limits, width=width), own_limits, BATCHES[:4])


@pytest.mark.parametrize("width", [1, 2])
def test_dropout_and_running_statistics_are_those_of_one_array(width: int) -> None:
    whole, parts = make_fleet(dropout_member), make_fleet(dropout_member, width=width)
    for batch in BATCHES[:4]:
        torch.testing.assert_close(parts.step(batch), whole.step(batch), rtol=1e-12, atol=1e-12)
        for name, value in whole.metrics.items():
            torch.testing.assert_close(parts.metrics[name], value, rtol=1e-12, atol=1e-12)
    expected = states_of(whole)
    for name, state in states_of(parts).items():
        assert_close(state, expected[name])


def test_convolutions() -> None:
    batches = [images(seed) for seed in range(3)]
    fleet = Fleet([image_member(i) for i in range(4)], mse, batches[0], width=2)
    got = torch.stack([fleet.step(batch) for batch in batches])
    states = states_of(fleet)
    for i in range(4):
        alone = image_member(i)
        losses = torch.tensor(train_alone(alone, batches), dtype=torch.float64)
        torch.testing.assert_close(got[:, i], losses, rtol=1e-10, atol=1e-10)
        assert_close(states[f"m{i}"], state_of(alone), 1e-10)


@pytest.mark.parametrize(("num_members", "width", "expected"), [(6, 4, 3), (5, 3, 1), (7, 7, None)])
def test_widths_that_do_not_divide_the_group(num_members: int, width: int, expected: int | None) -> None:
    """Sub-arrays are alike: the next smaller width that divides the group is taken."""
    seen: list[int] = []
    original = SubArrays.__init__

    def remember(self: Any, program: Any, axes: Any, fed: Any, num_arrays: int, num_branches: int) -> None:
        seen.append(num_arrays)
        original(self, program, axes, fed, num_arrays, num_branches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SubArrays, "__init__", remember)
        fleet = make_fleet(num_members=num_members, width=width)
    assert seen == ([] if expected is None else [num_members // expected])
    assert_trains_alone(fleet, adam_member, BATCHES[:2])


def test_members_with_batches_of_their_own() -> None:
    own = [[vectors(10 * i + step) for step in range(3)] for i in range(NUM_MEMBERS)]
    stacked = [
        tuple(torch.stack(leaves) for leaves in zip(*[own[i][step] for i in range(NUM_MEMBERS)], strict=True))
        for step in range(3)
    ]
    fleet = Fleet([adam_member(i) for i in range(4)], mse, stacked[0], data="per_member", width=2)
    for batch in stacked:
        fleet.step(batch)
    states = states_of(fleet)
    for i in range(NUM_MEMBERS):
        alone = adam_member(i)
        train_alone(alone, own[i])
        assert_close(states[f"m{i}"], state_of(alone))


def test_accumulation() -> None:
    fleet = make_fleet(own_limits, accumulate=2, width=2)
    assert_trains_alone(fleet, own_limits, BATCHES[:6], accumulate=2)


def test_evaluation() -> None:
    whole, parts = make_fleet(), make_fleet(width=1)
    expected = whole.evaluate(BATCHES[:3], mse_with_metrics_only)
    got = parts.evaluate(BATCHES[:3], mse_with_metrics_only)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert got[name] == pytest.approx(values, rel=1e-12)


def mse_with_metrics_only(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    loss, metrics = mse_with_metrics(model, batch)
    return {"loss": loss, "largest": metrics["largest"]}


def test_members_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(width=2)
    work = count_work(monkeypatch)
    alone = {f"m{i}": adam_member(i) for i in range(7)}

    def check(*names: str) -> None:
        assert fleet.names == names
        batch = BATCHES[fleet.num_steps]
        losses = fleet.step(batch).tolist()
        assert losses == pytest.approx([train_alone(alone[name], [batch])[0] for name in names], rel=1e-12)

    check("m0", "m1", "m2", "m3")
    fleet.replace("m1", adam_member(4))
    check("m0", "m4", "m2", "m3")
    fleet.drop("m2")
    check("m0", "m4", "m3")
    fleet.add(adam_member(5))
    check("m0", "m4", "m3", "m5")
    assert work.total == 0, "expected slots to be refilled without work"
    fleet.add(adam_member(6))  # five: no width of two any more
    check("m0", "m4", "m3", "m5", "m6")
    for name, state in states_of(fleet).items():
        assert_close(state, state_of(alone[name]))


def test_what_stops_in_one_sub_array_touches_no_other() -> None:
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


def test_a_checkpoint_of_one_width_goes_on_at_another(tmp_path: Path) -> None:
    fleet = make_fleet(width=2)
    for batch in BATCHES[:2]:
        fleet.step(batch)
    fleet.save(tmp_path / "saved")
    other = make_fleet(width=1)
    other.restore(tmp_path / "saved")
    torch.testing.assert_close(other.step(BATCHES[2]), fleet.step(BATCHES[2]), rtol=1e-12, atol=1e-12)
