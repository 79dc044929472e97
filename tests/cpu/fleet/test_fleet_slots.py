"""Members come and go, stop, or fail: slots are refilled without tracing, and nobody else notices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from equivalence import assert_same, same_bits
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    adam,
    adam_member,
    assert_alone,
    assert_close,
    assert_same_states,
    bn_mlp,
    coded,
    count_work,
    dropout_member,
    mse,
    mse_with_metrics,
    sgd,
    sgd_member,
    stacked,
    state_of,
    states_of,
    train,
    train_alone,
    vectors,
)
from torch import Tensor, nn

import trainmux.fleet._widths as widths_module
from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


def fleet_of(num: int, make: Callable[[int], Member] = adam_member, **options: Any) -> Fleet:
    return Fleet([make(i) for i in range(num)], mse, EXAMPLE, **options)


# ---- slots ---------------------------------------------------------------------------------------------


def test_names_of_newcomers() -> None:
    """Those without a name get a free one, and a dropped name may be used again."""
    unnamed = [adam_member(i) for i in range(3)]
    for member in unnamed:
        member.name = None
    fleet = Fleet([adam_member(3, "member-1"), *unnamed[:2]], mse, EXAMPLE)
    fleet.add(unnamed[2])
    assert fleet.names[0] == "member-1"
    assert len(set(fleet.names)) == 4
    fleet.drop("member-1")
    fleet.add(adam_member(5, "member-1"))
    train(fleet, BATCHES[:2])
    assert_alone(fleet, (adam_member(5, "member-1"), BATCHES[:2]))


def test_a_copy_of_the_state_lies_as_steps_on_its_device_read_it() -> None:
    """Rows of one number each, as batch norm's counter has, are 16 bytes apart."""
    (group,) = Fleet([sgd(bn_mlp(), str(i)) for i in range(3)], mse, EXAMPLE)._groups
    assert group.state_on(torch.device("cpu"), 2) is group.state
    there = group.state_on(torch.device("meta"), 2)
    found = {name: (rows.shape[0], rows.stride()) for name, rows in there.tensors.items()}
    assert found == {name: (2, rows.stride()) for name, rows in group.state.tensors.items()}
    assert (2, (2,)) in found.values()


def test_free_slots_are_refilled_for_nothing_and_groups_grow_and_shrink_without_tracing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(widths_module, "WORTH", 1e9)  # narrower programs cost more than they save
    fleet = fleet_of(4)
    work = count_work(monkeypatch)

    def cost(num_traces: int, num_fusions: int, width: int) -> None:
        fleet.step(BATCHES[fleet.num_steps])
        assert (work["traces"], work["fusions"]) == (num_traces, num_fusions)
        assert [group.width for group in fleet.summary()] == [width]

    fleet.drop("m1")
    cost(0, 0, 4)
    fleet.add(adam_member(4))
    fleet.replace("m0", adam_member(5))
    cost(0, 0, 4)
    fleet.add(adam_member(6))
    cost(0, 1, 5)
    for name in ("m5", "m3"):
        fleet.drop(name)
    cost(0, 1, 5)
    fleet.drop("m4")
    cost(0, 1, 5)
    monkeypatch.setattr(widths_module, "WORTH", 0.0)  # at once
    cost(0, 2, 2)
    assert_alone(fleet, (adam_member(2), BATCHES[:6]), (adam_member(6), BATCHES[2:6]))
    fleet.add(sgd_member(7))
    for name in ("m2", "m6"):
        fleet.drop(name)
    fleet.step(EXAMPLE)
    assert [group.members for group in fleet.summary()] == [("m7",)], "an empty group goes away"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fleet_that_narrows_and_widens_again_builds_each_width_once(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members go on as in a fleet that never changed: bitwise in deterministic mode, which keeps slots."""
    monkeypatch.setattr(widths_module, "WORTH", 0.0)
    fleet, control = (fleet_of(5, dropout_member, deterministic=deterministic) for _ in range(2))
    work, seen = count_work(monkeypatch), []
    for leaving, coming in (("m0 m1 m3", ""), ("m4", ""), ("", "m7"), ("", "m8 m9"), ("m7 m8 m9", "")):
        for name in leaving.split():
            fleet.drop(name)
        for name in coming.split():
            fleet.add(dropout_member(int(name[1:])))
        fleet.step(BATCHES[fleet.num_steps])
        control.step(BATCHES[control.num_steps])
        fleet.evaluate(BATCHES[:1])
        seen += [group.width for group in fleet.summary()]
    # Steps and evaluations of each width, but for the first step.
    assert (seen, work["fusions"]) == (([5] * 5, 1) if deterministic else ([2, 1, 2, 5, 1], 5))
    got, expected = (states_of(one)["m2"] for one in (fleet, control))
    (assert_same if deterministic else assert_close)(got, expected)


def test_per_member_data_follows_the_names() -> None:
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


def test_draws_go_on_with_a_member_that_comes_back() -> None:
    fleet, control = (fleet_of(2, dropout_member) for _ in range(2))
    train(fleet, BATCHES[:3])
    fleet.stop("m1")
    for name in ("m0", "m1"):
        fleet.add(fleet.drop(name))
    assert fleet.stopped() == {}
    train(fleet, BATCHES[3:6])
    train(control, BATCHES[:6])
    states, expected = states_of(fleet), states_of(control)
    for name in fleet.names:
        assert_close(states[name], expected[name])


def test_draws_are_counted_from_the_first_batch_that_a_newcomer_trains_on() -> None:
    """It waits for the next whole update of a fleet that accumulates."""
    options = {"accumulate": 3, "precision": "fp64"}
    late, other = fleet_of(2, dropout_member, **options), Fleet([dropout_member(5)], mse, EXAMPLE, **options)
    train(late, BATCHES[:1])
    late.add(dropout_member(5))
    train(late, BATCHES[1:9])
    train(other, BATCHES[3:9])
    assert_close(states_of(late)["m5"], states_of(other)["m5"])
    assert late.members[2].num_draws == other.members[0].num_draws == 6


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


# ---- isolation: what befalls one member changes no bit of the others -----------------------------------


class Watched:
    """A fleet of three whose second member comes to grief, and a control in which it does not."""

    def __init__(
        self, make: Callable[[int], Member], control: Callable[[int], Member] | None = None, **options: Any
    ) -> None:
        self.fleet, self.control = (
            fleet_of(3, one, deterministic=True, **options) for one in (make, control or make)
        )

    def step(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """The others' losses are the same, bit for bit."""
        got = torch.empty(0)
        for batch in batches:
            got, expected = self.fleet.step(batch), self.control.step(batch)
            assert same_bits(got[[0, 2]], expected[[0, 2]])
        return got

    def assert_kept(self, kept: dict[str, Tensor] | None, stopped: dict[str, str]) -> None:
        """The second member is as it was, the others as in the control."""
        got, expected = states_of(self.fleet), states_of(self.control)
        if kept is None:
            got, expected = ({name: state[name] for name in ("m0", "m2")} for state in (got, expected))
        else:
            expected["m1"] = kept
        assert_same_states(got, expected)
        assert self.fleet.stopped() == stopped


@pytest.mark.parametrize("width", [None, 1])
def test_a_stopped_member_keeps_everything(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(dropout_member, width=width)
    work = count_work(monkeypatch)
    watched.step(BATCHES[:3])
    watched.fleet.stop("m1")
    before = states_of(watched.fleet)["m1"]
    watched.step(BATCHES[3:6])
    watched.assert_kept(before, {"m1": "stopped"})
    assert watched.fleet.metrics["finite"].tolist() == [True] * 3
    assert work.total() == 0


def rooted(i: int, start: float = 1.0) -> Member:
    """The root of a weight that may be zero: a finite value with an infinite derivative."""
    root = nn.Parameter(torch.full((1,), start, dtype=torch.float64))
    body = bn_mlp(i, dropout=0.4)
    return adam(coded(lambda model, x: model.layer(x) + model.root.sqrt(), layer=body, root=root), f"m{i}")


def infinite(i: int) -> Member:
    member = dropout_member(i)
    if i == 1:
        nn.init.constant_(member.model[4].weight, math.inf)
    return member


@pytest.mark.parametrize(
    ("bad", "good", "loss_is_finite"),
    [(infinite, dropout_member, False), (lambda i: rooted(i, float(i != 1)), rooted, True)],
    ids=["weights", "gradient of a finite loss"],
)
def test_members_that_are_not_finite_from_the_start(
    bad: Callable[[int], Member], good: Callable[[int], Member], loss_is_finite: bool
) -> None:
    watched = Watched(bad, good)
    losses = watched.step(BATCHES[:1])
    assert torch.isfinite(losses).tolist() == [True, loss_is_finite, True]
    assert not torch.isfinite(watched.fleet.metrics["grad_norm"][1])
    watched.step(BATCHES[1:2])
    assert watched.fleet.metrics["finite"].tolist() == [True, False, True]
    watched.assert_kept(state_of(bad(1)), {"m1": "not finite at step 1"})


def test_numbers_left_behind_in_a_slot_and_newcomers_touch_nobody() -> None:
    """What a member left behind may be infinite: the row is still computed."""
    watched = Watched(infinite, dropout_member)
    watched.step(BATCHES[:1])
    for fleet in (watched.fleet, watched.control):
        fleet.drop("m1")
    for batch in BATCHES[1:3]:
        assert same_bits(watched.fleet.step(batch), watched.control.step(batch))
    watched.fleet.add(dropout_member(3))
    for batch in BATCHES[3:5]:
        assert same_bits(watched.fleet.step(batch)[:2], watched.control.step(batch))
    watched.assert_kept(None, {})
    assert torch.isfinite(watched.fleet.step(BATCHES[6])).all()


def factorizes(model: Any, x: Tensor) -> Any:
    """A diagonal matrix, which fails where an entry is negative."""
    return (torch.linalg.cholesky(torch.diag(model.entries)) ** 2).sum() + model.layer(x).sum() * 0


def test_a_factorization_that_fails_freezes_only_its_member() -> None:
    entries = [nn.Parameter(torch.tensor([1.0, entry], dtype=torch.float64)) for entry in (1.0, -1.0, 2.0)]
    members = [sgd(coded(factorizes, entries=each), f"m{i}") for i, each in enumerate(entries)]
    fleet = Fleet(members, lambda model, batch: model(batch[0]), EXAMPLE)
    fleet.step(EXAMPLE)
    assert list(fleet.stopped()) == ["m1"]
    fleet.sync()
    assert entries[1].tolist() == [1.0, -1.0]
    torch.testing.assert_close(entries[2].data, torch.tensor([0.9, 1.9], dtype=torch.float64))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_batch_that_is_not_finite_freezes_everyone(clip_norm: float | None) -> None:
    """A gradient that would be clipped to something finite is no excuse; whoever is put back trains on."""
    fleet = fleet_of(2, lambda i: adam_member(i, clip_norm=clip_norm))
    fleet.step(BATCHES[0])
    before = states_of(fleet)
    fleet.step((EXAMPLE[0], EXAMPLE[1] * (math.nan if clip_norm is None else 1e160)))
    fleet.step(BATCHES[1])
    assert_same_states(states_of(fleet), before)
    assert fleet.stopped() == dict.fromkeys(fleet.names, "not finite at step 2")
    fleet.add(fleet.drop("m1"))
    assert fleet.stopped().keys() == {"m0"}
    train(fleet, BATCHES[1:3])
    assert_alone(fleet, (adam_member(1, clip_norm=clip_norm), BATCHES[:3]))


def test_freezing_amid_accumulation() -> None:
    """The weights stay as they were, and so do the buffers from the bad micro-batch on."""
    fleet = fleet_of(2, dropout_member, accumulate=2)
    start = states_of(fleet)["m0"]
    fleet.step(BATCHES[0])
    before = states_of(fleet)["m0"]
    for x, y in ((BATCHES[1][0] * math.nan, BATCHES[1][1]), *BATCHES[2:4]):
        fleet.step((x, y))
    after = states_of(fleet)["m0"]
    assert_same(after, before)
    assert all(same_bits(after[name], start[name]) for name in start if name.endswith("weight"))
    assert int(after["1.num_batches_tracked"]) == 1
    assert fleet.stopped().keys() == {"m0", "m1"}
