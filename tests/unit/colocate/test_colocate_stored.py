"""Measured durations of jobs in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.record_files import edit

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._stored import LifespanFolder

DEMAND = JobDemand("job", "abc", 1, 0, (Segment(1, 5, 2, 1.0), Segment(1, 2, 0, 1.0)))
SOLO, SHARED = (7.0, 1 / 3), (0.2, 0.5)


@pytest.fixture
def folder(tmp_path: Path) -> LifespanFolder:
    made = LifespanFolder(tmp_path / "new" / "one", "some GPU")
    assert made.get(DEMAND) is None
    made.put(DEMAND, SOLO, SHARED, [0.4])
    return made


def test_durations_come_back_for_jobs_that_are_cut_alike(folder: LifespanFolder, tmp_path: Path) -> None:
    found = folder.get(DEMAND)
    assert found is not None
    assert found.step_seconds == (0.4,)
    known = found.apply(DEMAND)
    assert known.is_measured
    # A first iteration that was slower than all others is not kept.
    assert [segment.solo_seconds for segment in known.segments] == [0.2, 1 / 3]
    assert LifespanFolder(tmp_path / "new" / "one", "another").get(DEMAND) is None
    assert folder.get(replace(DEMAND, fingerprint="abd")) is None
    assert folder.get(replace(DEMAND, region_bytes=2)) is None
    for number, height in ((2, 5), (1, 6)):
        other = replace(DEMAND, segments=(Segment(number, height, 2, 1.0), Segment(1, 2, 0, 1.0)))
        assert folder.get(other) == found  # which says how to cut it
        assert found.apply(other) == other
    assert not found.apply(replace(DEMAND, segments=DEMAND.segments[:1])).is_measured


@pytest.mark.parametrize(("field", "value"), [("step_seconds", [1e9]), ("segments", [1])])
def test_damaged_files_are_not_used(
    folder: LifespanFolder, tmp_path: Path, field: str, value: object
) -> None:
    (path,) = (tmp_path / "new" / "one").iterdir()
    edit(path, [field], value)
    assert folder.get(DEMAND) is None
    folder.put(DEMAND, SOLO, SHARED, [0.4])
    assert folder.get(DEMAND) is not None


def test_where_nothing_can_be_written_the_job_is_profiled_again(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    LifespanFolder(in_the_way, "some GPU").put(DEMAND, SOLO, SHARED, [0.4])
    assert LifespanFolder(in_the_way, "some GPU").get(DEMAND) is None
