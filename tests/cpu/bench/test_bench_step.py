"""``trainmux bench step`` from end to end, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.bench import runner
from benchmarks.bench.environment import probe
from benchmarks.bench.record import read_records
from typer.testing import CliRunner

from trainmux.cli._app import app

REPOSITORY = Path(__file__).resolve().parents[3]
WAYS = ["eager", "compiled_graph", "eager_vmap", "trainmux"]


@dataclass(frozen=True)
class Run:
    output: str
    out: Path
    plot: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("bench")
    out, plot = folder / "step.json", folder / "step.svg"
    arguments = ["--workloads", "small:mlp", "--ways", ",".join(WAYS), "--widths", "2", "--device", "cpu"]
    arguments += ["--steps-seconds", "0.02", "--blocks", "5", "--out", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["bench", "step", *arguments])
    assert result.exit_code == 0, result.output
    return Run(result.output, out, plot)


@pytest.mark.slow
def test_every_way_is_recorded_with_all_that_repeats_it(run: Run) -> None:
    records = read_records(run.out)
    assert [record.way for record in records] == WAYS
    for record in records:
        assert (record.workload, record.batch_size, record.width) == ("small:mlp", 4, 2)
        assert record.environment["torch"] == torch.__version__
        assert len(record.environment["source_sha256"]) == 64
        assert record.date.endswith("+00:00")
        assert "--workloads small:mlp --ways eager,compiled_graph,eager_vmap,trainmux" in record.command
        assert record.settings["num_blocks"] == 5
    for record in records:
        if record.way == "compiled_graph":
            continue
        assert record.error is None, record.detail
        assert record.measurement is not None
        timing = record.measurement.timing
        assert len(timing.block_ms) == 5
        assert 0 < timing.min_ms <= timing.lower_quartile_ms <= timing.median_ms
        assert timing.median_ms <= timing.upper_quartile_ms <= timing.max_ms
        assert 0 < timing.build_s <= timing.start_to_first_step_s
        assert timing.num_members == 2


@pytest.mark.slow
def test_a_way_that_fails_is_recorded_and_the_others_go_on(run: Run) -> None:
    failed = {record.way: record.error for record in read_records(run.out) if record.measurement is None}
    assert failed == {"compiled_graph": "needs a CUDA device"}
    assert "compiled_graph: failed: needs a CUDA device" in run.output


@pytest.mark.slow
def test_the_table_has_times_speedups_and_their_means(run: Run) -> None:
    assert "Milliseconds per member and step" in run.output
    assert "How many times faster trainmux is than each" in run.output
    assert "geometric mean" in run.output


@pytest.mark.slow
def test_the_chart_is_well_formed(run: Run) -> None:
    assert ElementTree.parse(run.plot).getroot().tag.endswith("svg")


@pytest.mark.slow
def test_a_report_is_made_from_a_run(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = CliRunner().invoke(app, ["bench", "report", str(run.out), "--markdown", str(page)])
    assert result.exit_code == 0, result.output
    assert "| small:mlp (batch 4, width 2) |" in page.read_text(encoding="utf-8")


def options(tmp_path: Path, **changes: object) -> runner.Options:
    settings: dict[str, object] = {
        "workloads": ["small:mlp"],
        "ways": ["compiled_graph"],
        "widths": [2, 4],
        "device": "cpu",
        "out": tmp_path / "out.json",
    }
    return runner.Options(**{**settings, **changes})  # type: ignore[arg-type]


def test_a_process_that_takes_too_long_is_ended_and_recorded(tmp_path: Path) -> None:
    records = runner.run(options(tmp_path, ways=["eager"], widths=[2], time_limit_s=0.2))
    assert records[0].error == "no result within the time limit of 0.2 s"
    assert read_records(tmp_path / "out.json") == records


def test_a_process_that_dies_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    records = runner.run(options(tmp_path, ways=["eager"], widths=[2]))
    assert records[0].error == "the process ended with status 1 and no result"
    assert runner._how_it_ended(-9, 1.0) == "the process was ended by signal SIGKILL"


def test_records_are_written_one_by_one(tmp_path: Path) -> None:
    counts: list[int] = []
    out = tmp_path / "out.json"
    runner.run(options(tmp_path), tell=lambda record: counts.append(len(json.loads(out.read_text()))))
    assert counts == [1, 2]


def test_a_way_that_is_the_same_at_any_width_is_measured_once(tmp_path: Path) -> None:
    first, second = runner.run(options(tmp_path))
    assert (first.width, second.width) == (2, 4)
    assert first.notes == ()
    assert second.notes == ("measured once, at width 2: the same at any",)


def test_variants_add_to_the_arguments_of_every_fleet(tmp_path: Path) -> None:
    chosen = options(
        tmp_path, ways=["eager", "trainmux"], fleet={"engine": "reference"}, variants={"a": {"accumulate": 2}}
    )
    assert chosen.labels == {
        "eager": {},
        "trainmux": {"engine": "reference"},
        "trainmux:a": {"engine": "reference", "accumulate": 2},
    }
    assert """--fleet '{"engine": "reference"}' --variant 'a={"accumulate": 2}'""" in chosen.command()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "small:nothing"], "small:mlp"),
        (["--ways", "eager,magic"], "compiled_vmap_graph"),
        (["--ways", "eager@many"], "NAME@WIDTH"),
        (["--widths", "two"], "whole numbers"),
        (["--widths", "0"], "whole numbers"),
        (["--fleet", "[1]"], "JSON object"),
        (["--fleet", "{"], "JSON object"),
        (["--fleet", '{"engine": "reference"}', "--ways", "eager"], "leaves out"),
        (["--variant", "name"], "NAME=JSON"),
        (["--variant", "a:b={}"], "without"),
        (["--workloads", "small:mlp", "--batch-size", "5"], "batches of 4 only"),
        (["--blocks", "0"], "blocks"),
        (["--device", "tpu"], "device"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "step", "--out", str(tmp_path / "x.json"), *arguments], terminal_width=1000
    )
    assert result.exit_code == 2
    assert said in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_missing_gpu_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "step", "--device", "cuda"], terminal_width=200)
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_the_environment_is_described() -> None:
    found = probe("cpu")
    assert found["device"].startswith("CPU")
    assert found["num_threads"] >= 1
    assert json.loads(json.dumps(found)) == found


def test_the_script_is_the_command() -> None:
    script = REPOSITORY / "benchmarks" / "step_time.py"
    result = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--steps-seconds" in result.stdout
