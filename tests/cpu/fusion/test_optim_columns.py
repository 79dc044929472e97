"""Scalars of many members at once: the bits that each would get alone, from settings as they are now."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import optim_cases
import pytest
import torch
from optim_cases import NUM_MEMBERS

from trainmux.fusion import optimizers as optim

WIDTH = 5
CASES = {case.name: case for case in optim_cases.CASES}


def members(name: str, **settings: Any) -> tuple[optim.GroupStructure, list[dict[str, Any]]]:
    case = CASES[name]
    own = [{**case.switches, **case.settings[number % NUM_MEMBERS]} for number in range(WIDTH)]
    optimizers = [case.torch_class([torch.zeros(1)], **each) for each in own]
    structure = optim.describe(optimizers[0], optimizers[0].param_groups[0]["params"], member="a").groups[0]
    groups = [optimizer.param_groups[0] for optimizer in optimizers]
    for group in groups:
        group.update(settings)
    return structure, groups


def bits(values: Any) -> list[list[int]]:
    return np.array([np.broadcast_to(row, WIDTH) for row in values], dtype=np.float64).view(np.int64).tolist()


def alone(structure: optim.GroupStructure, groups: list[dict[str, Any]], steps: list[int]) -> list[list[int]]:
    columns = [optim.scalar_values(structure, *pair) for pair in zip(groups, steps, strict=True)]
    return bits(zip(*columns, strict=True))


def scramble(group: dict[str, Any], draw: random.Random) -> None:
    """Other numbers for one setting, of the kind that schedules and users write; a list changes in place."""
    names = ("lr", "betas", "eps", "weight_decay", "momentum", "rho")
    name = draw.choice([name for name in names if name in group])
    if name == "betas" and isinstance(group[name], list):
        group[name][draw.randrange(2)] = draw.random() * 0.999
    elif name == "betas":
        group[name] = draw.choice([tuple, list])([draw.random() * 0.999, draw.random() * 0.9999])
    elif name != "momentum" or group[name]:
        number = draw.choice([draw.random(), np.float64(draw.random()), 1e-30])
        group[name] = draw.choice([0, number]) if name == "weight_decay" else number


@pytest.mark.parametrize("case", CASES)
def test_every_column_has_the_bits_of_its_member_alone(case: str) -> None:
    draw = random.Random(case)
    structure, groups = members(case)
    columns = optim.SettingColumns(structure)
    steps = [0] * WIDTH
    for round_ in range(60):
        assert columns.read(groups)
        got = columns.scalars(steps)
        assert got is not None
        assert bits(got) == alone(structure, groups, steps)
        assert columns.idle == frozenset.intersection(*map(optim.idle_settings, groups))
        steps = [done + 1 if round_ < 30 else draw.randrange(10**6) for done in steps]
        if round_ > 10:
            scramble(draw.choice(groups), draw)
        if round_ > 40:
            groups[draw.randrange(WIDTH)]["maximize"] = draw.random() < 0.5


def test_numbers_in_tensors_are_left_to_the_member_itself() -> None:
    """A tensor may change in place at any time, without being another object."""
    structure, groups = members("sgd")
    columns = optim.SettingColumns(structure)
    assert columns.read(groups)
    groups[1]["lr"] = torch.tensor(0.1)
    columns.read(groups)
    groups[1]["lr"].fill_(0.7)
    assert not columns.read(groups)
    groups[1]["lr"] = 0.7
    assert columns.read(groups)
    assert bits(columns.scalars([0] * WIDTH)) == alone(structure, groups, [0] * WIDTH)


@pytest.mark.parametrize("value", [None, "0.1", torch.zeros(2), np.zeros(2), [0.1]])
def test_what_is_no_number_is_left_to_the_member_itself(value: Any) -> None:
    structure, groups = members("adam")
    columns = optim.SettingColumns(structure)
    assert columns.read(groups)
    groups[2]["lr"] = value
    assert not columns.read(groups)
    del groups[2]["lr"]
    assert not columns.read(groups)


@pytest.mark.parametrize(
    ("case", "settings", "steps"),
    [
        ("adam", {"betas": (1.0, 0.9)}, 3),
        ("adam", {"betas": (-1.0, 0.9)}, 3),
        ("adam", {"betas": (0.9, 1.5)}, 3),
        ("sgd", {"momentum": 0.9}, 1),
        ("sgd-momentum", {"momentum": 0.0}, 1),
        ("rmsprop", {"momentum": 0.1}, 1),
        ("adagrad", {"lr_decay": -1.0}, 1),
    ],
)
@pytest.mark.parametrize("everyone", [False, True])
def test_undefined_updates_are_left_to_the_member_itself(
    case: str, settings: dict[str, Any], steps: int, everyone: bool
) -> None:
    structure, groups = members(case)
    columns = optim.SettingColumns(structure)
    for group in groups if everyone else groups[2:3]:
        group.update(settings)
    assert columns.read(groups)
    assert columns.scalars([steps] * WIDTH) is None
