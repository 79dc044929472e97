"""Trials flow through slots: copies between members, refills, and what is left of those who were there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from equivalence import assert_same, same_bits
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    SCHEDULERS,
    adam,
    adam_member,
    assert_same_states,
    bn_mlp,
    coded,
    count_work,
    dropout_member,
    mlp,
    mse,
    projected,
    scheduled,
    sgd_member,
    state_of,
    states_of,
    train,
)

from trainmux import EMA, SWA, EarlyStopping, Fleet, Member
from trainmux.errors import MemberError, TraceError
from trainmux.fleet import Room

pytestmark = pytest.mark.usefixtures("built_once")

WAYS = pytest.mark.parametrize("is_planned", [False, True], ids=["plain", "planned"])


def fleet_of(members: Sequence[Member], *, is_planned: bool = False, **options: Any) -> Fleet:
    fleet = Fleet(members, mse, EXAMPLE, deterministic=True, **options)
    if is_planned:
        fleet.use(fleet.plan("1 GiB", time_limit=1))
    return fleet


def trial(i: int) -> Member:
    """Running statistics, dropout, state with counts, a schedule and clipping."""
    model = bn_mlp(i, dropout=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 * (i + 1), amsgrad=True)
    return scheduled(Member(model, optimizer, f"m{i}", clip_norm=0.5 + i), SCHEDULERS["lambda"])


# ---- copies --------------------------------------------------------------------------------------------


def copied_by_hand(source: Member, target: Member) -> None:
    target.model.load_state_dict(source.model.state_dict())
    own = target.optimizer.state_dict()["param_groups"]
    target.optimizer.load_state_dict({**source.optimizer.state_dict(), "param_groups": own})


@WAYS
def test_a_copy_is_what_state_dicts_give(is_planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, other = (fleet_of([trial(i) for i in range(3)], is_planned=way) for way in (is_planned, False))
    train(fleet, BATCHES[:3])
    train(other, BATCHES[:3])
    work = count_work(monkeypatch)
    fleet.copy_member("m0", "m2")
    assert fleet.num_updates("m2") == 3
    train(fleet, BATCHES[3:6])
    assert work.total() == 0
    other.sync()
    copied_by_hand(other.members[0], other.members[2])
    by_hand = fleet_of(other.members)
    train(by_hand, BATCHES[3:6])
    assert_same_states(states_of(fleet), states_of(by_hand))
    one, two = fleet.members[2], by_hand.members[2]
    assert one.optimizer.param_groups[0]["lr"] == two.optimizer.param_groups[0]["lr"] != 0.02


def test_a_copy_brings_a_member_back_that_was_not_finite() -> None:
    fleet = fleet_of([dropout_member(0), infinite(dropout_member(1))])
    train(fleet, BATCHES[:2])
    assert list(fleet.stopped()) == ["m1"]
    fleet.copy_member("m0", "m1")
    assert fleet.stopped() == {}
    states = states_of(fleet)
    assert_same(states["m1"], states["m0"])
    assert torch.isfinite(fleet.step(EXAMPLE)).all()


def weighted(i: int) -> Member:
    """A loss weight in a buffer that is no state, and a projection that is."""
    model = coded(lambda model, x: model.layer(x * model.projection) * model.weight, layer=mlp(i))
    model.register_buffer("projection", torch.full((3,), 1.0 + i, dtype=torch.float64))
    model.register_buffer("weight", torch.full((), 1.0 + i, dtype=torch.float64), persistent=False)
    return adam(model, f"m{i}")


@pytest.mark.parametrize("width", [None, 1], ids=["fused", "apart"])
def test_a_copy_leaves_out_what_is_no_state(width: int | None) -> None:
    fleet = fleet_of([weighted(0), weighted(1)], width=width)
    train(fleet, BATCHES[:2])
    fleet.copy_member("m0", "m1")
    fleet.sync("m1")
    model = fleet.members[1].model
    assert (model.projection[0].item(), model.weight.item()) == (1.0, 2.0)


def test_copies_in_the_midst_of_an_update() -> None:
    """Gradients of half an update come along."""
    fleet = fleet_of([adam_member(0), adam_member(1)], accumulate=2)
    fleet.members[1].optimizer.param_groups[0]["lr"] = 0.02
    train(fleet, BATCHES[:3])
    fleet.copy_member("m0", "m1")
    train(fleet, BATCHES[3:6])
    states = states_of(fleet)
    assert_same(states["m1"], states["m0"])


@pytest.mark.parametrize("other", [sgd_member, lambda i: adam(mlp(hidden=5), f"m{i}")])
def test_members_that_differ_in_structure_are_not_copied(other: Callable[[int], Member]) -> None:
    fleet = fleet_of([adam_member(0), adam_member(1), other(2)])
    for names in (("m0", "m2"), ("m2", "m0")):
        with pytest.raises(MemberError, match="one structure"):
            fleet.copy_member(*names)
    with pytest.raises(MemberError, match="m7"):
        fleet.copy_member("m7", "m0")
    before = states_of(fleet)
    fleet.copy_member("m0", "m0")
    assert_same_states(states_of(fleet), before)


# ---- refills -------------------------------------------------------------------------------------------


def other_trial(i: int) -> Member:
    """Momentum, a dropout probability of its own, clipping by value, a schedule of momentum and rate."""
    model = bn_mlp(i, dropout=0.1 + 0.05 * i)
    optimizer = torch.optim.SGD(model.parameters(), 0.02 * (i + 1), momentum=0.9, weight_decay=0.01 * i)
    return scheduled(Member(model, optimizer, f"m{i}", clip_value=0.1 + i), SCHEDULERS["one-cycle"])


def infinite(member: Member) -> Member:
    torch.nn.init.constant_(member.model[4].weight, math.inf)
    return member


@pytest.mark.parametrize(
    ("trial", "is_planned", "write_back"),
    [(trial, False, True), (trial, False, False), (trial, True, False), (other_trial, False, False)],
)
def test_a_trial_is_the_same_in_any_slot_and_after_anybody(
    trial: Callable[[int], Member], is_planned: bool, write_back: bool
) -> None:
    """Bit for bit as in a fleet from the start, beside others and in another row."""
    first = fleet_of([trial(0), trial(3), trial(4)], is_planned=is_planned)
    average, expected = EMA(0.8), EMA(0.8)
    first.fit(BATCHES[:5], epochs=1, callbacks=[expected], progress=False)
    fleet = fleet_of([trial(5), infinite(trial(6)), trial(7)], is_planned=is_planned)
    train(fleet, BATCHES[6:9])
    fleet.replace("m6", trial(0), write_back=write_back)
    fleet.drop("m7", write_back=write_back)
    train(fleet, BATCHES[9:10])
    fleet.replace("m0", trial(0), write_back=write_back)
    fleet.add(trial(8))
    fleet.fit(BATCHES[:5], epochs=1, callbacks=[average], progress=False)
    assert_same(states_of(fleet)["m0"], states_of(first)["m0"])
    assert_same(average.weights("m0"), expected.weights("m0"))
    assert (
        fleet.members[1].optimizer.param_groups[0]["lr"] == first.members[0].optimizer.param_groups[0]["lr"]
    )


def test_members_that_leave_without_a_write_are_as_after_the_last_sync() -> None:
    fleet = fleet_of([trial(i) for i in range(3)])
    train(fleet, BATCHES[:2])
    fleet.sync("m1")
    then = state_of(fleet.members[1])
    untouched = state_of(trial(0))
    train(fleet, BATCHES[2:4])
    left = [fleet.replace("m1", trial(3), write_back=False), fleet.drop("m0", write_back=False)]
    assert_same(state_of(left[0]), then)
    assert_same(state_of(left[1]), untouched)
    assert same_bits(fleet.step(BATCHES[4]).isfinite(), torch.tensor([True, True]))


def test_callbacks_forget_those_who_left() -> None:
    """Another member of the same name has an average of its own, and its own patience."""
    fleet = fleet_of([adam_member(i) for i in range(2)])
    callbacks: list[Any] = [SWA(), EMA(0.8), EarlyStopping("loss", patience=1, mode="max")]
    fleet.fit(BATCHES[:2], epochs=1, callbacks=callbacks, progress=False)
    alone = fleet_of([adam_member(5, "m1"), adam_member(6)])
    fleet.replace("m1", adam_member(5, "m1"))
    fleet.replace("m0", adam_member(6))
    others = [SWA(), EMA(0.8)]
    fleet.fit(BATCHES[2:4], epochs=1, callbacks=callbacks, progress=False)
    alone.fit(BATCHES[2:4], epochs=1, callbacks=others, progress=False)
    for average, expected in zip(callbacks, others, strict=False):
        assert_same(average.weights("m1"), expected.weights("m1"))
        with pytest.raises(MemberError, match="m0"):
            average.weights("m0")
    assert fleet.stopped() == {}


def test_a_fixed_projection_that_differs_is_seen_without_another_look_at_the_device() -> None:
    fleet = fleet_of([adam(projected(i, 1.0), f"m{i}") for i in range(2)])
    for number, constant in ((2, 1.0), (3, 1.0), (4, 2.0)):
        fleet.replace(fleet.names[0], adam(projected(number, constant), f"m{number}"))
        train(fleet, BATCHES[:2])
    alone = fleet_of([adam(projected(4, 2.0), "m4"), adam(projected(5, 1.0), "m5")])
    train(alone, BATCHES[:2])
    assert_same(states_of(fleet)["m4"], states_of(alone)["m4"])


# ---- prepared ahead ------------------------------------------------------------------------------------


@WAYS
def test_a_member_that_was_prepared_by_another_thread_trains_as_one_that_was_not(
    is_planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, other = (fleet_of([trial(0), trial(1)], is_planned=is_planned) for _ in range(2))
    newcomers = [trial(2), trial(3)]
    train(fleet, BATCHES[:1])
    with ThreadPoolExecutor(1) as pool:
        prepared = [pool.submit(fleet.prepare, member) for member in newcomers]
        train(fleet, BATCHES[1:3])
        for one in prepared:
            one.result()
    train(other, BATCHES[:3])
    with monkeypatch.context() as patch:
        patch.setattr("trainmux.fleet._newcomer.Reach", None)  # nothing is left to be read
        assert fleet.room_for(newcomers[0]) is not Room.NEW_GROUP
        fleet.replace("m0", newcomers[0])
        fleet.drop("m1")
        fleet.add(newcomers[1])
    other.replace("m0", trial(2))
    other.drop("m1")
    other.add(trial(3))
    for each in (fleet, other):
        train(each, BATCHES[3:6])
    assert_same_states(states_of(fleet), states_of(other))


def test_a_member_that_was_changed_after_it_was_prepared_comes_as_it_is() -> None:
    fleet, other = (fleet_of([dropout_member(0), dropout_member(1)]) for _ in range(2))

    def changed(member: Member) -> Member:
        member.model[2].p = 0.3
        with torch.no_grad():
            member.model[0].weight.mul_(2.0)
        return member

    newcomer = dropout_member(2)
    fleet.prepare(newcomer)
    fleet.replace("m0", changed(newcomer))
    other.replace("m0", changed(dropout_member(2)))
    for each in (fleet, other):
        train(each, BATCHES[:3])
    assert_same_states(states_of(fleet), states_of(other))


def test_what_cannot_be_trained_is_refused_when_it_is_prepared() -> None:
    fleet = fleet_of([adam_member(0), adam_member(1)])
    broken = adam(coded(lambda model, x: model.layer(x).sum().item()), "m2")
    with pytest.raises(TraceError):
        fleet.prepare(broken)
    shares = adam_member(3)
    shares.model[0].weight = fleet.members[0].model[0].weight  # type: ignore[index, union-attr]
    shares = adam(shares.model, "m3")
    fleet.prepare(shares)  # whether it may be there depends on who is, too
    with pytest.raises(MemberError, match="m0"):
        fleet.add(shares)
    fleet.drop("m0")
    fleet.add(shares)
    train(fleet, BATCHES[:1])
