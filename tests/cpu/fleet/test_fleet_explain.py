"""What a fleet tells about itself."""

from __future__ import annotations

import pytest
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    adam_member,
    dropout_member,
    mse,
    sgd_member,
)

from trainmux import Fleet


def mixed() -> Fleet:
    return Fleet([dropout_member(0), sgd_member(1), dropout_member(2)], mse, EXAMPLE)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    """For tests that only look."""
    return mixed()


def test_every_group_and_every_operator_is_listed(fleet: Fleet) -> None:
    text = fleet.explain()
    first, second = text.split("\n\n")
    assert first.startswith("group 0: 2 of 2 slots taken (m0, m2)\n  optimizer Adam; ")
    assert second.startswith("group 1: 1 of 1 slots taken (m1)\n  optimizer SGD; ")
    for block, group in zip((first, second), fleet.summary(), strict=True):
        assert group.num_nodes > len(group.records) > 5
        assert f"{group.num_nodes} nodes" in block
        lines = block.splitlines()
        for record in group.records:
            assert record.how
            fitting = [line for line in lines if line.split()[:1] == [record.op] and record.how in line]
            assert any(line.endswith(f"x{record.count}") for line in fitting)
        assert lines[-1] == "  nothing fell back"
    ops = {record.op: record.how for record in fleet.summary()[0].records}
    assert ops["aten.addmm.default"] == "bmm"
    assert "batch_norm" in " ".join(ops)


def test_the_text_is_the_same_every_time(fleet: Fleet) -> None:
    """In another fleet, and after training, evaluation and a sync."""
    other = mixed()
    assert other.explain() == fleet.explain()
    for batch in BATCHES[:2]:
        other.step(batch)
    other.evaluate([EXAMPLE])
    other.sync()
    assert other.explain() == fleet.explain()
    other.drop("m0")
    assert other.explain().startswith("group 0: 1 of 2 slots taken (m2)")


def test_many_members_are_cut_short() -> None:
    fleet = Fleet([adam_member(i) for i in range(8)], mse, EXAMPLE)
    assert "8 of 8 slots taken (m0, m1, m2, m3, m4, m5 and 2 more)" in fleet.explain()
