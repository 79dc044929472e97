"""Describing optimizers: which structures are equal, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from trainmux.errors import OptimizerError
from trainmux.fusion import optimizers as optim
from trainmux.fusion.optimizers import FAMILIES

CLASSES = [family.torch_class for family in FAMILIES]


def parameters(count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(2, dtype=dtype) for _ in range(count)]


def structure_of(cls: Any, **settings: Any) -> optim.OptimizerStructure:
    params = parameters()
    return optim.describe(cls(params, lr=0.1, **settings), params, member="a")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_numbers_are_no_part_of_the_structure(cls: Any):
    params, others = parameters(), parameters()
    left = cls(params, lr=0.1, weight_decay=0.0)
    right = cls(others, lr=torch.tensor(0.7), weight_decay=0.3, maximize=True)
    structures = {optim.describe(left, params, member="a"), optim.describe(right, others, member="b")}
    assert len(structures) == 1


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adam, {"decoupled_weight_decay": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.RMSprop, {"momentum": 0.1}),
    ],
)
def test_switches_are_part_of_the_structure(cls: Any, settings: dict[str, Any]):
    assert structure_of(cls) != structure_of(cls, **settings)


def test_adamw_is_adam_with_decoupled_decay_and_implementation_switches_are_ignored():
    assert structure_of(torch.optim.AdamW) == structure_of(torch.optim.Adam, decoupled_weight_decay=True)
    assert structure_of(torch.optim.AdamW).groups[0].flags == (("amsgrad", False), ("decoupled", True))
    for switch in ("foreach", "capturable", "fused"):
        assert structure_of(torch.optim.Adam, **{switch: True}) == structure_of(torch.optim.Adam)


def test_groups_name_their_parameters_by_position():
    params = parameters(4)
    optimizer = torch.optim.Adam([{"params": [params[3], params[0]]}, {"params": [params[2]]}])
    assert [group.params for group in optim.describe(optimizer, params, member="a").groups] == [(3, 0), (2,)]


def test_nesterov_without_momentum_is_plain():
    params = parameters()
    optimizer = torch.optim.SGD([{"params": params, "momentum": 0.0}], lr=0.1, momentum=0.9, nesterov=True)
    (group,) = optim.describe(optimizer, params, member="a").groups
    assert group.flags == (("momentum", False), ("nesterov", False))


_REFUSED = {
    "a closure": torch.optim.LBFGS,
    "a foreign parameter, though equal": lambda params: torch.optim.SGD([params[0].clone()], lr=0.1),
    "one parameter twice": lambda params: torch.optim.SGD([params[0], params[0]], lr=0.1),
    "complex": lambda params: torch.optim.SGD(params, lr=0.1),
    "float8": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("name", _REFUSED)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_what_cannot_be_trained_is_refused(name: str):
    dtypes = {"complex": torch.complex64, "float8": torch.float8_e4m3fn}
    params = parameters(dtype=dtypes.get(name, torch.float32))
    optimizer = _REFUSED[name](params)
    with pytest.raises(OptimizerError, match="Member 'a'"):
        optim.describe(optimizer, params, member="a")


_SETTINGS = [(family, setting) for family in FAMILIES for setting in family.settings]
_ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0.0, 1.0) | st.just(1.0)


@given(which=st.sampled_from(_SETTINGS), value=_ANY_NUMBER, as_tensor=st.booleans())
def test_a_setting_is_accepted_if_and_only_if_it_is_in_its_range(which: Any, value: float, as_tensor: bool):
    family, setting = which
    params = parameters(1)
    optimizer = family.torch_class(params)
    group = optimizer.param_groups[0]
    number = torch.tensor(value, dtype=torch.float64) if as_tensor else value
    if setting.index is None:
        group[setting.name] = number
    else:
        pair = list(group[setting.name])
        pair[setting.index] = number
        group[setting.name] = tuple(pair)
    bound = {"betas": 1.0, "rho": math.nextafter(1.0, 2.0)}.get(setting.name, math.inf)
    if 0.0 <= value < bound:
        optim.check_hyperparameters(optimizer, member="a")
        optim.describe(optimizer, params, member="a")
        return
    with pytest.raises(OptimizerError) as caught:
        optim.check_hyperparameters(optimizer, member="a")
    message = str(caught.value)
    assert "Member 'a', param group 0" in message
    assert setting.label in message
    assert repr(number) in message
    with pytest.raises(OptimizerError):
        optim.describe(optimizer, params, member="a")


@pytest.mark.parametrize("value", [None, "fast", torch.zeros(2)])
def test_what_is_not_a_number_is_refused(value: Any):
    params = parameters(1)
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(OptimizerError, match="expected lr to be a finite number"):
        optim.check_hyperparameters(optimizer, member="a")


# ---- scalars ----------------------------------------------------------------------------------------------


def only_group(optimizer: torch.optim.Optimizer) -> tuple[optim.GroupStructure, dict[str, Any]]:
    settings = optimizer.param_groups[0]
    return optim.describe(optimizer, settings["params"], member="a").groups[0], settings


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_switching_momentum_after_the_description_is_refused(cls: Any, before: float, after: float):
    group, settings = only_group(cls([torch.zeros(1)], lr=0.1, momentum=before))
    settings["momentum"] = after
    with pytest.raises(OptimizerError, match=f"expected momentum to stay .* got {after}"):
        optim.scalar_values(group, settings, 3)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.5), (0.9, None)])
def test_settings_without_a_defined_update_are_refused(betas: Any):
    group, settings = only_group(torch.optim.Adam([torch.zeros(1)]))
    settings["betas"] = betas
    with pytest.raises(OptimizerError, match="expected settings for which the Adam update is defined"):
        optim.scalar_values(group, settings, 3)
