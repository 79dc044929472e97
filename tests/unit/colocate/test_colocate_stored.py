"""Lifespans in files, and the limit of segments in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.record_files import edit

from trainmux.colocate._demand import JobDemand, MicroBatchLane, Segment
from trainmux.colocate._job_state import JobReport
from trainmux.colocate._stored import (
    LifespanFolder,
    StoredLifespans,
    lifespans_of,
)
from trainmux.errors import PlanError
from trainmux.ir import load, save

DEMAND = JobDemand("job", "abc", 1, 0, (Segment(1, 5, 2, 1.0), Segment(1, 2, 0, 1.0)))
REPORT = JobReport("job", 3, 0.0, 0, (0.1, 1 / 3), (0.2, 0.5), 4, is_measured=True)


def kept_lifespans() -> StoredLifespans:
    return lifespans_of(DEMAND, REPORT, device="some GPU", step_seconds=[0.4])


def test_what_was_learned_comes_back_exactly(tmp_path: Path) -> None:
    kept = kept_lifespans()
    save(tmp_path / "job.json", kept)
    assert load(tmp_path / "job.json", StoredLifespans) == kept
    known = kept.apply(DEMAND)
    assert known.is_measured
    assert known.in_flight_limit == 4
    assert [segment.solo_seconds for segment in known.segments] == [0.1, 1 / 3]
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


@pytest.mark.parametrize(
    "other",
    [
        replace(DEMAND, fingerprint="abd"),
        replace(DEMAND, region_bytes=1, segments=(Segment(1, 5, 0, 1.0),)),
        replace(DEMAND, segments=(Segment(1, 6, 2, 1.0), Segment(1, 2, 0, 1.0))),
        replace(DEMAND, segments=(Segment(2, 5, 2, 1.0), Segment(1, 2, 0, 1.0))),
    ],
)
def test_lifespans_of_another_job_are_refused(other: JobDemand) -> None:
    with pytest.raises(PlanError, match="profile the job again"):
        kept_lifespans().apply(other)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    save(path, kept_lifespans())
    text = path.read_text()
    for damaged in (text[:-20], text.replace("0.1", "0.2"), text.replace("lifespans", "plan")):
        path.write_text(damaged)
        with pytest.raises(PlanError, match="profile the job again"):
            load(path, StoredLifespans)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heights", [1.5, 2]),
        ("solo_seconds", [1.0]),
        ("shared_seconds", [1.0, -1.0]),
        ("step_seconds", "1"),
        ("step_seconds", [0.0]),
        ("fingerprint", 7),
        ("device", None),
        ("solo_seconds", [10**400, 1.0]),
        ("step_seconds", [1e300]),
        ("num_kernels", [1, 1, 1]),
        ("in_flight_limit", 0),
        ("in_flight_limit", 10**6),
        ("in_flight_limit", 2.0),
    ],
)
def test_whole_files_of_the_wrong_types_are_refused(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "job.json"
    save(path, kept_lifespans())
    edit(path, [field], value)
    with pytest.raises(PlanError, match="profile the job again"):
        load(path, StoredLifespans)


def test_a_slow_first_iteration_is_not_kept() -> None:
    slow = replace(REPORT, solo_seconds=(7.0, 1 / 3))
    assert lifespans_of(DEMAND, slow, device="some GPU").solo_seconds == (0.2, 1 / 3)


def test_a_segment_that_took_no_time_can_be_kept(tmp_path: Path) -> None:
    report = replace(REPORT, solo_seconds=(0.0, 1.0))
    save(tmp_path / "job.json", lifespans_of(DEMAND, report, device="some GPU"))
    assert load(tmp_path / "job.json", StoredLifespans).solo_seconds[0] > 0


def test_a_folder_has_what_was_learned_of_jobs_on_its_device(tmp_path: Path) -> None:
    folder = LifespanFolder(tmp_path / "new" / "one", "some GPU")
    assert folder.get(DEMAND) is None
    folder.put(DEMAND, REPORT, [0.4])
    assert folder.get(DEMAND) == kept_lifespans()
    assert LifespanFolder(tmp_path / "new" / "one", "another").get(DEMAND) is None
    assert folder.get(replace(DEMAND, fingerprint="abd")) is None
    assert folder.get(replace(DEMAND, micro_batches=MicroBatchLane("job", 0, 2, 4, 1))) is None
    one_cut = replace(DEMAND, segments=(Segment(2, 5, 0, 1.0),))
    assert folder.get(one_cut) == kept_lifespans()  # which says how to cut it
    (file,) = (tmp_path / "new" / "one").iterdir()
    file.write_text(file.read_text()[:-30])
    assert folder.get(DEMAND) is None
    folder.put(DEMAND, REPORT, [0.4])
    assert folder.get(DEMAND) == kept_lifespans()
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    LifespanFolder(in_the_way, "some GPU").put(
        DEMAND, REPORT, [0.4]
    )  # the job is profiled again, that is all
