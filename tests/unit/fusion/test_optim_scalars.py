"""Per-member scalars on the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainmux.errors import OptimizerError
from trainmux.fusion import optimizers as optim


def only_group(optimizer: torch.optim.Optimizer) -> tuple[optim.GroupStructure, dict[str, Any]]:
    settings = optimizer.param_groups[0]
    return optim.describe(optimizer, settings["params"], member="a").groups[0], settings


def named(optimizer: torch.optim.Optimizer, steps_done: int) -> dict[str, float]:
    group, settings = only_group(optimizer)
    names = [spec.name for spec in optim.scalar_specs(group)]
    return dict(zip(names, optim.scalar_values(group, settings, steps_done), strict=True))


def test_adam_corrects_its_bias_in_double_precision():
    values = named(torch.optim.Adam([torch.zeros(1)], lr=0.1, betas=(0.9, 0.99), eps=1e-8), 4)
    root = math.sqrt(1 - 0.99**5)
    assert values["step"] == pytest.approx(-0.1 / (1 - 0.9**5) * root, rel=1e-15)
    assert values["eps"] == pytest.approx(1e-8 * root, rel=1e-15)
    assert (values["beta2"], values["one_minus_beta1"]) == (0.99, 1 - 0.9)


def test_adamw_shrinks_the_parameter():
    values = named(torch.optim.AdamW([torch.zeros(1)], lr=0.1, weight_decay=0.5), 0)
    assert values["shrink"] == 1 - 0.1 * 0.5
    assert "weight_decay" not in values


def test_the_first_sgd_step_fills_the_momentum_buffer():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9, dampening=0.25)
    first, later = named(optimizer, 0), named(optimizer, 1)
    assert (first["keep"], first["gain"]) == (0.0, 1.0)
    assert (later["keep"], later["gain"]) == (0.9, 0.75)


def test_adagrad_decays_its_learning_rate():
    optimizer = torch.optim.Adagrad([torch.zeros(1)], lr=0.1, lr_decay=0.5)
    assert [named(optimizer, done)["step"] for done in (0, 2)] == [-0.1, -0.05]


def test_maximize_is_a_sign_and_tensors_become_numbers():
    values = named(torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.5), maximize=True), 0)
    assert values == {"sign": -1.0, "weight_decay": 0.0, "step": -0.5}
    assert all(type(value) is float for value in values.values())


def test_zero_neutrals_are_negative_where_they_are_added():
    group, _ = only_group(torch.optim.Adam([torch.zeros(1)]))
    neutral = {spec.name: spec.neutral for spec in optim.scalar_specs(group)}
    for name in ("one_minus_beta1", "one_minus_beta2", "step"):
        assert neutral[name] == 0.0
        assert math.copysign(1.0, neutral[name]) == -1.0


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


def test_an_unknown_kind_is_refused():
    with pytest.raises(OptimizerError, match="one of Adadelta, Adagrad, Adam, RMSprop, SGD, got 'Lion'"):
        optim.scalar_specs(optim.GroupStructure("Lion", (), ()))


def test_half_precision_takes_single_precision_scalars():
    assert optim.scalar_dtype(torch.bfloat16) == optim.scalar_dtype(torch.float16) == torch.float32
    assert optim.scalar_dtype(torch.float64) == torch.float64


def test_scalars_of_another_dtype_are_refused():
    group, _ = only_group(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    param = torch.zeros(2, 3, dtype=torch.bfloat16)
    scalars = {spec.name: torch.zeros(2, dtype=torch.bfloat16) for spec in optim.scalar_specs(group)}
    with pytest.raises(OptimizerError, match=r"expected scalars of torch.float32.*scalar_dtype"):
        optim.apply_update(group, param, param.clone(), {}, scalars)


def test_idle_settings_are_those_without_effect():
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9, dampening=0.5)
    assert optim.idle_settings(sgd.param_groups[0]) == {"maximize", "weight_decay"}
    adamw = torch.optim.AdamW([torch.zeros(1)], weight_decay=0.1, maximize=True)
    assert optim.idle_settings(adamw.param_groups[0]) == {"dampening"}
