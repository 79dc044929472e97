"""``python -m benchmarks`` on tiny workloads: each command measures and writes what it claims to."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from benchmarks import zoo
from benchmarks.__main__ import app
from benchmarks.cases import find_case
from benchmarks.processes import guarded, in_turns, isolated
from benchmarks.step import StepJob, measure
from benchmarks.ways import WAYS, Setup
from turn_work import begin_and_go_on
from typer.testing import CliRunner

import trainmux as tm

REPOSITORY = Path(__file__).resolve().parents[3]
QUICK = ["--device", "cpu", "--block-seconds", "0.01"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text(encoding="utf-8"))
    (made,) = document["runs"]
    assert made["command"].startswith("python -m benchmarks")
    assert {"date", "device", "torch", "python"} <= made.keys()
    return document["rows"]


def test_step_measures_every_way_keeps_other_rows_and_reports_them(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    out = tmp_path / "step.json"
    words = ["step", "--workloads", "small:mlp", "--blocks", "1", *QUICK, "--out", str(out)]
    run(*words, "--widths", "2")
    found = rows(out)
    assert [row["way"] for row in found] == ["eager", "eager_vmap", "trainmux"]
    for row in found:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["first_losses"] == pytest.approx(found[0]["first_losses"], rel=0.02)
    run(*words, "--widths", "2,1", "--ways", "eager", "--at-once", "2", "--kernels", "3")
    document = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["way"], row["width"], row["run"]) for row in document["rows"]] == [
        *(("eager_vmap", 2, 0), ("trainmux", 2, 0), ("eager", 2, 1), ("eager", 1, 1))
    ]
    assert [row["built_beside"] for row in document["rows"]] == [0, 0, 1, 1]
    shown = run("report", str(out), "--chart", str(tmp_path / "step.svg"))
    assert "How many times faster trainmux is" in shown
    assert "Kernels of 2 × small:mlp, batch 4, eager" in shown
    for row in document["rows"][2:]:
        times = [kernel["ms"] for kernel in row["kernels"][:-1]]
        assert times == sorted(times, reverse=True)
        assert 0 < times[-1] < times[0] < 100 * row["max_ms"]
    assert "<svg" in (tmp_path / "step.svg").read_text(encoding="utf-8")


UNKNOWN = {
    "step": ["--ways mps", "--workloads resnet1001", "--at-once 0"],
    "mutwo": ["--only figure_4", "--sizes huge"],
    "zico": ["--only figure_4", "--sizes huge"],
}


@pytest.mark.parametrize(("command", "words"), [(name, words) for name in UNKNOWN for words in UNKNOWN[name]])
def test_what_is_unknown_is_refused(command: str, words: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert CliRunner().invoke(app, [command, *words.split(), "--device", "cpu", "--out", out]).exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("built_once")
def test_stacked_members_train_as_they_do_one_by_one() -> None:
    """The baselines do the same work: after a few steps all have the same losses, to bf16's precision."""
    case = find_case("small:cnn")
    last = {}
    for way in ("eager", "eager_vmap", "trainmux"):
        step, _ = WAYS[way].prepare(Setup(case.models(3), case.loss, case.batch(0), torch.device("cpu")))
        last[way] = [step(case.batch(0)).clone() for _ in range(4)][-1].float()
    for way in ("eager_vmap", "trainmux"):
        torch.testing.assert_close(last[way], last["eager"], rtol=0.02, atol=0.02)


def fail(error: BaseException) -> dict[str, Any]:
    raise error


def test_what_fails_in_its_process_is_recorded() -> None:
    assert guarded(fail, ValueError("no good\nmore"))["error"] == "ValueError: no good"
    assert "status 3" in isolated(sys.exit, 3)["error"]  # whose module is there at once


def test_processes_that_take_turns_fail_alone() -> None:
    """Those that were built while another hung or died are measured, and beside nothing that still runs."""
    jobs = [((what,), {}) for what in ("works", "hangs", "is killed while it waits", "works")]
    found = in_turns(begin_and_go_on, jobs, limit_s=4)
    done = [{"begun": "works"}, {"done": "works"}]
    assert next(found) == done
    assert len(active_children()) == 1
    (slow,), (begun, killed), last = found
    assert slow == {"error": "no result within 4 s"}
    assert (begun, killed["error"]) == (
        {"begun": "is killed while it waits"},
        "the process ended with status -9 and no result",
    )
    assert last == done


def test_an_interruption_ends_processes_that_wait_for_their_turn() -> None:
    found = in_turns(begin_and_go_on, [((what,), {}) for what in ("hangs", "works")], limit_s=60)
    Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(found)
    assert not active_children()


@pytest.mark.extensive
def test_processes_train_at_the_same_time() -> None:
    (row,) = measure(StepJob("small:mlp", None, 2, "mps", "cpu", 1, 0.02))
    assert row["median_ms"] > 0
    assert row["first_losses"] != row["last_losses"]


@pytest.mark.usefixtures("built_once")
def test_plans_are_predicted_and_measured(tmp_path: Path) -> None:
    out = tmp_path / "plans.json"
    words = ["plans", "--workloads", "small:mlp", "--shares", "1/2,2s", "--policies", "none"]
    words += ["--out", str(out)]
    run(*words, "--members", "2", "--blocks", "1", *QUICK)
    unplanned, whole, half, twice = rows(out)
    assert (unplanned["policy"], whole["policy"], half["policy"]) == ("no plan", "none", "none")
    assert min(whole["step_ms"], whole["predicted_ms"], whole["profiling_s"]) > 0
    assert 0 <= whole["first_plan_s"] < whole["planning_s"] - whole["profiling_s"]
    assert half["budget_bytes"] < whole["predicted_bytes"]
    assert twice["budget_bytes"] == 2 * whole["static_bytes"]
    # So small a model may not fit: then the row has the reason.
    assert "smallest that works" in half["error"] if "error" in half else half["step_ms"] > 0
    out.unlink()
    run(*words, "--members", "3", "--device", "a100-40gb")  # predicted only
    whole, half, _ = rows(out)
    assert "step_ms" not in whole
    assert half["width"] == 3


def test_overhead_compares_two_trees(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    words = ["--workloads", "small:mlp", "--members", "2", "--rounds", "2", "--block-steps", "3"]
    run("overhead", "--other", str(REPOSITORY / "src"), *words, "--device", "cpu", "--out", str(out))
    (row,) = rows(out)
    assert 0.1 < row["step_us_ratio"] < 10


@pytest.mark.parametrize(
    "name", ["classic:dqn", pytest.param("transformers:bert", marks=pytest.mark.extensive)]
)
def test_zoo_judges_models_against_plain_torch(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "zoo.json"
    models = f"{name},timm:resnet26"
    run("zoo", "--models", models, "--members", "2", "--device", "cpu", "--out", str(out))
    found = {row["model"]: row for row in rows(out)}
    assert found[name]["verdict"] == "right", found[name]
    assert found[name]["loss_error"] < 1e-12
    assert found[name]["update_error"] < 1e-9
    assert found["timm:resnet26"]["verdict"] == "absent"
    page = tmp_path / "zoo.md"
    page.write_text((REPOSITORY / "docs" / "zoo.md").read_text())
    run("zoo", "--read", str(out), "--page", str(page))
    lines = page.read_text().splitlines()
    assert any(line.startswith("| all ") for line in lines)
    assert "None." in lines
    page.write_text("<!-- zoo: charts -->\n<!-- end -->")
    with pytest.raises(ValueError, match="charts"):
        zoo.refresh(json.loads(out.read_text()), page)


@pytest.mark.extensive
@pytest.mark.parametrize("name", ["ibert", "jetmoe", "led", "reformer"])
def test_zoo_tries_the_remedy_of_a_refusal(name: str) -> None:
    pytest.importorskip("transformers")
    row = zoo.measure(f"transformers:{name}", 2, "cpu")
    assert (row["verdict"], row["with_remedy"]) == ("refused", "right"), row


@pytest.mark.slow
def test_zoo_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    out = tmp_path / "zoo.json"
    models = ("classic:vae", "classic:gan_pair", "classic:diffusion", "classic:dqn")
    words = ["zoo", "--members", "1", "--device", "cpu", "--out", str(out), "--models", ",".join(models)]

    def measured() -> list[str]:
        if not out.exists():
            return []
        return [row["model"] for row in json.loads(out.read_text(encoding="utf-8"))["rows"]]

    ended_at = []

    def end(number: int, num_rows: int) -> None:
        while len(measured()) < num_rows:
            time.sleep(0.01)
        ended_at.append(time.monotonic())
        os.kill(os.getpid(), number)

    for number, num_rows in ((signal.SIGINT, 1), (signal.SIGTERM, 2)):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(end, number, num_rows)
            assert CliRunner().invoke(app, [*words, "--processes", "2"]).exit_code != 0
        assert time.monotonic() - ended_at.pop() < 5
        assert not active_children()
        assert num_rows <= len(measured()) < len(models)
    kept = measured()
    assert f"{len(models) - len(kept)} models are left" in run(*words, "--time-limit", "0")
    assert measured() == kept
    first, *others = kept
    words[-1] = ",".join(kept)
    assert "\n0 models are left" in run(*words, "--retry", "wrong,failed")
    assert measured() == kept
    words[-1] = first
    assert "1 right\n0 models are left" in run(*words, "--retry", "right")
    assert measured() == [*others, first]


@pytest.mark.extensive
def test_adapters_train_on_one_base_in_every_way(tmp_path: Path) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    out = tmp_path / "adapters.json"
    words = ["--size", "tiny", "--adapters", "3x2x8", "--ranks", "2,4", "--block-seconds", "0.01"]
    run("adapters", *words, "--device", "cpu", "--out", str(out))
    found = {row["way"]: row for row in rows(out)}
    assert found.keys() == {"trainmux", "compiled_graph", "ceiling"}
    for row in found.values():
        assert row["median_ms"] > 0
        assert row["first_losses"] != row["last_losses"]


def test_zoo_has_enough_architectures_under_names_of_their_own() -> None:
    names = [architecture.name for architecture in zoo.ZOO]
    assert len(set(names)) == len(names) >= 150


def test_zoo_calls_wrong_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet on a batch of its own is far from plain torch, whose rounding is small."""
    step = tm.Fleet.step
    monkeypatch.setattr(tm.Fleet, "step", lambda self, batch: step(self, (batch[0] + 1e-3, *batch[1:])))
    row = zoo.measure("classic:dqn", 2, "cpu")
    assert row["verdict"] == "wrong"
    assert max(row["rounding"]) < 1e-9


def test_committed_results_say_how_they_were_made() -> None:
    found = sorted((REPOSITORY / "benchmarks" / "results").glob("*.json"))
    assert found
    for path in found:
        document = json.loads(path.read_text(encoding="utf-8"))
        if "benchmark" in document:
            assert all(run["command"] and run["date"] and run["torch"] for run in document["runs"]), path


def test_refill_times_steps_with_and_without_refills_and_the_parts_of_one(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    out = tmp_path / "refill.json"
    words = ["--models", "mlp", "--members", "2", "--steps-per-life", "4", "--lives", "1", "--rounds", "1"]
    shown = run("refill", *words, "--device", "cpu", "--out", str(out))
    assert "mlp, settings: " in shown
    found = rows(out)
    assert [(row["vary"], row["refills"]) for row in found] == [("settings", 2), ("numbers", 2)]
    for row in found:
        assert 0 < row["add_ms"] <= row["longest_add_ms"]
        assert min(row["plain_step_ms"], row["refilled_step_ms"], row["drop_ms"], row["prepare_ms"]) > 0
    assert "cost_percent" in run("report", str(out))
