"""What a step takes and gives: settings as they are at that moment, schedules, results without waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import assert_same
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    adam_member,
    assert_alone,
    assert_close,
    assert_same_fleets,
    dropout_member,
    mse,
    mse_with_metrics,
    scheduled,
    sgd_member,
    state_of,
    states_of,
    train_alone,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux import Fleet, Member
from trainmux.errors import BatchError, MemberError, OptimizerError

pytestmark = pytest.mark.usefixtures("built_once")

Write = Callable[[Member, int], None]


def first_group(member: Member) -> dict[str, Any]:
    return member.optimizer.param_groups[0]


def write_tensor_in_place(member: Member, number: int) -> None:
    """A learning rate that is a tensor may be written through a reference that is kept elsewhere."""
    if number == 0:
        first_group(member)["lr"] = torch.tensor(0.03, dtype=torch.float64)
    first_group(member)["lr"].fill_(0.1 / (number + 1))


def write_list_in_place(member: Member, number: int) -> None:
    if number == 0:
        first_group(member)["betas"] = [0.9, 0.99]
    first_group(member)["betas"][0] = 0.9 - 0.1 * number


def write_state_dict(member: Member, number: int) -> None:
    """Loading a state replaces the param groups by other objects."""
    state = member.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.1 / (number + 1)
    kept = dict(member.optimizer.state)
    member.optimizer.load_state_dict(state)
    member.optimizer.state.update(kept)


WRITES: dict[str, Write] = {
    "number": lambda member, number: first_group(member).update(lr=0.1 / (number + 1)),
    "numpy": lambda member, number: first_group(member).update(lr=np.float64(0.1) / (number + 1)),
    "integer": lambda member, number: first_group(member).update(lr=number % 2),
    "every setting": lambda member, number: first_group(member).update(
        lr=0.1, betas=(0.5, 0.9 - 0.1 * number), eps=1e-4 * (number + 1), weight_decay=0.1 * number
    ),
    "maximize": lambda member, number: first_group(member).update(maximize=number % 2 == 0),
    "tensor in place": write_tensor_in_place,
    "list in place": write_list_in_place,
    "state dict": write_state_dict,
    "clip_norm": lambda member, number: setattr(member, "clip_norm", (None, 0.1, 0.05)[number % 3]),
    "clip_value": lambda member, number: setattr(member, "clip_value", (None, 0.01)[number % 2]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_what_is_written_before_a_step_counts_in_it(write: Write) -> None:
    fleet = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE)
    alone = adam_member(1)
    neighbour = adam_member(2)
    for number, batch in enumerate(BATCHES[:5]):
        for member in (fleet.members[1], alone):
            write(member, number)
        fleet.step(batch)
        train_alone(alone, [batch])
        train_alone(neighbour, [batch])
    states = states_of(fleet)
    assert_close(states["m1"], state_of(alone))
    assert_close(states["m2"], state_of(neighbour))


@pytest.mark.parametrize(("setting", "value"), [("lr", math.nan), ("lr", None), ("momentum", 0.0)])
def test_a_refused_setting_leaves_nothing_behind(setting: str, value: Any) -> None:
    """In any group: the first one must not have stepped when the second one is refused."""
    fleet, untouched = (Fleet([adam_member(0), sgd_member(1)], mse, EXAMPLE) for _ in range(2))
    group = first_group(fleet.members[1])
    for number, batch in enumerate(BATCHES[:4]):
        if number % 2:
            good, group[setting] = group[setting], value
            with pytest.raises(OptimizerError):
                fleet.step(batch)
            group[setting] = good
        assert torch.equal(fleet.step(batch), untouched.step(batch))
    assert_same_fleets(fleet, untouched)


# ---- results -------------------------------------------------------------------------------------------


def test_results_of_a_step_are_not_overwritten_by_the_next_nor_with_the_batch() -> None:
    """Memory that batches land in is used again: a metric that is the batch itself is a copy."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return mse(model, batch), {"inputs": batch[0]}

    fleet = Fleet([adam_member(i) for i in range(2)], loss, EXAMPLE)
    batch = [tensor.clone() for tensor in EXAMPLE]
    results = {"loss": fleet.step(batch), **fleet.metrics}
    kept = {key: value.clone() for key, value in results.items()}
    assert torch.equal(kept["inputs"], EXAMPLE[0].expand(2, -1, -1))
    batch[0].zero_()
    fleet.step(BATCHES[1])
    assert_same(results, kept)


class OnlyWhole(nn.Module):
    """Uses a layer, or writes to a buffer, for whole batches only."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.first, self.second = part, nn.Linear(3, 2), nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + self.seen
        if len(x) < len(EXAMPLE[0]):
            return y
        if self.part == "seen":
            self.seen += 1
            return y
        return y + self.second(x)


@pytest.mark.parametrize(
    ("part", "starts_whole", "message"),
    [
        ("second", True, r"does not train second\.bias, second\.weight"),
        ("second", False, r"also changes second\.bias, second\.weight"),
        ("seen", False, r"also changes seen"),
    ],
)
def test_a_batch_that_trains_other_parameters_is_refused(part: str, starts_whole: bool, message: str) -> None:
    whole, short = EXAMPLE, [leaf[:-1] for leaf in EXAMPLE]
    first, other = (whole, short) if starts_whole else (short, whole)
    model = OnlyWhole(part).double()
    fleet = Fleet([Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "a")], mse, first)
    fleet.step(first)
    with pytest.raises(BatchError, match=message):
        fleet.step(other)
    fleet.step(first)
    assert fleet.num_steps == 2


class _NoHostReads(TorchDispatchMode):
    """Refuses everything that would make the host wait for a device."""

    FORBIDDEN = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.FORBIDDEN, f"{func} during a step"
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [dropout_member(0), dropout_member(1, clip_norm=0.1, clip_value=0.1), sgd_member(2)]
    fleet = Fleet([scheduled(member) for member in members], mse_with_metrics, EXAMPLE, accumulate=2)
    fleet.stop("m2")
    fleet.drop("m0")

    def refuse(self: Tensor, *args: Any) -> Any:
        raise AssertionError("a tensor was read on the host during a step")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, refuse)
    results = []
    with _NoHostReads():
        for batch in BATCHES[:4]:
            results.append((fleet.step(batch), fleet.metrics))
    monkeypatch.undo()
    for losses, metrics in results:
        assert torch.isfinite(losses).all()
        assert metrics["finite"].tolist() == [True, True]


# ---- schedules -----------------------------------------------------------------------------------------


def test_an_unknown_monitor_steps_no_schedule_at_all() -> None:
    plateau = scheduled(adam_member(1), lr_scheduler.ReduceLROnPlateau, scheduler_monitor="val_f1")
    fleet = Fleet([scheduled(adam_member(0), interval="epoch"), plateau], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    values = {name: {"loss": 1.0, "val_error": 1.0} for name in fleet.names}
    with pytest.raises(MemberError, match="'m1'"):
        fleet.end_epoch(values)
    assert fleet.members[0].scheduler.last_epoch == 0
    fleet.end_epoch({"m0": {"loss": 1.0}})  # whoever is not in the mapping did not train in this epoch
    assert [member.scheduler.last_epoch for member in fleet.members] == [1, 0]


def test_a_schedule_that_raises_holds_up_no_other() -> None:
    def rate(step: int) -> float:
        if step == 2:
            raise ValueError("no rate for this step")
        return 0.9**step

    members = [scheduled(adam_member(i)) for i in range(3)]
    fleet = Fleet(
        [members[0], scheduled(members[1], lambda o: lr_scheduler.LambdaLR(o, rate)), members[2]],
        mse,
        EXAMPLE,
    )
    fleet.step(BATCHES[0])
    with pytest.raises(ValueError, match="no rate") as failed:
        fleet.step(BATCHES[1])
    assert failed.value.__notes__ == ["in the scheduler of member 'm1'"]
    assert fleet.num_steps == 2
    assert_alone(fleet, *((scheduled(adam_member(i)), BATCHES[:2]) for i in (0, 2)))
    assert [fleet.members[i].scheduler.last_epoch for i in (0, 2)] == [2, 2]
