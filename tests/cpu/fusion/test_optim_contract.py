"""What every update rule must do, for all rules and switches."""

from __future__ import annotations

import pytest
import torch
from optim_cases import CASES, Case, Fleet, Member, bits_equal, grads_of, members_of, schedule
from torch import Tensor

from trainmux.fusion import optimizers as optim
from trainmux.fusion.optimizers import FAMILIES

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_the_cases_cover_every_class_and_both_sides_of_every_flag():
    assert {case.torch_class for case in CASES} == {family.torch_class for family in FAMILIES}
    seen: dict[tuple[str, str], set[bool]] = {}
    for case in CASES:
        member = members_of(case)[0]
        group = optim.describe(member.optimizer, member.params, member="a").groups[0]
        for name, value in group.flags:
            seen.setdefault((group.kind, name), set()).add(value)
    assert all(values == {True, False} for values in seen.values())


@every_case
@pytest.mark.parametrize("num_before", [0, 7])
def test_members_train_as_in_plain_torch_before_within_and_after_a_fleet(case: Case, num_before: int):
    """In double precision, with all settings on the move; state goes in with the members and comes back."""
    plain, members = members_of(case), members_of(case)

    def train(first: int, last: int, fleet: Fleet | None) -> None:
        for step in range(first, last):
            grads = grads_of(step)
            for member in (*plain, *members):
                schedule(member.optimizer, step)
            step_plainly(plain, grads)
            if fleet is None:
                step_plainly(members, grads)
            else:
                fleet.step(grads)

    train(0, num_before, None)
    fleet = Fleet(members, use_idle=num_before == 0)
    train(num_before, 15, fleet)
    fleet.unload()
    for num_after in (0, 5):
        train(15, 15 + num_after, None)
        for ours, theirs in zip(members, plain, strict=True):
            assert [list(state) for state in ours.state] == [list(state) for state in theirs.state]
            torch.testing.assert_close(ours.params, theirs.params, rtol=1e-14, atol=1e-15)
            torch.testing.assert_close(ours.state, theirs.state, rtol=1e-14, atol=1e-15)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions_round_like_plain_torch(case: Case, dtype: torch.dtype):
    # An eps below the range of float16 makes plain torch divide by zero as well.
    is_single = dtype is torch.float32
    extra = {} if is_single or "sgd" in case.name else {"eps": 1e-3}
    plain, members = (members_of(case, dtype, **extra) for _ in range(2))
    fleet = Fleet(members)
    for step in range(5):
        step_plainly(plain, grads_of(step, dtype))
        fleet.step(grads_of(step, dtype))
    assert all(tensor.dtype == dtype for state in fleet.state.values() for tensor in state.values())
    fleet.unload()
    tolerance = 1e-6 if is_single else (32 if "centered" in case.name else 4) * torch.finfo(dtype).eps
    for ours, theirs in zip(members, plain, strict=True):
        torch.testing.assert_close(ours.params, theirs.params, rtol=tolerance, atol=tolerance)


@every_case
@pytest.mark.parametrize(
    ("use_idle", "dtype"), [(False, torch.float64), (True, torch.float32), (False, torch.bfloat16)]
)
def test_a_frozen_row_keeps_its_bits_while_others_train(case: Case, use_idle: bool, dtype: torch.dtype):
    extra = {"weight_decay": 0.0, "maximize": False} if use_idle else {}
    frozen = 1
    fleet, shadow = (Fleet(members_of(case, dtype, **extra), use_idle=use_idle) for _ in range(2))
    first = grads_of(8, dtype)
    before = rows_of(fleet, frozen)
    fleet.step(first, frozen={frozen})  # before its first step
    assert_bits(rows_of(fleet, frozen), before)
    shadow.step(first)
    for step in range(8):
        if step == 4:
            plant_negative_zeros(fleet, frozen)
            before = rows_of(fleet, frozen)
        fleet.step(grads_of(step, dtype), frozen={frozen} if step >= 4 else ())
        shadow.step(grads_of(step, dtype))
    assert_bits(rows_of(fleet, frozen), before)
    for other in (0, 2):
        assert_bits(rows_of(fleet, other), rows_of(shadow, other))


@every_case
@pytest.mark.parametrize("num_steps", [0, 3])
def test_unloading_at_once_leaves_torch_as_it_was(case: Case, num_steps: int):
    members = members_of(case)
    for step in range(num_steps):
        step_plainly(members, grads_of(step))
    before = [each.optimizer.state_dict()["state"] for each in members]
    tensors = {id(tensor) for each in members for state in each.state for tensor in state.values()}
    Fleet(members).unload()
    for each, expected in zip(members, before, strict=True):
        after = each.optimizer.state_dict()["state"]
        assert after.keys() == expected.keys()
        for key, state in after.items():
            assert list(state) == list(expected[key])
            for name, value in state.items():
                assert bits_equal(value, expected[key][name])
                assert value.dtype == expected[key][name].dtype
                assert id(value) not in tensors


@every_case
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_row_does_not_depend_on_other_members_nor_on_settings_left_out(case: Case, is_idle: bool):
    """``idle`` settings are left out of the updates of members alone, and are part of those of all."""
    extra = {"weight_decay": 0.0, "maximize": False} if is_idle else {}
    if is_idle and "momentum" in case.name and "sgd" in case.name:
        extra["dampening"] = 0.0
    together = Fleet(members_of(case, **extra))
    alone = [Fleet([member], use_idle=is_idle) for member in members_of(case, **extra)]
    assert not is_idle or alone[0].idle(0) == {"weight_decay", "maximize", "dampening"}
    for step in range(5):
        together.step(grads_of(step))
        for fleet, grads in zip(alone, grads_of(step), strict=True):
            fleet.step([grads])
    for number, fleet in enumerate(alone):
        for ours, theirs in zip(rows_of(together, number), rows_of(fleet, 0), strict=True):
            assert torch.equal(ours, theirs) if is_idle else bits_equal(ours, theirs)


def step_plainly(members: list[Member], grads: list[list[Tensor]]) -> None:
    for member, own in zip(members, grads, strict=True):
        member.step(own)


def rows_of(fleet: Fleet, row: int) -> list[Tensor]:
    """A member's parameters and state, copied."""
    state = [tensor for index in fleet.state for tensor in fleet.state[index].values()]
    return [tensor[row].clone() for tensor in (*fleet.stacked, *state)]


def assert_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


def plant_negative_zeros(fleet: Fleet, row: int) -> None:
    """Zeros of either sign in the parameter and wherever state can be signed, over all combinations.

    Second moments are sums of squares; only their plain zero is a state that can occur.
    """
    param = fleet.stacked[1][row]
    param[:4] = torch.tensor([-0.0, -0.0, 0.0, -0.0], dtype=param.dtype)
    for name, tensor in fleet.state[1].items():
        signed = name in ("momentum_buffer", "exp_avg", "grad_avg")
        if signed:
            tensor[row][[1, 3, 5]] = -0.0
            if name != "grad_avg":
                # The frozen step along this entry is a zero of the opposite sign.
                tensor[row][0] = 1.5
                tensor[row][3] = -1.5
        elif name == "sum":
            tensor[row][5] = 0.0
