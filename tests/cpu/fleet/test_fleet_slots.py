"""Members come and go: slots are refilled without tracing, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    OPTIMIZERS,
    TOLERANCE,
    adam_member,
    assert_alone,
    assert_close,
    assert_same,
    assert_same_states,
    bn_mlp,
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
from torch.optim import lr_scheduler

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


def fleet_of(num: int, make: Callable[[int], Member] = adam_member, **options: Any) -> Fleet:
    return Fleet([make(i) for i in range(num)], mse, EXAMPLE, **options)


def run(fleet: Fleet, first: int, end: int) -> None:
    for batch in BATCHES[first:end]:
        fleet.step(batch)


def widths(fleet: Fleet) -> list[int]:
    return [group.width for group in fleet.summary()]


# ---- names and order -----------------------------------------------------------------------------------


def test_results_follow_the_names_through_every_change() -> None:
    fleet = fleet_of(4)
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
    assert_alone(fleet, *((alone[name], []) for name in fleet.names))


def test_names_of_newcomers() -> None:
    """Those without a name get a free one, and a dropped name may be used again."""
    unnamed = [adam_member(i) for i in range(4)]
    for member in unnamed:
        member.name = None
    fleet = Fleet(unnamed[:2], mse, EXAMPLE)
    assert fleet.names == ("member-0", "member-1")
    fleet.drop("member-0")
    fleet.add(unnamed[2])
    fleet.add(unnamed[3])
    assert len(set(fleet.names)) == 3
    assert fleet.names[0] == "member-1"
    fleet.drop("member-1")
    fleet.add(adam_member(5, "member-1"))
    assert fleet.names[2] == "member-1"
    run(fleet, 0, 2)
    assert_alone(fleet, (adam_member(5, "member-1"), BATCHES[:2]))


# ---- what it costs -------------------------------------------------------------------------------------


def test_a_free_slot_is_refilled_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(3)
    work = count_work(monkeypatch)
    fleet.drop("m1")
    run(fleet, 0, 1)
    fleet.add(adam_member(3))
    run(fleet, 1, 2)
    fleet.replace("m0", adam_member(4))
    run(fleet, 2, 3)
    assert work.total == 0
    assert widths(fleet) == [3]


def test_a_full_group_grows_and_an_empty_one_shrinks_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(4)
    run(fleet, 0, 2)
    work = count_work(monkeypatch)
    fleet.add(adam_member(4))
    run(fleet, 2, 3)
    assert (work.traces, work.fusions) == (0, 1)
    for name in ("m0", "m3"):
        fleet.drop(name)
    run(fleet, 3, 4)
    assert widths(fleet) == [5]
    fleet.drop("m1")
    run(fleet, 4, 5)
    assert widths(fleet) == [2]
    assert (work.traces, work.fusions) == (0, 2)
    assert_alone(fleet, (adam_member(2), BATCHES[:5]), (adam_member(4), BATCHES[2:5]))


def test_a_group_without_members_goes_away() -> None:
    fleet = Fleet([adam_member(0), sgd_member(1)], mse, EXAMPLE)
    assert len(fleet.summary()) == 2
    fleet.drop("m0")
    fleet.step(BATCHES[0])
    assert [group.members for group in fleet.summary()] == [("m1",)]


# ---- newcomers -----------------------------------------------------------------------------------------


def test_replaced_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer has nothing of its predecessor; one that comes back goes on where it was."""

    def make(i: int) -> Member:
        model = mlp(i)
        return Member(model, OPTIMIZERS["param-groups"](model, i % 2), f"m{i}")

    fleet = fleet_of(2, make)
    run(fleet, 0, 3)
    new, old = make(3), make(1)
    train_alone(new, BATCHES[:1])  # it comes with a history of its own
    work = count_work(monkeypatch)
    train_alone(old, BATCHES[:3])
    assert_close(state_of(fleet.replace("m1", new)), state_of(old))
    run(fleet, 3, 6)
    fleet.add(fleet.drop("m0"))
    assert fleet.names == ("m3", "m0")
    run(fleet, 6, 8)
    assert_alone(fleet, (make(0), BATCHES[:8]), (make(3), [*BATCHES[:1], *BATCHES[3:8]]))
    assert work.total == 0


def test_neighbours_of_a_replacement_notice_nothing() -> None:
    fleet, control = (fleet_of(2, dropout_member, deterministic=True) for _ in range(2))
    for batch in BATCHES[:2]:
        assert same_bits(fleet.step(batch), control.step(batch))
    fleet.replace("m1", dropout_member(3))
    for batch in BATCHES[2:5]:
        assert same_bits(fleet.step(batch)[:1], control.step(batch)[:1])
    assert_same(states_of(fleet)["m0"], states_of(control)["m0"])


@pytest.mark.parametrize(
    ("num", "make"),
    [
        (2, lambda: sgd_member(5)),
        (2, lambda: sgd_member(6, "m0")),
        (1, lambda: adam_member(7)),
        (1, lambda: adam_member(8, clip_norm=0.05)),
    ],
    ids=["another kind", "another kind of the same name", "the only member", "with clipping"],
)
def test_replacements(num: int, make: Callable[[], Member]) -> None:
    fleet, old, new = fleet_of(num), adam_member(0), make()
    run(fleet, 0, 2)
    train_alone(old, BATCHES[:2])
    assert_close(state_of(fleet.replace("m0", new)), state_of(old))
    assert fleet.names == (new.name, "m1")[:num]
    run(fleet, 2, 5)
    assert_alone(fleet, (make(), BATCHES[2:5]))
    assert len(fleet.summary()) == num


def test_per_member_data_follows_the_names() -> None:
    def stacked(*seeds: int) -> tuple[Tensor, ...]:
        return tuple(torch.stack(leaves) for leaves in zip(*map(vectors, seeds), strict=True))

    fleet = Fleet([adam_member(i) for i in range(3)], mse, stacked(0, 1, 2), data="per_member")
    fleet.step(stacked(0, 1, 2))
    fleet.drop("m0")
    fleet.step(stacked(11, 12))
    fleet.add(adam_member(3))
    losses = fleet.step(stacked(21, 22, 23)).tolist()
    for position, (i, seeds) in enumerate({1: [1, 11, 21], 2: [2, 12, 22], 3: [23]}.items()):
        batches = [vectors(seed) for seed in seeds]
        assert losses[position] == pytest.approx(train_alone(adam_member(i), batches)[-1], rel=TOLERANCE)
        assert_alone(fleet, (adam_member(i), batches))


def test_members_that_come_back() -> None:
    """One with dropout goes on with its draws; one that was stopped trains again."""
    fleet, control = (fleet_of(2, dropout_member) for _ in range(2))
    run(fleet, 0, 3)
    fleet.stop("m1")
    for name in ("m0", "m1"):
        fleet.add(fleet.drop(name))
    assert fleet.stopped() == {}
    run(fleet, 3, 6)
    run(control, 0, 6)
    states, expected = states_of(fleet), states_of(control)
    for name in fleet.names:
        assert_close(states[name], expected[name])


def test_slots_of_stale_numbers_touch_nobody() -> None:
    """What a member left behind may be infinite: the row is still computed."""

    def broken(i: int) -> Member:
        member = dropout_member(i)
        if i == 1:
            nn.init.constant_(member.model[4].weight, torch.inf)
        return member

    fleet, control = (fleet_of(3, make, deterministic=True) for make in (broken, dropout_member))
    for one in (fleet, control):
        one.step(BATCHES[0])
        one.drop("m1")
    for batch in BATCHES[1:4]:
        assert same_bits(fleet.step(batch), control.step(batch))
    assert_same_states(states_of(fleet), states_of(control))
    assert fleet.stopped() == {}
    fleet.add(dropout_member(3))
    run(fleet, 4, 6)
    assert torch.isfinite(fleet.step(BATCHES[6])).all()


def test_metrics_of_the_last_step_after_members_came_and_went() -> None:
    """A newcomer was not there: it has no value, least of all one of somebody else."""
    fleet = Fleet([adam_member(0), adam_member(1), sgd_member(2)], mse_with_metrics, EXAMPLE)
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


# ---- between two updates of a fleet that accumulates ---------------------------------------------------


def scheduled(i: int) -> Member:
    """With running statistics, a schedule and optimizer state: all of them tell what it has seen."""
    model = bn_mlp(i)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02 * (i + 1))
    return Member(model, optimizer, f"m{i}", scheduler=lr_scheduler.ExponentialLR(optimizer, 0.8))


def accumulating(make: Callable[[int], Member] = scheduled, numbers: tuple[int, ...] = (0, 1)) -> Fleet:
    return Fleet([make(i) for i in numbers], mse, EXAMPLE, accumulate=3, precision="fp64")


JOINS: dict[str, Callable[[Fleet, Member], object]] = {
    "add": lambda fleet, new: fleet.add(new),
    "replace": lambda fleet, new: fleet.replace("m0", new),
    "into a free slot": lambda fleet, new: (fleet.drop("m0"), fleet.add(new)),
}


@pytest.mark.parametrize(("join", "num_before"), [("add", 1), ("replace", 2), ("into a free slot", 3)])
def test_a_newcomer_trains_as_alone_from_the_next_whole_update(join: str, num_before: int) -> None:
    fleet = accumulating()
    run(fleet, 0, num_before)
    JOINS[join](fleet, scheduled(5))
    run(fleet, num_before, 3)
    fresh = scheduled(5)
    assert_close(states_of(fleet)["m5"], state_of(fresh))
    run(fleet, 3, 9)
    assert_alone(fleet, (fresh, BATCHES[3:9]), (scheduled(1), BATCHES[:9]), accumulate=3)
    new = fleet.members[fleet.names.index("m5")]
    assert new.optimizer.param_groups[0]["lr"] == fresh.optimizer.param_groups[0]["lr"]


def test_draws_are_counted_from_the_first_batch_that_it_trains_on() -> None:
    late, other = accumulating(dropout_member), accumulating(dropout_member, (5,))
    run(late, 0, 1)
    late.add(dropout_member(5))
    run(late, 1, 9)
    run(other, 3, 9)
    assert_close(states_of(late)["m5"], states_of(other)["m5"])
    assert late.members[2].num_draws == other.members[0].num_draws == 6


def test_a_member_taken_out_and_in_again_between_updates_loses_what_was_accumulated() -> None:
    fleet = accumulating(adam_member)
    run(fleet, 0, 4)
    fleet.add(fleet.drop("m0"))
    run(fleet, 4, 9)
    assert_alone(fleet, (adam_member(0), [*BATCHES[:3], *BATCHES[6:9]]), accumulate=3)


def test_a_checkpoint_has_who_waits(tmp_path: Path) -> None:
    fleet = accumulating(dropout_member)
    run(fleet, 0, 1)
    fleet.add(dropout_member(5))
    run(fleet, 1, 2)
    fleet.save(tmp_path)
    run(fleet, 2, 9)
    expected = states_of(fleet)
    for restored in (
        accumulating(dropout_member, (0, 1, 5)),
        fleet,
    ):  # where it no longer waits, it does again
        restored.restore(tmp_path)
        run(restored, 2, 9)
        assert_same_states(states_of(restored), expected)


def test_one_that_is_stopped_while_it_waits_never_begins() -> None:
    fleet = accumulating()
    run(fleet, 0, 1)
    fleet.add(scheduled(5))
    assert fleet.stopped() == {}
    fleet.stop("m5")
    run(fleet, 1, 6)
    assert fleet.stopped() == {"m5": "stopped"}
    assert_close(states_of(fleet)["m5"], state_of(scheduled(5)))


def test_a_newcomer_under_a_plan_waits_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
    planned, plain = accumulating(), accumulating()
    planned.use(planned.plan(policy="none", device="a100-40gb"))
    for fleet in (planned, plain):
        run(fleet, 0, 1)
        fleet.replace("m0", scheduled(5))
        run(fleet, 1, 6)
    expected = states_of(plain)
    for name, state in states_of(planned).items():
        assert_close(state, expected[name])


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


@pytest.mark.parametrize("differs", [False, True], ids=["shared at first", "different at first"])
def test_newcomers_use_their_own_constants(monkeypatch: pytest.MonkeyPatch, differs: bool) -> None:
    """Constants that all members had in common are no longer common then."""
    fleet = fleet_of(3, lambda i: scaled(i, 1.0 + i * differs))
    run(fleet, 0, 2)
    work = count_work(monkeypatch)
    fleet.replace("m1", scaled(3, scale=3.0, shift=0.5))
    run(fleet, 2, 4)
    assert fleet.drop("m0").model.scale.item() == 1.0
    fleet.add(scaled(4, scale=4.0, shift=-0.5))
    run(fleet, 4, 6)
    assert work.traces == 0
    assert len(fleet.summary()) == 1
    assert_alone(
        fleet,
        (scaled(2, 1.0 + 2 * differs), BATCHES[:6]),
        (scaled(3, scale=3.0, shift=0.5), BATCHES[2:6]),
        (scaled(4, scale=4.0, shift=-0.5), BATCHES[4:6]),
    )
