"""Bytes in use after each instruction, by class: worked examples and refusals."""

from __future__ import annotations

import pytest

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Compute,
    DeviceFacts,
    Free,
    MemoryPoint,
    Part,
    Phase,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Recompute,
    Tenancy,
)
from trainmux.planning._memory import live_bytes, memory, peak_live_bytes


def profile(*classes: ByteClass) -> Profile:
    return Profile(
        "classes",
        "analytic",
        1,
        DeviceFacts("a test's device", 1, 1),
        tuple(ProfiledTensor(c.value, c, 1, 0.0, 0.0, 0.0, 0.0) for c in classes),
        (ProfiledNode("node", Phase.FORWARD, (), (), (), 1.0),),
    )


PARAMETER, MAP, RESULT = ByteClass.PARAMETER, ByteClass.FEATURE_MAP, ByteClass.RESULT
PROFILES = [profile(PARAMETER, MAP), profile(MAP, RESULT)]
PART = Part(
    (Compute(0, 0), Compute(1, 0), Free(0, 1), Recompute(0, 0, ()), Compute(1, 0)),
    (
        Tenancy(0, 0, -1, 5, 0, 1000),  # a parameter, always there
        Tenancy(0, 1, 0, 2, 1000, 300),  # a feature map, from the first node to its free
        Tenancy(1, 0, 1, 5, 1300, 40),  # another, left behind
        Tenancy(0, -1, 0, 0, 1340, 7),  # a workspace of the first node
        Tenancy(0, 1, 3, 3, 1340, 300),  # what the recompute throws away
        Tenancy(0, -1, 3, 3, 1640, 2),  # and its workspace
        Tenancy(1, 1, 4, 5, 1000, 6),
    ),
)


def test_bytes_by_class_and_of_the_instruction_itself() -> None:
    assert memory(PART, PROFILES) == (
        MemoryPoint(0, ((PARAMETER, 1000), (MAP, 300)), 7),
        MemoryPoint(1, ((PARAMETER, 1000), (MAP, 340)), 0),
        MemoryPoint(2, ((PARAMETER, 1000), (MAP, 40)), 0),
        MemoryPoint(3, ((PARAMETER, 1000), (MAP, 40)), 302),
        MemoryPoint(4, ((PARAMETER, 1000), (MAP, 40), (RESULT, 6)), 0),
    )


def test_all_classes_together() -> None:
    assert live_bytes(PART) == [1307, 1340, 1040, 1342, 1046]
    assert peak_live_bytes(PART) == 1342
    totals = [sum(n for _, n in p.bytes_by_class) + p.workspace_bytes for p in memory(PART, PROFILES)]
    assert totals == live_bytes(PART)


def test_what_is_there_before_the_first_instruction_counts() -> None:
    first = Part((Free(0, 1),), (Tenancy(0, 1, -1, 0, 0, 50),))
    assert (live_bytes(first), peak_live_bytes(first)) == ([0], 50)
    empty = Part((), (Tenancy(0, 0, -1, 0, 0, 9),))
    assert (memory(empty, PROFILES), live_bytes(empty), peak_live_bytes(empty)) == ((), [], 9)
    assert peak_live_bytes(Part((), ())) == 0


@pytest.mark.parametrize(("begin", "end"), [(-2, 0), (1, 0), (0, 2), (-1, -1), (1, 1)])
def test_tenancies_outside_of_the_part_are_refused(begin: int, end: int) -> None:
    part = Part((Compute(0, 0),), (Tenancy(0, 1, begin, end, 0, 5),))
    with pytest.raises(PlanError, match=f"got {begin} to {end}"):
        live_bytes(part)
    with pytest.raises(PlanError, match=f"got {begin} to {end}"):
        memory(part, PROFILES)


@pytest.mark.parametrize(("sub_array", "tensor"), [(2, 0), (0, 2), (0, -1)])
def test_tenancies_of_unknown_tensors_are_refused(sub_array: int, tensor: int) -> None:
    with pytest.raises(PlanError, match=f"tensor {tensor} of sub-array {sub_array}"):
        memory(Part((Compute(0, 0),), (Tenancy(sub_array, tensor, 0, 1, 0, 5),)), PROFILES)
