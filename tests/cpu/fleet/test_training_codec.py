"""A checkpoint's document: what goes in comes out, or is refused by path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.record_files import edit

from trainmux.errors import CheckpointError
from trainmux.fleet._checkpoint_files import read_checkpoint, write_checkpoint

keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
hashables = st.recursive(keys, lambda inner: st.tuples(inner, inner), max_leaves=4)
values = st.recursive(
    keys,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashables, inner)
        | st.dictionaries(st.sampled_from(["$tuple", "$dict", "a", ""]), inner)
        | st.lists(inner).map(lambda items: deque(items, maxlen=len(items) + 1))
        | st.dictionaries(hashables, st.integers()).map(Counter)
        | st.lists(st.tuples(hashables, inner)).map(OrderedDict)
    ),
    max_leaves=12,
)


def round_trip(document: dict[str, Any]) -> Any:
    with TemporaryDirectory() as folder:
        write_checkpoint(folder, {}, document)
        return read_checkpoint(folder)[1]


def same_types(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return all(same_types(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(same_types(a, b) for a, b in zip(left, right, strict=True))
    return True


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(), values))
def test_round_trip(document: dict[str, Any]) -> None:
    result = round_trip(document)
    assert result == document
    assert same_types(result, document)


def test_special_values() -> None:
    document = {
        "tensors": [1, {"b": (torch.arange(3), torch.tensor(2.0))}],
        "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324],
        "surrogate": "\ud800",
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x"), np.float64("nan")],
        "dtypes": [torch.bfloat16, torch.int64],
        "deque": deque([1, 2], maxlen=2),
        "multistep": Counter({10: 1, 20: 2}),
    }
    result = round_trip(document)
    assert result["tensors"][1]["b"][0].tolist() == [0, 1, 2]
    assert math.isnan(result["floats"][0])
    assert result["floats"][1:4] == [math.inf, -math.inf, 0.0]
    assert math.copysign(1, result["floats"][3]) == -1
    assert result["numpy"][:4] == [0.5, 3, True, "x"]
    assert [type(value) for value in result["numpy"]] == [float, int, bool, str, float]
    assert result["dtypes"] == [torch.bfloat16, torch.int64]
    assert result["deque"].maxlen == 2
    assert result["surrogate"] == "\ud800"
    assert result["multistep"] == Counter({10: 1, 20: 2})
    assert type(result["multistep"]) is Counter


def test_scheduler_state_round_trips() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    for scheduler in [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 7]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ]:
        state = scheduler.state_dict()
        assert round_trip({"scheduler": state})["scheduler"] == state
    restored = round_trip({"o": optimizer.state_dict()})["o"]
    assert restored["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(restored["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


class Color(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"members": [0, 1, 2, {"scheduler": {"fn": lambda: 0}}]}, "members[3].scheduler.fn"),
        ({"a": object()}, " a,"),
        ({"a b": {1, 2}}, "['a b']"),
        ({"x": {3: b"bytes"}}, "x[3]"),
        ({"x": (1, defaultdict(int))}, "x[1]"),
        ({"x": Color.RED}, " x,"),
        ({"x": np.zeros(2)}, " x,"),
        ({"x": np.longdouble(1)}, " x,"),
        ({"x": {torch.zeros(1): 1}}, "key of x"),
        ({"x": {frozenset(): 1}}, "x.<key>"),
        ({"x": 1 << 20000}, " x:"),
        ({"x": complex(1, 2)}, " x,"),
    ],
)
def test_refused_by_path(value: dict[str, Any], path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        round_trip(value)
    assert path in str(caught.value)


def test_cycle_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(CheckpointError, match="contain itself"):
        round_trip({"x": cycle})


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": "missing"},
        {"$eval": "1"},
        {"$dtype": "nn"},
        {"$dtype": 3},
        {"$float": "1e5"},
        {"$tuple": 3},
        {"$tuple": [], "b": 1},
        {"$deque": [1]},
        {"$dict": [[[], 1]]},
        {"$counter": 4},
    ],
)
def test_malformed_is_refused(value: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"x": 1})
    edit(tmp_path / "checkpoint.json", ["document", "x"], value)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)
