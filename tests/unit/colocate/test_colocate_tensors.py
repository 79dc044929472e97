"""Tensor classes, the backward pass found by the memory peak, and what a job keeps to itself."""

from __future__ import annotations

import pytest

from trainmux.colocate import (
    Allocation,
    Iteration,
    ObservedAllocation,
    TensorClass,
    backward_start,
    classify,
    iteration_of_profile,
    iteration_of_rows,
)
from trainmux.errors import ConfigError
from trainmux.ir import ByteClass, DeviceFacts, Phase, Profile, ProfiledNode, ProfiledTensor


@pytest.mark.parametrize(
    ("source_is_forward", "read_by_others", "read_in_backward", "expected"),
    [
        (True, True, True, TensorClass.FEATURE_MAP),
        (False, True, True, TensorClass.GRADIENT_MAP),
        (True, True, False, TensorClass.TEMPORARY),
        (True, False, False, TensorClass.TEMPORARY),
        (False, False, False, TensorClass.TEMPORARY),
        (False, False, True, TensorClass.TEMPORARY),
    ],
)
def test_the_three_facts_of_the_paper_decide(
    source_is_forward: bool, read_by_others: bool, read_in_backward: bool, expected: TensorClass
) -> None:
    found = classify(
        source_is_forward=source_is_forward, read_by_others=read_by_others, read_in_backward=read_in_backward
    )
    assert found is expected
    assert found.is_sharable is (expected is TensorClass.FEATURE_MAP)


def tensor(name: str, byte_class: ByteClass, size: int) -> ProfiledTensor:
    return ProfiledTensor(name, byte_class, size, 1.0, 1.0, 1.0, 1.0)


def small_profile() -> Profile:
    tensors = (
        tensor("weight", ByteClass.PARAMETER, 1000),
        tensor("batch", ByteClass.BATCH, 10),
        tensor("hidden", ByteClass.FEATURE_MAP, 100),
        tensor("mask", ByteClass.TEMPORARY, 7),
        tensor("loss", ByteClass.RESULT, 4),
        tensor("hidden_gradient", ByteClass.GRADIENT_MAP, 60),
        tensor("weight_gradient", ByteClass.GRADIENT, 50),
    )
    nodes = (
        ProfiledNode("first", Phase.FORWARD, (0, 1), (2, 3), (), 1.0, workspace_bytes=5),
        ProfiledNode("second", Phase.FORWARD, (2, 3), (4,), (), 2.0),
        ProfiledNode("second_backward", Phase.BACKWARD, (4, 2), (5,), (), 3.0, workspace_bytes=30),
        ProfiledNode("first_backward", Phase.BACKWARD, (5, 1), (6,), (), 4.0),
        ProfiledNode("update", Phase.UPDATE, (6,), (), (0,), 5.0),
    )
    return Profile("abc", "measured", 1, DeviceFacts("device", 2**30, 2**30), tensors, nodes)


def test_a_profile_becomes_an_iteration() -> None:
    iteration = iteration_of_profile(small_profile())
    rows = {row.name: row for row in iteration.allocations}
    assert rows["hidden"] == Allocation("hidden", 100, 0, 2, TensorClass.FEATURE_MAP)
    assert rows["mask"] == Allocation("mask", 7, 0, 1, TensorClass.TEMPORARY)
    # The loss is read in the backward pass, but it is the user's: it stays local, to the end.
    assert rows["loss"] == Allocation("loss", 4, 1, 4, TensorClass.RESIDENT)
    assert rows["hidden_gradient"].tensor_class is TensorClass.GRADIENT_MAP
    assert rows["weight_gradient"] == Allocation("weight_gradient", 50, 3, 4, TensorClass.GRADIENT_MAP)
    assert iteration.feature_maps == (rows["hidden"],)
    assert iteration.resident_bytes == 1010
    assert iteration.kernel_seconds == (1.0, 2.0, 3.0, 4.0, 5.0)
    # Outside the arena most is live while first_backward runs: loss 4, both gradients 110.
    assert iteration.local_bytes() == 1010 + 4 + 60 + 50


def test_workspaces_count_while_their_kernel_runs() -> None:
    rows = (Allocation("t", 10, 1, 1, TensorClass.TEMPORARY),)
    assert Iteration("", (1.0, 1.0), rows, 0, (3, 4)).local_bytes() == 14
    assert Iteration("", (1.0, 1.0), rows, 0, (30, 4)).local_bytes() == 30


def test_the_backward_pass_begins_after_the_memory_peak() -> None:
    rows = [
        ObservedAllocation("f0", 10, 0, 5),
        ObservedAllocation("f1", 10, 1, 4),
        ObservedAllocation("f2", 10, 2, 3),
        ObservedAllocation("scratch", 1, 1, 1),
        ObservedAllocation("between", 1, 0, 1),
        ObservedAllocation("gradient", 5, 4, 5),
    ]
    assert backward_start(rows, 6) == 3
    iteration = iteration_of_rows("job", rows, [1.0] * 6)
    classes = {row.name: row.tensor_class for row in iteration.allocations}
    assert classes == {
        "f0": TensorClass.FEATURE_MAP,
        "f1": TensorClass.FEATURE_MAP,
        "f2": TensorClass.FEATURE_MAP,
        "scratch": TensorClass.TEMPORARY,
        "between": TensorClass.TEMPORARY,
        "gradient": TensorClass.GRADIENT_MAP,
    }


@pytest.mark.parametrize(
    ("kernel_seconds", "row"),
    [
        ((), None),
        ((1.0,), Allocation("t", 1, 0, 1, TensorClass.TEMPORARY)),
        ((1.0, 1.0), Allocation("t", 1, 1, 0, TensorClass.TEMPORARY)),
        ((1.0, 1.0), Allocation("t", -1, 0, 1, TensorClass.TEMPORARY)),
    ],
)
def test_iterations_that_cannot_be_are_refused(
    kernel_seconds: tuple[float, ...], row: Allocation | None
) -> None:
    with pytest.raises(ConfigError, match="must have"):
        Iteration("", kernel_seconds, () if row is None else (row,))
