"""Reading and writing the state of torch optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import write_state
from torch import Tensor

from trainmux.errors import OptimizerError
from trainmux.fusion import optimizers as optim


def stepped(optimizer: torch.optim.Optimizer, params: list[Tensor], which: list[int]) -> None:
    for index, param in enumerate(params):
        param.grad = torch.ones_like(param) if index in which else None
    optimizer.step()


def test_state_that_is_missing_comes_as_its_initial_value():
    param = torch.zeros(3)
    adam = torch.optim.Adam([param])
    assert optim.read_state(adam, 0, param) == ({"exp_avg": 0.0, "exp_avg_sq": 0.0}, 0)
    assert len(adam.state) == 0
    assert optim.read_state(torch.optim.SGD([param], lr=0.1), 0, param) == ({}, 0)


def test_adagrad_has_its_accumulator_from_the_start():
    param, late = torch.zeros(3), torch.zeros(2)
    optimizer = torch.optim.Adagrad([param], initial_accumulator_value=0.5)
    state, steps = optim.read_state(optimizer, 0, param)
    assert steps == 0
    assert torch.equal(state["sum"], torch.full((3,), 0.5))
    optimizer.add_param_group({"params": [late]})
    assert optim.read_state(optimizer, 1, late) == ({"sum": 0.5}, 0)


def test_sgd_counts_by_its_buffer():
    param = torch.zeros(3)
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = None
    assert optim.read_state(optimizer, 0, param) == ({"momentum_buffer": 0.0}, 0)
    stepped(optimizer, [param], [0])
    state, steps = optim.read_state(optimizer, 0, param)
    assert steps == 1
    assert torch.equal(state["momentum_buffer"], torch.ones(3))


def test_a_state_of_another_shape_is_refused():
    param = torch.zeros(3)
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = torch.zeros(4)
    with pytest.raises(OptimizerError, match=r"'momentum_buffer'.*\(3,\), got \(4,\)"):
        optim.read_state(optimizer, 0, param)


def test_steps_are_read_per_group_from_the_used_parameters():
    params = [torch.zeros(2) for _ in range(4)]
    optimizer = torch.optim.Adam([{"params": params[:2]}, {"params": params[2:3]}, {"params": params[3:]}])
    structure = optim.describe(optimizer, params, member="a")
    stepped(optimizer, params, [0, 2])
    stepped(optimizer, params, [0])
    assert optim.read_steps(optimizer, structure, params, {0, 2}) == (2, 1, 0)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.SGD])
def test_different_histories_within_a_group_are_refused(cls: Any):
    params = [torch.zeros(2) for _ in range(2)]
    optimizer = cls(params, lr=0.1, **({"momentum": 0.9} if cls is torch.optim.SGD else {}))
    structure = optim.describe(optimizer, params, member="a")
    stepped(optimizer, params, [0])
    with pytest.raises(OptimizerError, match=r"Member 'a'.*0 for parameters \[1\], 1 for parameters \[0\]"):
        optim.read_steps(optimizer, structure, params, {0, 1}, member="a")


def test_written_state_is_a_copy_with_the_parameters_layout():
    param = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam([param])
    source = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    write_state(optimizer, 0, param, {"exp_avg": source, "exp_avg_sq": source}, 4)
    state = optimizer.state[param]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert state["step"] == 4.0
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].dtype == torch.float32
        assert state[name].stride() == param.stride()
        assert torch.equal(state[name], source.float())
    assert state["exp_avg"].data_ptr() != state["exp_avg_sq"].data_ptr()


@pytest.mark.parametrize(
    ("default", "settings", "expected"),
    [
        (torch.float32, {}, torch.float32),
        (torch.float64, {}, torch.float64),
        (torch.float64, {"fused": True}, torch.float32),
    ],
)
def test_the_count_is_stored_as_torch_stores_it(
    default: torch.dtype, settings: dict[str, Any], expected: Any
):
    previous = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        params = [torch.zeros(2), torch.zeros(2)]
        optimizer = torch.optim.Adam(params, **settings)
        stepped(optimizer, params, [0])
        rows = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        write_state(optimizer, 0, params[1], rows, 1)
        ours, theirs = (optimizer.state[param]["step"] for param in reversed(params))
    finally:
        torch.set_default_dtype(previous)
    assert ours.dtype == theirs.dtype == expected
    assert ours.device == theirs.device
    assert torch.equal(ours, theirs)


def test_no_steps_leave_no_state():
    param = torch.zeros(2)
    optimizer = torch.optim.Adam([param])
    stepped(optimizer, [param], [0])
    write_state(optimizer, 0, param, {}, 0)
    assert len(optimizer.state) == 0


def test_sgd_without_momentum_writes_nothing():
    param = torch.zeros(2)
    optimizer = torch.optim.SGD([param], lr=0.1)
    write_state(optimizer, 0, param, {}, 7)
    assert len(optimizer.state) == 0
