"""What every update rule must do, for all rules and switches."""

from __future__ import annotations

import pytest
import torch
from optim_cases import (
    CASES,
    NUM_MEMBERS,
    Case,
    Fleet,
    bits_equal,
    plain_step,
    random_grads,
    random_params,
    schedule,
)
from torch import Tensor

from trainmux.fusion import optimizers as optim
from trainmux.fusion.optimizers import FAMILIES

MEMBERS = range(NUM_MEMBERS)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def members_of(case: Case, dtype: torch.dtype = torch.float64, **extra: object):
    params = [random_params(i, dtype) for i in MEMBERS]
    return params, [case.build(i, params[i], **extra) for i in MEMBERS]


def test_the_cases_cover_every_class_and_both_sides_of_every_flag():
    assert {case.torch_class for case in CASES} == {family.torch_class for family in FAMILIES}
    seen: dict[tuple[str, str], set[bool]] = {}
    for case in CASES:
        params, optimizers = members_of(case)
        group = optim.describe(optimizers[0], params[0], member="a").groups[0]
        for name, value in group.flags:
            seen.setdefault((group.kind, name), set()).add(value)
    assert all(values == {True, False} for values in seen.values())


@every_case
def test_equals_plain_torch_in_double_precision(case: Case):
    plain_params, plain = members_of(case)
    params, optimizers = members_of(case)
    fleet = Fleet(optimizers, params, use_idle=True)
    for step in range(15):
        grads = [random_grads(step, i) for i in MEMBERS]
        for i in MEMBERS:
            schedule(plain[i], step)
            schedule(optimizers[i], step)
            plain_step(plain[i], plain_params[i], grads[i])
        fleet.step(grads)
    fleet.unload()
    for i in MEMBERS:
        for index in range(len(params[i])):
            torch.testing.assert_close(params[i][index], plain_params[i][index], rtol=1e-14, atol=1e-15)
            assert_states_close(
                optimizers[i].state.get(params[i][index], {}),
                plain[i].state.get(plain_params[i][index], {}),
                rtol=1e-14,
            )


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions_round_like_plain_torch(case: Case, dtype: torch.dtype):
    # An eps below the range of float16 makes plain torch divide by zero as well.
    is_single = dtype is torch.float32
    extra = {} if is_single or "sgd" in case.name else {"eps": 1e-3}
    plain_params, plain = members_of(case, dtype, **extra)
    params, optimizers = members_of(case, dtype, **extra)
    fleet = Fleet(optimizers, params)
    for step in range(5):
        grads = [random_grads(step, i, dtype) for i in MEMBERS]
        for i in MEMBERS:
            plain_step(plain[i], plain_params[i], grads[i])
        fleet.step(grads)
    assert all(tensor.dtype == dtype for state in fleet.state.values() for tensor in state.values())
    fleet.unload()
    resolution = torch.finfo(dtype).eps
    for i in MEMBERS:
        for ours, theirs in zip(params[i], plain_params[i], strict=True):
            tolerance = 4 * resolution if "centered" not in case.name else 32 * resolution
            tolerance = 1e-6 if is_single else tolerance
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@every_case
@pytest.mark.parametrize(
    ("use_idle", "dtype"), [(False, torch.float64), (True, torch.float32), (False, torch.bfloat16)]
)
def test_a_frozen_row_keeps_its_bits_while_others_train(case: Case, use_idle: bool, dtype: torch.dtype):
    extra = {"weight_decay": 0.0, "maximize": False} if use_idle else {}
    frozen = 1
    params, optimizers = members_of(case, dtype, **extra)
    plain_params, plain = members_of(case, dtype, **extra)
    fleet = Fleet(optimizers, params, use_idle=use_idle)
    shadow = Fleet(plain, plain_params, use_idle=use_idle)
    first = [random_grads(8, i, dtype) for i in MEMBERS]
    before = rows_of(fleet, frozen)
    fleet.step(first, frozen={frozen})  # before its first step
    assert_bits(rows_of(fleet, frozen), before)
    shadow.step(first)
    for step in range(4):
        grads = [random_grads(step, i, dtype) for i in MEMBERS]
        fleet.step(grads)
        shadow.step(grads)
    plant_negative_zeros(fleet, frozen)
    before = rows_of(fleet, frozen)
    for step in range(4, 8):
        grads = [random_grads(step, i, dtype) for i in MEMBERS]
        fleet.step(grads, frozen={frozen})
        shadow.step(grads)
    assert_bits(rows_of(fleet, frozen), before)
    for other in (0, 2):
        assert_bits(rows_of(fleet, other), rows_of(shadow, other))


@every_case
def test_state_goes_from_torch_and_back_and_plain_torch_continues(case: Case):
    plain_params, plain = members_of(case)
    params, optimizers = members_of(case)
    for step in range(17):
        for i in MEMBERS:
            plain_step(plain[i], plain_params[i], random_grads(step, i))
            if step < 7:
                plain_step(optimizers[i], params[i], random_grads(step, i))
    fleet = Fleet(optimizers, params)
    for step in range(7, 12):
        fleet.step([random_grads(step, i) for i in MEMBERS])
    fleet.unload()
    for step in range(12, 17):
        for i in MEMBERS:
            plain_step(optimizers[i], params[i], random_grads(step, i))
    for i in MEMBERS:
        for ours, theirs in zip(params[i], plain_params[i], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)
            assert_states_close(optimizers[i].state.get(ours, {}), plain[i].state.get(theirs, {}), rtol=1e-14)


@every_case
@pytest.mark.parametrize("num_steps", [0, 3])
def test_unloading_at_once_leaves_torch_as_it_was(case: Case, num_steps: int):
    params, optimizers = members_of(case)
    for step in range(num_steps):
        for i in MEMBERS:
            plain_step(optimizers[i], params[i], random_grads(step, i))
    before = [optimizer.state_dict()["state"] for optimizer in optimizers]
    tensors = {id(t) for o in optimizers for s in o.state.values() for t in s.values()}
    Fleet(optimizers, params).unload()
    for i in MEMBERS:
        after = optimizers[i].state_dict()["state"]
        assert after.keys() == before[i].keys()
        for key, state in after.items():
            assert list(state) == list(before[i][key])
            for name, value in state.items():
                assert bits_equal(value, before[i][key][name])
                assert value.dtype == before[i][key][name].dtype
                assert id(value) not in tensors


@every_case
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_row_does_not_depend_on_other_members_nor_on_settings_left_out(case: Case, is_idle: bool):
    """``idle`` settings are left out of the updates of members alone, and are part of those of all."""
    extra = {"weight_decay": 0.0, "maximize": False} if is_idle else {}
    if is_idle and "momentum" in case.name and "sgd" in case.name:
        extra["dampening"] = 0.0
    params, optimizers = members_of(case, **extra)
    alone_params, alone_optimizers = members_of(case, **extra)
    together = Fleet(optimizers, params)
    alone = [Fleet([alone_optimizers[i]], [alone_params[i]], use_idle=is_idle) for i in MEMBERS]
    assert not is_idle or alone[0].idle(0) == {"weight_decay", "maximize", "dampening"}
    for step in range(5):
        grads = [random_grads(step, i) for i in MEMBERS]
        together.step(grads)
        for i in MEMBERS:
            alone[i].step([grads[i]])
    for i in MEMBERS:
        for ours, theirs in zip(rows_of(together, i), rows_of(alone[i], 0), strict=True):
            assert torch.equal(ours, theirs) if is_idle else bits_equal(ours, theirs)


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


def assert_states_close(actual: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=rtol, atol=1e-15)
