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
    stack_padded,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from trainmux.fusion import optimizers as optim
from trainmux.fusion.optimizers import FAMILIES

MEMBERS = range(NUM_MEMBERS)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def members_of(case: Case, dtype: torch.dtype = torch.float64, **extra: object):
    params = [random_params(i, dtype) for i in MEMBERS]
    return params, [case.build(i, params[i], **extra) for i in MEMBERS]


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


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
@pytest.mark.parametrize("use_idle", [False, True])
def test_equals_plain_torch_in_double_precision(case: Case, use_idle: bool):
    plain_params, plain = members_of(case)
    params, optimizers = members_of(case)
    fleet = Fleet(optimizers, params, use_idle=use_idle)
    for step in range(50):
        grads = [random_grads(step, i) for i in MEMBERS]
        for i in MEMBERS:
            schedule(plain[i], step)
            schedule(optimizers[i], step)
            plain_step(plain[i], plain_params[i], grads[i])
        fleet.step(grads)
    fleet.unload()
    for i in MEMBERS:
        for index in range(len(params[i])):
            assert_close(params[i][index], plain_params[i][index], rtol=1e-14, atol=1e-15)
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
    plain_params = [random_params(i, dtype) for i in MEMBERS]
    params = [random_params(i, dtype) for i in MEMBERS]
    plain = [case.build(i, plain_params[i], **extra) for i in MEMBERS]
    optimizers = [case.build(i, params[i], **extra) for i in MEMBERS]
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
            assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@every_case
@pytest.mark.parametrize("use_idle", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_frozen_row_keeps_its_bits_while_others_train(case: Case, use_idle: bool, dtype: torch.dtype):
    extra = {"weight_decay": 0.0, "maximize": False} if use_idle else {}
    frozen = 1
    params, optimizers = members_of(case, dtype, **extra)
    plain_params, plain = members_of(case, dtype, **extra)
    fleet = Fleet(optimizers, params, use_idle=use_idle)
    shadow = Fleet(plain, plain_params, use_idle=use_idle)
    for step in range(4):
        grads = [random_grads(step, i, dtype) for i in MEMBERS]
        fleet.step(grads)
        shadow.step(grads)
    plant_negative_zeros(fleet, frozen)
    kept = {i: fleet.stacked[i][frozen].clone() for i in fleet.state}
    kept_state = {(i, n): t[frozen].clone() for i, s in fleet.state.items() for n, t in s.items()}
    for step in range(4, 8):
        grads = [random_grads(step, i, dtype) for i in MEMBERS]
        fleet.step(grads, frozen={frozen})
        shadow.step(grads)
    for index, before in kept.items():
        assert bits_equal(fleet.stacked[index][frozen], before)
        for other in (0, 2):
            assert bits_equal(fleet.stacked[index][other], shadow.stacked[index][other])
    for (index, name), before in kept_state.items():
        assert bits_equal(fleet.state[index][name][frozen], before), name


@every_case
def test_a_row_is_frozen_before_its_first_step_as_well(case: Case):
    params, optimizers = members_of(case)
    fleet = Fleet(optimizers, params)
    before = [tensor[0].clone() for tensor in fleet.stacked]
    state = {(i, n): t[0].clone() for i, s in fleet.state.items() for n, t in s.items()}
    fleet.step([random_grads(0, i) for i in MEMBERS], frozen={0})
    assert all(bits_equal(t[0], b) for t, b in zip(fleet.stacked, before, strict=True))
    assert all(bits_equal(fleet.state[i][n][0], b) for (i, n), b in state.items())


@every_case
def test_a_frozen_row_keeps_its_values_under_gradients_of_negative_zero(case: Case):
    params, optimizers = members_of(case)
    fleet = Fleet(optimizers, params)
    fleet.step([random_grads(0, i) for i in MEMBERS])
    group = fleet.structure.groups[0]
    before = {name: tensor.clone() for name, tensor in fleet.state[0].items()}
    param = fleet.stacked[0].clone()
    scalars = fleet.scalars(0, frozen=MEMBERS)
    optim.apply_update(group, fleet.stacked[0], torch.full_like(param, -0.0), fleet.state[0], scalars)
    assert torch.equal(fleet.stacked[0], param)
    assert all(torch.equal(fleet.state[0][name], tensor) for name, tensor in before.items())


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
            assert_close(ours, theirs, rtol=1e-14, atol=1e-15)
            assert_states_close(optimizers[i].state.get(ours, {}), plain[i].state.get(theirs, {}), rtol=1e-14)


@every_case
@pytest.mark.parametrize("num_steps", [0, 1, 3])
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
def test_a_row_does_not_depend_on_the_number_of_members(case: Case):
    params, optimizers = members_of(case)
    alone_params, alone_optimizers = members_of(case)
    together = Fleet(optimizers, params)
    alone = [Fleet([alone_optimizers[i]], [alone_params[i]]) for i in MEMBERS]
    for step in range(5):
        grads = [random_grads(step, i) for i in MEMBERS]
        together.step(grads)
        for i in MEMBERS:
            alone[i].step([grads[i]])
    for i in MEMBERS:
        for index, state in together.state.items():
            assert bits_equal(together.stacked[index][i], alone[i].stacked[index][0])
            for name, tensor in state.items():
                assert bits_equal(tensor[i], alone[i].state[index][name][0])


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_update_can_be_traced_with_fake_tensors(case: Case, dtype: torch.dtype):
    params, optimizers = members_of(case, dtype)
    fleet = Fleet(optimizers, params)
    group = fleet.structure.groups[0]
    scalars = fleet.scalars(0)
    grad = torch.stack([random_grads(0, i, dtype)[0] for i in MEMBERS])

    def update(param: Tensor, grad: Tensor, state: dict[str, Tensor], scalars: dict[str, Tensor]) -> None:
        optim.apply_update(group, param, grad, state, scalars)

    def inputs():
        state = {name: stack_padded(list(tensor)) for name, tensor in fleet.state[0].items()}
        return stack_padded(list(fleet.stacked[0])), grad.clone(), state, scalars

    graph = make_fx(update, tracing_mode="fake")(*inputs())
    assert not any("_local_scalar_dense" in str(node.target) for node in graph.graph.nodes)
    traced, eager = inputs(), inputs()
    graph(*traced)
    update(*eager)
    assert bits_equal(traced[0], eager[0])
    assert not bits_equal(eager[0], fleet.stacked[0])
    for name in eager[2]:
        assert bits_equal(traced[2][name], eager[2][name])


@every_case
def test_leaving_out_idle_settings_does_not_change_the_result(case: Case):
    idle = {"weight_decay": 0.0, "maximize": False}
    if "momentum" in case.name and "sgd" in case.name:
        idle["dampening"] = 0.0
    params, optimizers = members_of(case, **idle)
    full = Fleet(optimizers, params)
    lean = Fleet(optimizers, params, use_idle=True)
    assert {"weight_decay", "maximize", "dampening"} == lean.idle(0)
    for step in range(5):
        grads = [random_grads(step, i) for i in MEMBERS]
        full.step(grads)
        lean.step(grads)
    for index, state in full.state.items():
        assert torch.equal(full.stacked[index], lean.stacked[index])
        assert all(torch.equal(state[name], lean.state[index][name]) for name in state)


@every_case
def test_scalars_may_be_shaped_beforehand(case: Case):
    params, optimizers = members_of(case)
    fleet, other = Fleet(optimizers, params), Fleet(optimizers, params)
    group = fleet.structure.groups[0]
    grad = torch.stack([random_grads(0, i)[0] for i in MEMBERS])
    scalars = fleet.scalars(0)
    shaped = {name: scalar.view(-1, 1, 1) for name, scalar in scalars.items()}
    optim.apply_update(group, fleet.stacked[0], grad, fleet.state[0], scalars)
    optim.apply_update(group, other.stacked[0], grad, other.state[0], shaped)
    assert bits_equal(fleet.stacked[0], other.stacked[0])


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
        assert_close(actual[name], tensor, rtol=rtol, atol=1e-15)
