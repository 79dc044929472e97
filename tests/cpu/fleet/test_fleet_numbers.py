"""What the host feeds with every step: settings as they are at that moment, through tensors that stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    adam_member,
    assert_close,
    assert_same,
    dropout_member,
    mse,
    sgd_member,
    state_of,
    states_of,
    train_alone,
)
from torch import Tensor, nn

from trainmux import Fleet, Member
from trainmux.engine import ForwardProgram, StepProgram
from trainmux.errors import OptimizerError

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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "fast"])
def test_a_refused_setting_leaves_nothing_behind(value: Any) -> None:
    fleet = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE)
    untouched = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE)
    group = first_group(fleet.members[1])
    for number, batch in enumerate(BATCHES[:4]):
        if number % 2:
            good, group["lr"] = group["lr"], value
            with pytest.raises(OptimizerError) as caught:
                fleet.step(batch)
            assert "'m1'" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
            group["lr"] = good
        assert torch.equal(fleet.step(batch), untouched.step(batch))
    for name, state in states_of(fleet).items():
        assert_same(state, states_of(untouched)[name])


# ---- what programs are given ---------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_arguments_but_the_batch_are_always_the_same_tensors(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs read and write them at their addresses."""
    fleet = Fleet([dropout_member(i) for i in range(3)], mse, EXAMPLE, accumulate=accumulate)
    (group,) = fleet._groups
    first: dict[int, list[Tensor]] = {}

    def spied(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> Any:
            fed = set(program.fed_positions)
            held = [argument for position, argument in enumerate(arguments) if position not in fed]
            known = first.setdefault(id(program), held)
            assert len(known) == len(arguments) - len(EXAMPLE)
            assert all(a is b for a, b in zip(held, known, strict=True))
            return run(program, arguments)

        return call

    for name in ("begin", "run"):
        monkeypatch.setattr(group.programs.engine, name, spied(getattr(group.programs.engine, name)))
    for number, batch in enumerate(BATCHES[:6]):
        first_group(fleet.members[0])["lr"] = 0.1 / (number + 1)
        if number == 3:
            fleet.stop("m1")
            first_group(fleet.members[1])["lr"] = math.nan  # whatever it holds, it is stopped
        fleet.step(batch)
        fleet.evaluate([batch])
    assert len(first) == 1 + accumulate


def test_evaluation_between_steps_changes_no_draw() -> None:
    plain, interrupted = (Fleet([dropout_member(i) for i in range(2)], mse, EXAMPLE) for _ in range(2))
    for batch in BATCHES[:4]:
        interrupted.evaluate([batch])
        assert torch.equal(plain.step(batch), interrupted.step(batch))


def test_a_metric_that_is_the_batch_itself_is_a_copy() -> None:
    """Memory that batches land in is used again."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return mse(model, batch), {"inputs": batch[0]}

    fleet = Fleet([sgd_member(i) for i in range(2)], loss, EXAMPLE)
    batch = [tensor.clone() for tensor in BATCHES[0]]
    fleet.step(batch)
    kept = fleet.metrics["inputs"]
    batch[0].zero_()
    assert torch.equal(kept, BATCHES[0][0].expand_as(kept))
