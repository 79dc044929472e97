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


def test_a_stopped_member_may_hold_anything() -> None:
    fleet = Fleet([adam_member(i) for i in range(3)], mse, EXAMPLE)
    neighbour = adam_member(2)
    fleet.stop("m1")
    before = states_of(fleet)["m1"]
    first_group(fleet.members[1])["lr"] = math.nan
    for batch in BATCHES[:3]:
        fleet.step(batch)
        train_alone(neighbour, [batch])
    assert_same(states_of(fleet)["m1"], before)
    assert_close(states_of(fleet)["m2"], state_of(neighbour))


# ---- what programs are given ---------------------------------------------------------------------------


class Spy:
    """An engine that keeps what programs were given."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[tuple[StepProgram | ForwardProgram, list[Tensor]]] = []

    def begin(self, program: StepProgram, arguments: Sequence[Tensor]) -> Any:
        self.calls.append((program, list(arguments)))
        return self._engine.begin(program, arguments)

    def run(self, program: ForwardProgram, arguments: Sequence[Tensor]) -> list[Tensor]:
        self.calls.append((program, list(arguments)))
        results: list[Tensor] = self._engine.run(program, arguments)
        return results

    def forget(self, programs: Any) -> None:
        self._engine.forget(programs)


def spy_on(fleet: Fleet) -> Spy:
    (group,) = fleet._groups
    group.programs.engine = spy = Spy(group.programs.engine)  # type: ignore[assignment]
    return spy


def held(call: tuple[StepProgram | ForwardProgram, list[Tensor]]) -> list[Tensor]:
    program, arguments = call
    fed = set(program.fed_positions())
    return [argument for position, argument in enumerate(arguments) if position not in fed]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_arguments_but_the_batch_are_always_the_same_tensors(accumulate: int) -> None:
    fleet = Fleet([dropout_member(i) for i in range(3)], mse, EXAMPLE, accumulate=accumulate)
    spy = spy_on(fleet)
    for number, batch in enumerate(BATCHES[:6]):
        first_group(fleet.members[0])["lr"] = 0.1 / (number + 1)
        if number == 3:
            fleet.stop("m1")
        fleet.step(batch)
        fleet.evaluate([batch])
    first: dict[int, list[Tensor]] = {}
    for call in spy.calls:
        program, arguments = call
        known = first.setdefault(id(program), held(call))
        assert len(known) == len(arguments) - len(EXAMPLE)
        assert all(a is b for a, b in zip(held(call), known, strict=True))
    assert len(first) == 1 + accumulate


def test_another_width_has_other_tensors() -> None:
    fleet = Fleet([sgd_member(i) for i in range(2)], mse, EXAMPLE)
    spy = spy_on(fleet)
    fleet.step(BATCHES[0])
    fleet.add(sgd_member(2))
    fleet.step(BATCHES[1])
    (old_program, old), (new_program, new) = spy.calls
    for name in ("scalars", "limits", "active"):
        assert old[old_program.position_of(name)].shape[-1] == 2  # type: ignore[union-attr]
        assert new[new_program.position_of(name)].shape[-1] == 3  # type: ignore[union-attr]


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


# ---- members with batches of their own -----------------------------------------------------------------


def test_several_groups_are_fed_side_by_side() -> None:
    """Common batches and batches of members' own, in one step."""

    def make(i: int) -> Member:
        return sgd_member(i, example_batch=EXAMPLE if i % 2 else None)

    fleet = Fleet([make(i) for i in range(4)], mse, EXAMPLE)
    alone = [make(i) for i in range(4)]
    for number in range(4):
        own = {f"m{i}": BATCHES[number + i] for i in (1, 3)}
        fleet.step(BATCHES[number], overrides=own)
        for i, member in enumerate(alone):
            train_alone(member, [own.get(f"m{i}", BATCHES[number])])
    for name, state in states_of(fleet).items():
        assert_close(state, state_of(alone[int(name[1:])]))
