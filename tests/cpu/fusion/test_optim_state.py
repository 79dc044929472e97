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
    param, late = torch.zeros(3), torch.zeros(2)
    adagrad = torch.optim.Adagrad([param], initial_accumulator_value=0.5)
    adagrad.add_param_group({"params": [late]})
    groups = optim.describe(adagrad, [param, late], member="a").groups
    assert optim.read_state(adagrad, 1, groups[1], late) == ({"sum": 0.5}, 0)
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    sgd.state[param]["momentum_buffer"] = None
    (group,) = optim.describe(sgd, [param], member="a").groups
    assert optim.read_state(sgd, 0, group, param) == ({"momentum_buffer": 0.0}, 0)


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
