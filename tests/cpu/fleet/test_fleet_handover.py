"""A member moves between plain torch and a fleet, in either direction, as if nothing had happened."""

from __future__ import annotations

import copy

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    ONE_OF_EACH,
    OPTIMIZERS,
    assert_close,
    assert_same,
    bn_mlp,
    mlp,
    mse,
    state_of,
    train_alone,
)

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


def member(kind: str, i: int) -> Member:
    model = mlp(i)
    return Member(model, OPTIMIZERS[kind](model, i), f"m{i}")


@pytest.mark.parametrize("kind", ["sgd", *ONE_OF_EACH, "last-layer"])
def test_plain_then_fleet_then_plain(kind: str) -> None:
    """State goes in from the optimizer and comes back, with the number of steps that were taken."""
    members = [member(kind, i) for i in range(2)]
    train_alone(members[0], BATCHES[:2])  # the other one is new: their counts differ
    fleet = Fleet(members, mse, EXAMPLE)
    for batch in BATCHES[2:5]:
        fleet.step(batch)
    assert fleet.drop("m0") is members[0]
    # The one that stayed goes on in the fleet, and may leave it by a sync as well.
    for batch in BATCHES[5:7]:
        fleet.step(batch)
    fleet.sync()
    for i, (trained_on, more) in enumerate(((BATCHES[:8], BATCHES[5:8]), (BATCHES[2:9], BATCHES[7:9]))):
        train_alone(members[i], more)
        uninterrupted = member(kind, i)
        train_alone(uninterrupted, trained_on)
        assert_close(state_of(members[i]), state_of(uninterrupted))


@pytest.mark.parametrize("kind", ["sgd-momentum", "adam", "adagrad"])
def test_sync_before_the_first_step_leaves_plain_torch_where_it_was(kind: str) -> None:
    """An optimizer that has not stepped has the state that torch gives it, and no more."""
    one = member(kind, 0)
    before = state_of(one)
    fleet = Fleet([one], mse, EXAMPLE)
    fleet.sync()
    assert_same(state_of(one), before)
    train_alone(one, BATCHES[:2])
    uninterrupted = member(kind, 0)
    train_alone(uninterrupted, BATCHES[:2])
    assert_same(state_of(one), state_of(uninterrupted))


def test_the_members_own_tensors_stay_the_same_objects() -> None:
    """Whoever holds a parameter (an optimizer, a tied layer, a logger) sees the new values in it."""
    members = [member("adam", i) for i in range(2)]
    held = [list(one.model.parameters()) for one in members]
    pointers = [[p.data_ptr() for p in parameters] for parameters in held]
    fleet = Fleet(members, mse, EXAMPLE)
    fleet.step(EXAMPLE)
    fleet.sync()
    for one, parameters, addresses in zip(members, held, pointers, strict=True):
        assert all(a is b for a, b in zip(one.model.parameters(), parameters, strict=True))
        assert [p.data_ptr() for p in parameters] == addresses
        assert all(p.grad is None and p.requires_grad for p in parameters)
        assert one.optimizer.param_groups[0]["params"] == parameters


def test_a_model_in_single_precision_held_in_double() -> None:
    """``precision="fp64"`` trains in doubles; what comes back has the model's own dtype."""
    single = bn_mlp(0, dtype=torch.float32)
    double = copy.deepcopy(single).double()
    members = [
        Member(model, torch.optim.Adam(model.parameters(), lr=0.01), name)
        for model, name in ((double, "double"), (single, "single"))
    ]
    batches = [(x.float(), y.float()) for x, y in BATCHES[:3]]
    fleet = Fleet([members[1]], mse, batches[0], precision="fp64")
    losses = torch.stack([fleet.step(batch) for batch in batches])
    assert losses.dtype == torch.float64
    expected = train_alone(members[0], [(x.double(), y.double()) for x, y in batches])
    assert losses[:, 0].tolist() == pytest.approx(expected, rel=1e-12)
    fleet.sync()
    got = state_of(members[1])
    rounded = {key: value.to(got[key].dtype) for key, value in state_of(members[0]).items()}
    assert_close(got, rounded, share=1e-7)
