"""``python -m benchmarks mutwo``: what is measured, that it resumes, and what is drawn from results."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import app
from benchmarks.mutwo import baselines, cells
from benchmarks.mutwo.cells import PAPER_SIZES, SMALL_SIZES
from benchmarks.processes import streamed
from benchmarks.resumable import find_tasks, pending
from typer.testing import CliRunner

import trainmux as tm

PAGE = Path(__file__).resolve().parents[3] / "docs" / "mutwo.md"
QUICK = ("--sizes", "small", "--device", "cpu", "--precision", "fp32", "--warmups", "2", "--measured", "2")
FIGURES = ("figure_8", "convergence", "figure_3", "footprint", "figure_9", "figure_7")
OTHERS = ("many", "adamw", "table_e", "others", "figure_8_v100")
"""Cells like those of the figures; some of them start processes and compile."""


def invoke(out: Path, *words: str) -> str:
    fixed = ("mutwo", *QUICK, "--plan-seconds", "1", "--out", str(out))
    result = CliRunner().invoke(app, [*fixed, *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {f"{row['experiment']} {row['way']} {row['budget']} {row['optimizer']}": row for row in found}


@pytest.mark.usefixtures("built_once")
def test_every_figure_is_measured_resumed_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, page = tmp_path / "mutwo.json", Path(shutil.copy(PAGE, tmp_path / "mutwo.md"))
    assert {*FIGURES, *OTHERS} == {*cells.FIGURES}
    said = invoke(out, "--only", ",".join(FIGURES))
    assert "\n0 cells are left" in said
    found = rows(out)
    for way in ("auto", "mutwo", "capuchin"):
        row = found[f"step {way} 2 sgd"]
        assert 0 < row["min_ms"] <= row["step_ms"] <= row["max_ms"]
        assert row["predicted_bytes"] <= row["budget_bytes"]
        assert row["watched_compute_ms"] > 0
        assert row["warmups"] == 2
    assert found["step hfta 2 sgd"]["subsets"] == [2]
    assert found["run auto 2 sgd"]["iterations"] == SMALL_SIZES.real
    assert found["run hfta 2 sgd"]["run_s"] > 0
    assert "smallest that works" in found["step auto 1/6 sgd"]["error"]
    timeline = found["timeline none all sgd"]
    assert all(idle > 0 for _, idle in timeline["idle"])
    assert max(map(sum, timeline["memory"])) > min(map(sum, timeline["memory"])) > 0
    alone, fleet, planned = (
        found[f"convergence {way} {budget} adamw"]
        for way, budget in zip(cells.CONVERGENCE_WAYS, ("all", "all", "tight"), strict=True)
    )
    assert len(alone["accuracy"]) == len(alone["steps"]) == SMALL_SIZES.text.steps
    for other in (fleet, planned):
        for each, expected in zip(other["accuracy"], alone["accuracy"], strict=True):
            assert each == pytest.approx(expected, abs=0.002)

    before = out.read_text(encoding="utf-8")
    assert invoke(out, "--only", "figure_8", "--page", str(page)).startswith("0 cells are left")
    assert out.read_text(encoding="utf-8") == before
    drawn = sorted((tmp_path / "mutwo").iterdir())
    assert [path.stem for path in drawn] == sorted(
        ["convergence", "figure_3ab", "figure_3c", "figure_7", "figure_8"]
        + [f"figure_9{part}" for part in "abcd"]
    )
    text = page.read_text(encoding="utf-8")
    for path in drawn:
        ElementTree.parse(path)
        assert f"](mutwo/{path.name})" in text
    assert "| 2 × small:mlp, batch 4 | 2 | 1 × 2 |" in text
    assert text.count("Not measured.") == 3  # the others


@pytest.mark.extensive
@pytest.mark.timeout(900)  # it compiles, and starts processes that do
def test_other_policies_ways_of_torch_and_processes_are_measured(tmp_path: Path) -> None:
    out, page = tmp_path / "mutwo.json", Path(shutil.copy(PAGE, tmp_path / "mutwo.md"))
    invoke(out, "--only", ",".join(OTHERS), "--page", str(page))
    found = rows(out)
    for way in ("none", "swap_only", "recompute_only", "mutwo_turns"):
        assert found[f"step {way} 2 sgd"]["predicted_bytes"] <= found[f"step {way} 2 sgd"]["budget_bytes"]
    assert found["step mps 2 sgd"]["at_once"] == 2
    assert found["step activation_budget 2 sgd"]["kept_share"] == baselines.KEPT_SHARES[0]
    assert min(row["step_ms"] for row in found.values()) > 0


def test_what_time_cuts_off_is_measured_by_the_next_run_and_results_are_merged(tmp_path: Path) -> None:
    out, other = tmp_path / "mutwo.json", tmp_path / "other.json"
    assert "cells are left" in invoke(out, "--only", "figure_7,convergence", "--time-limit", "0")
    assert not out.exists()
    invoke(out, "--only", "figure_3")
    listed = invoke(out, "--only", "figure_3,convergence", "--list").splitlines()
    assert [line.split()[-1] for line in listed] == ["one", "fleet", "fleet"]
    said = invoke(other, "--merge", str(out), "--only", "figure_3")
    assert said.startswith("0 cells are left")
    assert rows(other) == rows(out)


def test_cells_of_a_fleet_share_a_process_and_headlines_come_first() -> None:
    tasks = find_tasks(cells.FIGURES, PAPER_SIZES, list(cells.FIGURES))
    flat = [cell for task in tasks for cell in task]
    assert len(set(flat)) == len(flat)
    first = tasks[: 2 * len(PAPER_SIZES.subjects)]
    assert {cell.workload for task in first for cell in task} == {
        subject.workload for subject in PAPER_SIZES.subjects
    }
    assert {cell.way for task in first for cell in task} == {"auto", "capuchin", "mutwo", "hfta"}
    assert all(len({cell.process for cell in task}) == 1 for task in tasks)
    assert {cell.optimizer for cell in flat} == {"sgd", "adamw"}


@pytest.mark.usefixtures("built_once")
def test_a_cell_that_fails_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fleet: tm.Fleet, *arguments: Any, **settings: Any) -> None:
        raise RuntimeError("the device is busy")

    monkeypatch.setattr(tm.Fleet, "plan", fail)
    out = tmp_path / "mutwo.json"
    said = invoke(out, "--only", "adamw")
    assert "Traceback" in said
    failed, measured = rows(out)["step auto 2 adamw"], rows(out)["step hfta 2 adamw"]
    assert failed["error"] == "RuntimeError: the device is busy"
    assert "detail" not in failed
    assert measured["step_ms"] > 0


def test_failed_cells_are_repeated_only_where_that_is_asked_for() -> None:
    (tasks,) = [find_tasks(cells.FIGURES, SMALL_SIZES, ["adamw"])]
    failed = {**tasks[0][0].key, "error": "out of memory"}
    assert len(pending("mutwo", tasks, [failed], retry=False)) == len(tasks) - 1
    assert pending("mutwo", tasks, [failed], retry=True) == tasks


@pytest.mark.parametrize(("room", "members", "expected"), [(100, 64, 23), (100, 8, 8), (14, 8, 1), (9, 8, 0)])
def test_hfta_trains_subsets_that_fit_one_after_another(room: int, members: int, expected: int) -> None:
    tried = []

    def peak_of(width: int) -> int | None:
        tried.append(width)
        return None if 8 + 4 * width > room else 8 + 4 * width

    widest = baselines.find_widest(peak_of, members, room)
    assert widest == expected
    assert len(tried) <= 4
    if widest:
        assert sum(baselines.subsets(members, widest)) == members
        assert max(baselines.subsets(members, widest)) == widest


def fail_later(count: int) -> Any:
    for number in range(count):
        yield {"number": number}
    raise ValueError("no more")


@pytest.mark.extensive
def test_rows_of_a_process_that_fails_later_are_kept() -> None:
    *kept, last = streamed(fail_later, 2)
    assert kept == [{"number": 0}, {"number": 1}]
    assert last["error"] == "ValueError: no more"
    assert "no result within" in list(streamed(fail_later, 2, limit_s=0.0))[-1]["error"]
