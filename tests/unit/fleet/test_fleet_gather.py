"""Per-member values of several groups, put into the order of the fleet's names."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainmux.fleet._results import Gather


@dataclass
class FakeGroup:
    """The parts of a group that gathering looks at; ``None`` stands for an empty slot."""

    names: list[str | None]

    @property
    def width(self) -> int:
        return len(self.names)

    @property
    def members(self) -> list[tuple[int, Any]]:
        return [(row, SimpleNamespace(name=n)) for row, n in enumerate(self.names) if n is not None]

    @property
    def config(self) -> Any:
        return SimpleNamespace(device=torch.device("cpu"))


def gather(names: list[str], groups: list[FakeGroup], values: list[Tensor | None]) -> Any:
    return Gather(names, groups)(values, groups)  # type: ignore[arg-type]


def test_one_full_group_in_order_is_handed_on_as_it_is() -> None:
    value = torch.tensor([1.0, 2.0])
    assert gather(["a", "b"], [FakeGroup(["a", "b"])], [value]) is value


def test_one_group_in_another_order() -> None:
    value = torch.tensor([1.0, 2.0, 3.0])
    got = gather(["c", "a", "b"], [FakeGroup(["a", "b", "c"])], [value])
    assert got.tolist() == [3.0, 1.0, 2.0]


def test_empty_slots_are_left_out() -> None:
    value = torch.tensor([9.0, 1.0, 9.0, 2.0])
    got = gather(["a", "b"], [FakeGroup([None, "a", None, "b"])], [value])
    assert got.tolist() == [1.0, 2.0]


def test_an_empty_slot_at_the_end_is_left_out_too() -> None:
    got = gather(["a", "b"], [FakeGroup(["a", "b", None])], [torch.tensor([1.0, 2.0, 9.0])])
    assert got.tolist() == [1.0, 2.0]


def test_several_groups_are_interleaved_by_name() -> None:
    groups = [FakeGroup(["a", "c"]), FakeGroup(["b", None]), FakeGroup(["d"])]
    values: list[Tensor | None] = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 9.0]), torch.tensor([4.0])]
    assert gather(["a", "b", "c", "d"], groups, values).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_values_with_more_axes() -> None:
    groups = [FakeGroup(["b"]), FakeGroup(["a"])]
    got = gather(["a", "b"], groups, [torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]])])
    assert got.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_other_shapes_come_as_a_list() -> None:
    groups = [FakeGroup(["a", "c"]), FakeGroup(["b"])]
    got = gather(["a", "b", "c"], groups, [torch.zeros(2, 3), torch.ones(1, 4)])
    assert [tuple(value.shape) for value in got] == [(3,), (4,), (3,)]


def test_a_number_that_some_members_have_not_is_nan() -> None:
    groups = [FakeGroup(["a", None]), FakeGroup(["b"])]
    got = gather(["b", "a"], groups, [torch.tensor([1.0, 9.0]), None])
    assert torch.isnan(got[0])
    assert got[1] == 1.0


def test_a_tensor_that_some_members_have_not_is_none() -> None:
    groups = [FakeGroup(["a"]), FakeGroup(["b"])]
    got = gather(["a", "b"], groups, [torch.tensor([[1.0, 2.0]]), None])
    assert got[0].tolist() == [1.0, 2.0]
    assert got[1] is None


def test_nobody_has_it() -> None:
    assert gather(["a", "b"], [FakeGroup(["a"]), FakeGroup(["b"])], [None, None]) == [None, None]


def test_dtypes_of_several_groups_are_promoted() -> None:
    groups = [FakeGroup(["a"]), FakeGroup(["b"])]
    values: list[Tensor | None] = [torch.tensor([0.1]), torch.tensor([0.2], dtype=torch.float64)]
    got = gather(["b", "a"], groups, values)
    assert got.dtype == torch.float64
    assert got[0] == 0.2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_missing_values_do_not_change_the_dtype(dtype: torch.dtype) -> None:
    groups = [FakeGroup(["a"]), FakeGroup(["b"])]
    got = gather(["a", "b"], groups, [torch.tensor([1.0], dtype=dtype), None])
    assert got.dtype == dtype


def test_a_fleet_without_groups() -> None:
    assert gather([], [], []) == []
