"""A fleet that was saved and restored trains on, bit for bit, as one that never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    ONE_OF_EACH,
    OPTIMIZERS,
    adam_member,
    assert_same_states,
    dropout_member,
    mlp,
    mse,
    same_bits,
    sgd_member,
    states_of,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler

from trainmux import Fleet, Member

pytestmark = pytest.mark.usefixtures("built_once")


def assert_goes_on(whole: Fleet, restored: Fleet, batches: list[Any]) -> None:
    """Both take the same steps from here."""
    assert restored.num_steps == whole.num_steps
    for batch in batches:
        assert same_bits(restored.step(batch), whole.step(batch))
        for key, value in whole.metrics.items():
            assert same_bits(restored.metrics[key], value), key
    assert restored.stopped() == whole.stopped()
    assert_same_states(states_of(restored), states_of(whole))
    for one, other in zip(restored.members, whole.members, strict=True):
        assert one.scheduler is None or one.scheduler.state_dict() == other.scheduler.state_dict()
        assert repr(one.optimizer.state_dict()["param_groups"]) == repr(
            other.optimizer.state_dict()["param_groups"]
        )


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_every_optimizer(tmp_path: Path, kind: str) -> None:
    """New members in the slots, which know nothing of the old ones, take everything over."""

    def make(i: int, *, elsewhere: bool = False) -> Member:
        """``elsewhere``: drawn with other initial weights, and with another learning rate."""
        model = mlp(i + 7 * elsewhere)
        member = Member(model, OPTIMIZERS[kind](model, i), f"m{i}")
        for group in member.optimizer.param_groups:
            group["lr"] *= 3.0 if elsewhere else 1.0
        return member

    fleet = Fleet([make(i) for i in range(2)], mse, EXAMPLE)
    for batch in BATCHES[:3]:
        fleet.step(batch)
    fleet.save(tmp_path / "c", {"note": [1, 2.5, "three"]})
    expected = [fleet.step(batch) for batch in BATCHES[3:6]]
    states = states_of(fleet)
    settings = [repr(member.optimizer.state_dict()["param_groups"]) for member in fleet.members]
    for i, name in enumerate(fleet.names):
        fleet.replace(name, make(i, elsewhere=True))
    assert fleet.restore(tmp_path / "c") == {"note": [1, 2.5, "three"]}
    assert fleet.num_steps == 3
    for batch, losses in zip(BATCHES[3:6], expected, strict=True):
        assert same_bits(fleet.step(batch), losses)
    assert_same_states(states_of(fleet), states)
    assert [repr(member.optimizer.state_dict()["param_groups"]) for member in fleet.members] == settings


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.3),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [4]
    ),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    lambda o: None,
]


def scheduled(i: int) -> Member:
    model = mlp(i)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return Member(model, optimizer, f"m{i}", scheduler=SCHEDULERS[i](optimizer))


def test_every_schedule(tmp_path: Path) -> None:
    whole = Fleet([scheduled(i) for i in range(len(SCHEDULERS))], mse, EXAMPLE)
    for batch in BATCHES[:3]:
        whole.step(batch)
    whole.end_epoch({name: {"loss": 1.0} for name in whole.names})
    whole.save(tmp_path)
    restored = Fleet([scheduled(i) for i in range(len(SCHEDULERS))], mse, EXAMPLE)
    restored.restore(tmp_path)
    for fleet in (whole, restored):
        fleet.end_epoch({name: {"loss": 2.0} for name in whole.names})
    assert_goes_on(whole, restored, BATCHES[3:8])


def test_amid_accumulation(tmp_path: Path) -> None:
    whole = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE, accumulate=3)
    for batch in BATCHES[:5]:
        whole.step(batch)
    whole.save(tmp_path)
    restored = Fleet([adam_member(i) for i in range(2)], mse, EXAMPLE, accumulate=3)
    restored.restore(tmp_path)
    assert_goes_on(whole, restored, BATCHES[5:9])


def test_stopped_and_frozen_members_stay_so(tmp_path: Path) -> None:
    def poisoned(i: int) -> Member:
        member = dropout_member(i)
        if i == 2:
            with torch.no_grad():
                member.model[4].weight.fill_(math.inf)
        return member

    whole = Fleet([poisoned(i) for i in range(3)], mse, EXAMPLE)
    whole.step(BATCHES[0])
    whole.stop("m1")
    whole.step(BATCHES[1])
    told = {"m1": "stopped", "m2": "not finite at step 1"}
    assert whole.stopped() == told
    whole.save(tmp_path)
    restored = Fleet([dropout_member(i) for i in range(3)], mse, EXAMPLE)
    restored.restore(tmp_path)
    assert restored.stopped() == told
    assert_goes_on(whole, restored, BATCHES[2:5])


def test_into_a_fleet_that_has_trained_and_lost_members(tmp_path: Path) -> None:
    """What the fleet did before, and in which slots its members sit, is of no consequence."""
    whole = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE)
    for batch in BATCHES[:2]:
        whole.step(batch)
    whole.save(tmp_path)
    restored = Fleet([dropout_member(i) for i in (5, 1, 6)], mse, EXAMPLE)
    restored.step(BATCHES[9])
    restored.stop("m1")
    restored.drop("m5")
    restored.replace("m6", dropout_member(0))
    assert restored.names == ("m1", "m0")
    restored.restore(tmp_path)
    assert restored.stopped() == {}
    for batch in BATCHES[2:4]:
        got, expected = restored.step(batch), whole.step(batch)
        torch.testing.assert_close(got[[1, 0]], expected, rtol=1e-12, atol=1e-12)


def test_several_groups_and_batches_of_their_own(tmp_path: Path) -> None:
    own = BATCHES[11]

    def members() -> list[Member]:
        return [sgd_member(0), sgd_member(2, example_batch=own)]

    whole, restored = (Fleet(members(), mse, EXAMPLE) for _ in range(2))
    whole.step(BATCHES[0], {"m2": own})
    whole.save(tmp_path)
    restored.restore(tmp_path)
    for batch in BATCHES[1:3]:
        assert same_bits(restored.step(batch, {"m2": own}), whole.step(batch, {"m2": own}))
    assert_same_states(states_of(restored), states_of(whole))


def test_saving_disturbs_nothing_and_can_be_gone_back_to_twice(tmp_path: Path) -> None:
    fleet = Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    fleet.save(tmp_path)
    runs = []
    for _ in range(3):
        runs.append(torch.stack([fleet.step(batch) for batch in BATCHES[1:4]]))
        fleet.restore(tmp_path)
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


# ---- constants -----------------------------------------------------------------------------------------


class Projected(nn.Module):
    """A fixed random projection and a frozen weight: part of the model, though never trained."""

    def __init__(self, seed: int, constant: float) -> None:
        super().__init__()
        self.body = mlp(seed)
        self.register_buffer("projection", torch.full((3,), constant, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((2,), constant, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.projection) * self.frozen


def projected(i: int, constant: float) -> Member:
    model = Projected(i, constant)
    return Member(model, torch.optim.Adam(model.parameters(), lr=0.05), f"m{i}")


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [((2.0, 2.0), (5.0, 5.0)), ((2.0, 2.0), (5.0, 6.0)), ((2.0, 3.0), (5.0, 5.0))],
    ids=["shared", "no longer shared", "shared now"],
)
def test_tensors_that_are_never_trained_are_saved_too(
    tmp_path: Path, saved: tuple[float, float], fresh: tuple[float, float]
) -> None:
    """Another process draws other constants: without the saved ones the weights are worth nothing."""
    whole = Fleet([projected(i, saved[i]) for i in range(2)], mse, EXAMPLE)
    whole.step(BATCHES[0])
    whole.save(tmp_path)
    restored = Fleet([projected(i, fresh[i]) for i in range(2)], mse, EXAMPLE)
    restored.restore(tmp_path)
    assert_goes_on(whole, restored, BATCHES[1:3])
