"""``python -m benchmarks zico``: what is measured, that it resumes, and what is drawn from results."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.__main__ import app
from typer.testing import CliRunner

import trainmux as tm

pytest.importorskip("matplotlib", reason="needs the extra of the benchmarks")
pytest.importorskip("pandas", reason="needs the extra of the benchmarks")

from benchmarks.resumable import find_tasks
from benchmarks.zico import cases, cells, colocated
from benchmarks.zico.figures import FIGURES
from benchmarks.zico.jobs import BenchJob, ZicoOptions
from benchmarks.zico.page import refresh
from benchmarks.zico.tables import gains

REPOSITORY = Path(__file__).resolve().parents[3]
COMMITTED = REPOSITORY / "benchmarks" / "results" / "zico_h200.json"
PAGE = REPOSITORY / "docs" / "zico.md"
OPTIONS = ZicoOptions("cpu", "aten", "fp32", 0.02, 2)
QUICK = ("--sizes", "small", "--device", "cpu", "--precision", "fp32", "--seconds", "0.02", "--counted", "2")
OTHERS = ("processes", "several", "micro_batches")
"""Cells like those of the figures; some of them start processes."""
EQUAL, DIFFERENT = "small:mlp+small:mlp", "small:mlp+small:mlp/2"


def invoke(out: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["zico", *QUICK, "--out", str(out), *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def document_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rows(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["experiment"], row["jobs"], row["way"]): row for row in document_in(path)["rows"]}


@pytest.mark.usefixtures("built_once")
def test_every_figure_is_measured_resumed_and_drawn(tmp_path: Path) -> None:
    out, page = tmp_path / "zico.json", Path(shutil.copy(PAGE, tmp_path / "zico.md"))
    figures = [name for name in cells.FIGURES if name not in OTHERS]
    assert "\n0 cells are left" in invoke(out, "--only", ",".join(figures))
    found = rows(out)
    for jobs in (EQUAL, DIFFERENT):
        ways = {way: row for (_, names, way), row in found.items() if names == jobs and "error" not in row}
        tight = ways[colocated.excess_way(1.8)]
        whole = ways[colocated.ALL_MEMORY]
        assert whole["budget_bytes"] == sum(whole["local_bytes"] + whole["peak_bytes"])
        assert tight["smallest_budget_bytes"] <= tight["budget_bytes"] < whole["budget_bytes"]
        assert min(rate for row in ways.values() for rate in row.get("iterations_per_second", [1])) > 0
        for row in ways.values():
            for _, *held in row.get("samples") or []:
                assert sum(held) <= row["budget_bytes"]
    high, low, again = (found["train", EQUAL, way] for way in colocated.CHANGES)
    assert high["budget_bytes"] == again["budget_bytes"] > low["budget_bytes"]
    assert low["change"]["in_force_after_seconds"] > 0
    memory = found["memory", "small:mlp", cells.ITERATION]
    assert 0 < memory["lowest_bytes"] < memory["peak_bytes"] == max(size for _, size in memory["curve"])
    maps, others = memory["lifespans"].values()
    assert maps["mean_seconds"] > others["mean_seconds"] > 0
    fine, none = (found["tracking", "small:mlp", way] for way in (cells.EVERY_KERNEL, cells.NO_TRACKING))
    assert fine["num_segments"][0] > none["num_segments"][0]
    assert "expected a CUDA device" in found["train", EQUAL, cells.UNLIMITED]["error"]

    before = out.read_text(encoding="utf-8")
    assert invoke(out, "--only", ",".join(figures), "--page", str(page)).startswith("0 cells are left")
    assert out.read_text(encoding="utf-8") == before
    text = page.read_text(encoding="utf-8")
    assert "\nNot measured.\n" not in text.replace("<!-- zico: lifespans -->\nNot measured.", "")
    assert {path.stem for path in (tmp_path / "zico").iterdir()} == set(FIGURES)
    for path in (tmp_path / "zico").iterdir():
        ElementTree.parse(path)
        assert f"](zico/{path.name})" in text


@pytest.mark.extensive
@pytest.mark.usefixtures("built_once")
def test_more_jobs_and_processes_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "zico.json"
    invoke(out, "--only", "several,micro_batches")
    found = rows(out)
    for (_, jobs, way), row in found.items():
        if way == colocated.ALL_MEMORY:
            assert len(row["iterations_per_second"]) == len(jobs.split("+"))
    invoke(out, "--only", "processes", "--ways", "two processes, eager,two processes, graphs")


def test_what_time_cuts_off_is_left_and_listed(tmp_path: Path) -> None:
    out = tmp_path / "zico.json"
    assert "cells are left" in invoke(out, "--only", "figure_8", "--time-limit", "0")
    assert not out.exists()
    listed = invoke(out, "--only", "figure_6", "--list").splitlines()
    assert listed == [f"  0 train: {EQUAL}, alone", f"  0 train: {EQUAL}, co-located, all memory"]


@pytest.mark.usefixtures("built_once")
def test_a_failing_way_is_recorded_retried_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(colocation: tm.Colocation, budget: int) -> None:
        raise RuntimeError("the device is busy")

    out, only = tmp_path / "zico.json", ("--only", "figure_8")
    with monkeypatch.context() as patch:
        patch.setattr(tm.Colocation, "set_budget", fail)
        assert "Traceback" in invoke(out, *only)
    found = {way: row for (_, _, way), row in rows(out).items()}
    for way in cells.TIGHT:
        assert found[way]["error"] == "RuntimeError: the device is busy"
        assert "detail" not in found[way]
    assert min(found[cells.EAGER_TEMPORAL]["iterations_per_second"]) > 0
    assert invoke(out, *only).startswith("0 cells are left")
    invoke(out, *only, "--retry")
    assert all("error" not in rows(out)["train", DIFFERENT, way] for way in cells.TIGHT)


def test_a_page_without_results_draws_nothing_and_unknown_parts_are_refused(tmp_path: Path) -> None:
    document = document_in(COMMITTED)
    assert {row["run"] for row in document["rows"]} == set(range(len(document["runs"])))
    copied = Path(shutil.copy(PAGE, tmp_path / "zico.md"))
    assert refresh({"runs": [], "rows": []}, copied) == [copied]  # nothing to draw from
    assert gains(document).loc["nasnet+gnmt", "all"] > 1
    copied.write_text("<!-- zico: nothing -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a part among"):
        refresh(document, copied)


def test_budgets_never_fall_below_the_smallest_that_can_work() -> None:
    ways = [colocated.ALL_MEMORY, *cells.TIGHT, *colocated.CHANGES]

    def sizes(smallest: int) -> list[int]:
        return [phase.budget_bytes for phase in colocated.budget_phases(100, smallest, ways, samples=False)]

    assert sizes(40) == [100, 76, 55, 70, 50, 70]
    assert sizes(80) == [100, 80, 80, 90, 80, 90]


def test_the_six_models_make_21_pairs_and_those_of_figure_8_come_first() -> None:
    tasks = find_tasks(cells.FIGURES, cells.PAPER_SIZES, list(cells.FIGURES))
    flat = [cell for task in tasks for cell in task]
    assert len(set(flat)) == len(flat)
    assert all(len({cell.process for cell in task}) == 1 for task in tasks)
    trained = dict.fromkeys(cell.jobs for cell in flat if cell.way == colocated.ALL_MEMORY)
    usual = [jobs for jobs in trained if jobs.count("+") == 1 and set(jobs.split("+")) <= set(cases.MODELS)]
    assert len({frozenset(jobs.split("+")) for jobs in usual}) == len(usual) == 21
    assert usual[:4] == ["rhn+gnmt", "nasnet+gnmt", "bert+gnmt", "nasnet+resnet110"]
    for cell in flat:
        for name in cell.names:
            cases.find_zico_case(name)
    looked_at = {cell.jobs for cell in flat if cell.way == cells.ITERATION}
    assert looked_at == {cell.jobs for cell in flat if cell.experiment == "tracking"} == set(cases.MODELS)


def test_names_stand_for_sizes() -> None:
    larger = cases.find_zico_case("rhn@7/2")
    assert larger.batch(0)[0].shape == (7, 8)
    assert "7 rows" in larger.note
    assert cases.batches_per_update("rhn@7/2") == 2
    assert cases.find_zico_case("rhn35").batch(0)[0].shape[1] == 35
    layers = [m for m in cases.CifarResNet().modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) - 2 == 110  # besides two 1x1 convolutions on shortcuts
    batch = cases.find_zico_case("gnmt").batch(0)
    assert (batch["source"].shape, batch["target"].shape) == ((256, 16), (256, 17))


@pytest.mark.usefixtures("built_once")
@pytest.mark.parametrize("name", ["small:rhn", "small:mlp/2"])
def test_a_model_trains_alike_fused_and_in_plain_torch(name: str) -> None:
    job = BenchJob(name, 0, OPTIONS)
    plain = BenchJob(name, 0, OPTIONS)
    model = plain.case.build(0).train()
    step = plain.eager_step()
    losses = [plain.case.loss(model, batch).item() for batch in plain.batches]
    assert job.fleet.step(job.batches[0]).item() == pytest.approx(losses[0], rel=1e-4)
    step(0)
    assert job.fleet.step(job.batches[1]).item() == pytest.approx(losses[1], rel=1e-2)
