"""Members come and go: slots are refilled without tracing, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    OPTIMIZERS,
    TOLERANCE,
    adam_member,
    assert_close,
    assert_same,
    count_work,
    dropout_member,
    mlp,
    mse,
    mse_with_metrics,
    same_bits,
    sgd_member,
    state_of,
    states_of,
    train_alone,
    vectors,
)
from torch import Tensor, nn

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


def members(num: int, make: Callable[[int], Member] = adam_member) -> list[Member]:
    return [make(i) for i in range(num)]


def run(fleet: Fleet, batches: list[Any]) -> Tensor:
    return torch.stack([fleet.step(batch) for batch in batches])


# ---- names and order -----------------------------------------------------------------------------------


def test_results_follow_the_names_through_every_change() -> None:
    fleet = Fleet(members(4), mse, EXAMPLE)
    alone = {f"m{i}": adam_member(i) for i in range(7)}

    def check(*names: str) -> None:
        assert fleet.names == names
        assert tuple(member.name for member in fleet.members) == names
        number = fleet.num_steps
        losses = fleet.step(BATCHES[number]).tolist()
        expected = [train_alone(alone[name], [BATCHES[number]])[0] for name in names]
        assert losses == pytest.approx(expected, rel=TOLERANCE)

    check("m0", "m1", "m2", "m3")
    fleet.drop("m1")
    check("m0", "m2", "m3")
    fleet.replace("m0", adam_member(4))
    check("m4", "m2", "m3")
    fleet.add(adam_member(5))  # into the slot that m1 left
    check("m4", "m2", "m3", "m5")
    fleet.add(adam_member(6))
    check("m4", "m2", "m3", "m5", "m6")
    for name in ("m4", "m3", "m5"):
        fleet.drop(name)
    check("m2", "m6")
    states = states_of(fleet)
    for name in fleet.names:
        assert_close(states[name], state_of(alone[name]))


def test_members_without_names_get_free_ones() -> None:
    unnamed = members(4)
    for member in unnamed:
        member.name = None
    fleet = Fleet(unnamed[:2], mse, EXAMPLE)
    assert fleet.names == ("member-0", "member-1")
    fleet.drop("member-0")
    fleet.add(unnamed[2])
    fleet.add(unnamed[3])
    assert len(set(fleet.names)) == 3
    assert fleet.names[0] == "member-1"


def test_a_dropped_name_may_be_used_again() -> None:
    fleet = Fleet(members(2), mse, EXAMPLE)
    fleet.drop("m0")
    fleet.add(adam_member(5, "m0"))
    assert fleet.names == ("m1", "m0")
    run(fleet, BATCHES[:2])
    alone = adam_member(5)
    train_alone(alone, BATCHES[:2])
    assert_close(states_of(fleet)["m0"], state_of(alone))


# ---- what it costs -------------------------------------------------------------------------------------


def test_a_free_slot_is_refilled_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(members(3), mse, EXAMPLE)
    work = count_work(monkeypatch)
    fleet.step(BATCHES[0])
    fleet.drop("m1")
    fleet.step(BATCHES[1])
    fleet.add(adam_member(3))
    fleet.step(BATCHES[2])
    fleet.replace("m0", adam_member(4))
    fleet.step(BATCHES[3])
    assert work.total == 0
    (group,) = fleet._groups
    assert (group.width, len(group.programs.kept)) == (3, 1)


def test_a_full_group_grows_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, control = (Fleet(members(2), mse, EXAMPLE) for _ in range(2))
    run(fleet, BATCHES[:2])
    run(control, BATCHES[:2])
    work = count_work(monkeypatch)
    fleet.add(adam_member(2))
    run(fleet, BATCHES[2:5])
    assert (work.traces, work.fusions) == (0, 1)
    run(control, BATCHES[2:5])
    alone = adam_member(2)
    train_alone(alone, BATCHES[2:5])
    states, others = states_of(fleet), states_of(control)
    assert_close(states["m2"], state_of(alone))
    for name in ("m0", "m1"):
        assert_close(states[name], others[name])


def test_a_mostly_empty_group_shrinks_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(members(5), mse, EXAMPLE)
    fleet.step(BATCHES[0])
    fleet.drop("m0")
    fleet.drop("m3")
    work = count_work(monkeypatch)
    fleet.step(BATCHES[1])
    assert [group.width for group in fleet.summary()] == [5]
    fleet.drop("m1")
    fleet.step(BATCHES[2])
    assert [group.width for group in fleet.summary()] == [2]
    assert (work.traces, work.fusions) == (0, 1)
    fleet.step(BATCHES[3])
    states = states_of(fleet)
    for i in (2, 4):
        alone = adam_member(i)
        train_alone(alone, BATCHES[:4])
        assert_close(states[f"m{i}"], state_of(alone))


def test_a_group_without_members_goes_away() -> None:
    fleet = Fleet([adam_member(0), sgd_member(1)], mse, EXAMPLE)
    assert len(fleet.summary()) == 2
    fleet.drop("m0")
    fleet.step(BATCHES[0])
    assert [group.members for group in fleet.summary()] == [("m1",)]


# ---- newcomers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd-momentum", "adam-amsgrad", "param-groups"])
def test_replaced_and_taken_back(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A newcomer has nothing of its predecessor; one that comes back goes on where it was."""

    def make(i: int) -> Member:
        model = mlp(i)
        return Member(model, OPTIMIZERS[kind](model, i % 2), f"m{i}")

    def trained(i: int, batches: list[Any]) -> dict[str, Tensor]:
        alone = make(i)
        train_alone(alone, batches)
        return state_of(alone)

    fleet = Fleet([make(0), make(1)], mse, EXAMPLE)
    run(fleet, BATCHES[:3])
    new = make(3)
    train_alone(new, BATCHES[:1])  # it comes with a history of its own
    work = count_work(monkeypatch)
    assert_close(state_of(fleet.replace("m1", new)), trained(1, BATCHES[:3]))
    run(fleet, BATCHES[3:6])
    assert_close(states_of(fleet)["m3"], trained(3, [*BATCHES[:1], *BATCHES[3:6]]))
    fleet.add(fleet.drop("m0"))
    assert fleet.names == ("m3", "m0")
    run(fleet, BATCHES[6:8])
    states = states_of(fleet)
    assert_close(states["m0"], trained(0, BATCHES[:8]))
    assert_close(states["m3"], trained(3, [*BATCHES[:1], *BATCHES[3:8]]))
    assert work.total == 0


def test_neighbours_of_a_replacement_notice_nothing() -> None:
    fleet, control = (Fleet(members(2, dropout_member), mse, EXAMPLE, deterministic=True) for _ in range(2))
    for batch in BATCHES[:2]:
        assert same_bits(fleet.step(batch), control.step(batch))
    fleet.replace("m1", dropout_member(3))
    for batch in BATCHES[2:5]:
        assert same_bits(fleet.step(batch)[:1], control.step(batch)[:1])
    assert_same(states_of(fleet)["m0"], states_of(control)["m0"])


def test_a_replacement_of_another_kind_gets_a_group_of_its_own() -> None:
    fleet = Fleet(members(2), mse, EXAMPLE)
    run(fleet, BATCHES[:2])
    fleet.replace("m0", sgd_member(5))
    assert fleet.names == ("m5", "m1")
    losses = run(fleet, BATCHES[2:5])
    alone = sgd_member(5)
    expected = train_alone(alone, BATCHES[2:5])
    assert losses[:, 0].tolist() == pytest.approx(expected, rel=TOLERANCE)
    assert_close(states_of(fleet)["m5"], state_of(alone))
    assert sorted(group.members for group in fleet.summary()) == [("m1",), ("m5",)]


def test_a_replacement_of_another_kind_under_the_same_name() -> None:
    fleet = Fleet(members(2), mse, EXAMPLE)
    run(fleet, BATCHES[:2])
    old = fleet.replace("m0", sgd_member(5, "m0"))
    assert fleet.names == ("m0", "m1")
    alone = adam_member(0)
    train_alone(alone, BATCHES[:2])
    assert_close(state_of(old), state_of(alone))
    run(fleet, BATCHES[2:4])
    alone = sgd_member(5)
    train_alone(alone, BATCHES[2:4])
    assert_close(states_of(fleet)["m0"], state_of(alone))


def test_the_only_member_is_replaced() -> None:
    fleet = Fleet(members(1), mse, EXAMPLE)
    run(fleet, BATCHES[:2])
    fleet.replace("m0", adam_member(1))
    run(fleet, BATCHES[2:4])
    alone = adam_member(1)
    train_alone(alone, BATCHES[2:4])
    assert_close(states_of(fleet)["m1"], state_of(alone))


def test_clipping_arrives_with_a_newcomer() -> None:
    fleet = Fleet(members(2, sgd_member), mse, EXAMPLE)
    fleet.step(BATCHES[0])
    fleet.replace("m1", sgd_member(2, clip_norm=0.05))
    run(fleet, BATCHES[1:4])
    states = states_of(fleet)
    alone = sgd_member(2, clip_norm=0.05)
    train_alone(alone, BATCHES[1:4])
    assert_close(states["m2"], state_of(alone))
    neighbour = sgd_member(0)
    train_alone(neighbour, BATCHES[:4])
    assert_close(states["m0"], state_of(neighbour))


def test_per_member_data_follows_the_names() -> None:
    def stacked(*seeds: int) -> tuple[Tensor, ...]:
        return tuple(torch.stack(leaves) for leaves in zip(*map(vectors, seeds), strict=True))

    fleet = Fleet(members(3), mse, stacked(0, 1, 2), data="per_member")
    fleet.step(stacked(0, 1, 2))
    fleet.drop("m0")
    fleet.step(stacked(11, 12))
    fleet.add(adam_member(3))
    losses = fleet.step(stacked(21, 22, 23)).tolist()
    alone = {1: [1, 11, 21], 2: [2, 12, 22], 3: [23]}
    states = states_of(fleet)
    for position, (i, seeds) in enumerate(alone.items()):
        member = adam_member(i)
        expected = train_alone(member, [vectors(seed) for seed in seeds])
        assert losses[position] == pytest.approx(expected[-1], rel=TOLERANCE)
        assert_close(states[f"m{i}"], state_of(member))


# ---- leaving and coming back ---------------------------------------------------------------------------


def test_a_member_with_dropout_that_comes_back_goes_on_with_its_draws() -> None:
    """Otherwise it would see the masks of its first steps again."""
    fleet, control = (Fleet(members(2, dropout_member), mse, EXAMPLE) for _ in range(2))
    run(fleet, BATCHES[:3])
    fleet.add(fleet.drop("m0"))
    run(fleet, BATCHES[3:6])
    run(control, BATCHES[:6])
    assert_close(states_of(fleet)["m0"], states_of(control)["m0"])


def test_a_stopped_member_that_comes_back_trains_again() -> None:
    fleet = Fleet(members(2), mse, EXAMPLE)
    fleet.step(BATCHES[0])
    fleet.stop("m0")
    fleet.step(BATCHES[1])
    fleet.add(fleet.drop("m0"))
    assert fleet.stopped() == {}
    fleet.step(BATCHES[2])
    alone = adam_member(0)
    train_alone(alone, [BATCHES[0], BATCHES[2]])
    assert_close(states_of(fleet)["m0"], state_of(alone))


def test_slots_of_stale_numbers_touch_nobody() -> None:
    """What a member left behind may be NaN or infinite: the row is still computed."""
    fleet, control = (Fleet(members(3, dropout_member), mse, EXAMPLE, deterministic=True) for _ in range(2))
    for one in (fleet, control):
        one.step(BATCHES[0])
        one.drop("m1")
    (group,) = fleet._groups
    for kind in (group.state.parameters, group.state.states):
        for rows in kind.values():
            rows[1].fill_(torch.nan)
    for batch in BATCHES[1:4]:
        assert same_bits(fleet.step(batch), control.step(batch))
    after, expected = states_of(fleet), states_of(control)
    for name in ("m0", "m2"):
        assert_same(after[name], expected[name])
    assert fleet.stopped() == {}
    fleet.add(dropout_member(3))
    fleet.step(BATCHES[4])
    assert torch.isfinite(fleet.step(BATCHES[5])).all()


# ---- results between a change and the next step --------------------------------------------------------


def test_metrics_of_the_last_step_after_members_came_and_went() -> None:
    """A newcomer was not there: it has no value, least of all one of somebody else."""
    fleet = Fleet([*members(2), sgd_member(2)], mse_with_metrics, EXAMPLE)
    for newcomer, join in (("m3", lambda new: fleet.replace("m0", new)), ("m4", fleet.add)):
        fleet.step(EXAMPLE)
        before = fleet.metrics["largest"]
        join(adam_member(5, newcomer))
        after = fleet.metrics["largest"]
        assert len(after) == len(fleet.names)
        assert after[2] == before[2]  # of another group, which did not change
        assert torch.isnan(after[fleet.names.index(newcomer)])
    fleet.step(EXAMPLE)
    before = fleet.metrics["largest"]
    fleet.drop("m1")
    assert fleet.metrics["largest"].tolist() == before[[0, 2, 3]].tolist()


# ---- constants -----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """With a buffer and a frozen weight that training never changes."""

    def __init__(self, seed: int, scale: float, shift: float) -> None:
        super().__init__()
        self.body = mlp(seed)
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float64))
        self.shift = nn.Parameter(torch.tensor([shift], dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale + self.shift


def scaled(i: int, scale: float = 1.0, shift: float = 0.0) -> Member:
    model = Scaled(i, scale, shift)
    return Member(model, torch.optim.Adam(model.body.parameters(), lr=0.05), f"m{i}")


def test_newcomers_use_their_own_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that all members had in common are no longer common then."""
    fleet = Fleet([scaled(i) for i in range(3)], mse, EXAMPLE)
    run(fleet, BATCHES[:2])
    work = count_work(monkeypatch)
    fleet.replace("m1", scaled(3, scale=3.0, shift=0.5))
    run(fleet, BATCHES[2:4])
    fleet.drop("m0")
    fleet.add(scaled(4, scale=4.0, shift=-0.5))
    run(fleet, BATCHES[4:6])
    assert work.traces == 0
    assert len(fleet.summary()) == 1
    states = states_of(fleet)
    for i, options, batches in (
        (2, {}, BATCHES[:6]),
        (3, {"scale": 3.0, "shift": 0.5}, BATCHES[2:6]),
        (4, {"scale": 4.0, "shift": -0.5}, BATCHES[4:6]),
    ):
        alone = scaled(i, **options)
        train_alone(alone, batches)
        assert_close(states[f"m{i}"], state_of(alone))


def test_constants_that_differ_from_the_start() -> None:
    settings = [{"scale": 1.0 + i, "shift": 0.1 * i} for i in range(3)]
    fleet = Fleet([scaled(i, **settings[i]) for i in range(3)], mse, EXAMPLE)
    assert len(fleet.summary()) == 1
    run(fleet, BATCHES[:3])
    fleet.replace("m0", scaled(5, scale=9.0))
    run(fleet, BATCHES[3:5])
    states = states_of(fleet)
    for i, options, batches in (
        (1, settings[1], BATCHES[:5]),
        (2, settings[2], BATCHES[:5]),
        (5, {"scale": 9.0}, BATCHES[3:5]),
    ):
        alone = scaled(i, **options)
        train_alone(alone, batches)
        assert_close(states[f"m{i}"], state_of(alone))


def test_a_member_keeps_its_constants_when_it_leaves() -> None:
    fleet = Fleet([scaled(0, scale=2.0), scaled(1, scale=2.0)], mse, EXAMPLE)
    fleet.replace("m1", scaled(2, scale=5.0))
    run(fleet, BATCHES[:2])
    assert fleet.drop("m0").model.scale.item() == 2.0
    assert fleet.drop("m2").model.scale.item() == 5.0
