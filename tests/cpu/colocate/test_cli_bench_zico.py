"""``trainmux bench zico``: every way of a pair is measured and written down, whatever fails beside it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import benchmark_script
from benchmarks.bench import zico_processes, zico_run, zico_watch
from benchmarks.bench.job import BenchError
from benchmarks.bench.ways.processes import CONTROL, mps_daemon
from benchmarks.bench.zico import CHANGES, PairBench, budgets_of
from benchmarks.bench.zico_cases import (
    PAPER_NAMES,
    CifarResNet,
    machine_bytes,
    zico_case,
    zico_case_names,
)
from benchmarks.bench.zico_jobs import BenchJob, Failure, PairResult, WayResult, ZicoOptions
from benchmarks.bench.zico_plan import (
    FORMAT,
    ZicoPlan,
    all_pairs,
    parse_excesses,
    parse_pairs,
    parse_parts,
    table,
)
from benchmarks.bench.zico_processes import measure_in_processes
from benchmarks.bench.zico_watch import Stay
from typer.testing import CliRunner

from trainmux.cli._app import app
from trainmux.colocate._fused_work import FusedWork
from trainmux.errors import BudgetError

pytestmark = pytest.mark.usefixtures("built_once")

OPTIONS = ZicoOptions("cpu", "aten", "fp32", 0.05)
PAIR = ("small:mlp", "small:mlp")


@pytest.fixture(autouse=True)
def _few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted here, not timed."""
    monkeypatch.setattr(zico_watch, "_LEAST_COUNTED", 8)


def invoke(out: Path, *words: str) -> Any:
    fixed = [
        "bench",
        "zico",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--seconds",
        "0.05",
        "--out",
        str(out),
    ]
    return CliRunner().invoke(app, [*fixed, *words])


def run(out: Path, *, excesses: tuple[float, ...] = (1.01,), resumes: bool = False, **given: Any) -> Any:
    plan = ZicoPlan([PAIR], excesses, ["pairs"], **given)
    return zico_run.run_zico(plan, OPTIONS, out=out, resumes=resumes, tell=lambda line: None)


def test_a_pair_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "zico.json"
    done = invoke(out, "--pairs", "small:mlp+small:mlp", "--excesses", "1.01", "--parts", "pairs")
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert str(tmp_path) not in document["command"]
    assert (document["failed"], document["left_out"], document["running"]) == ([], [], None)
    (pair,) = document["pairs"]
    assert pair["names"] == list(PAIR)
    ways = {row["way"]: row for row in pair["ways"]}
    colocated = ["co-located, all memory", "co-located, 1.01x", *CHANGES]
    assert list(ways) == ["temporal", *colocated, "eager temporal"]
    assert all(row["work"] > 0 for row in ways.values())
    whole = sum(pair["local_bytes"] + pair["peak_bytes"])
    for name in colocated:
        detail = ways[name]["detail"]
        assert detail["smallest_budget_bytes"] <= detail["budget_bytes"] <= whole
        assert min(detail["iterations"]) >= 4
        for _, *held in detail.get("samples", []):
            assert sum(held) <= detail["budget_bytes"]
    high, low, again = (ways[way]["detail"] for way in CHANGES)
    assert high["budget_bytes"] == again["budget_bytes"] > low["budget_bytes"]
    for detail in (low, again):
        assert detail["change"]["in_force_after_seconds"] > 0
        assert min(detail["change"]["longest_gap_seconds"]) > 0
    assert "| small:mlp+small:mlp | 1.00 |" in done.output


def test_what_fails_is_written_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: PairBench) -> WayResult:
        raise ValueError("no turns today")

    monkeypatch.setattr(PairBench, "temporal", fail)
    document = run(tmp_path / "zico.json", excesses=())
    assert document["failed"] == [{"names": PAIR, "way": "temporal", "error": "ValueError: no turns today"}]
    ways = [row["way"] for row in document["pairs"][0]["ways"]]
    assert ways[0] == "co-located, all memory"
    assert ways[-1] == "eager temporal"


def test_a_budget_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainmux as tm

    change = tm.Colocation.set_budget
    seen: list[int] = []

    def fail_once(colocation: tm.Colocation, budget: int) -> None:
        seen.append(budget)
        if len(seen) == 2:  # the first is set before the run
            raise RuntimeError("the device is busy")
        change(colocation, budget)

    monkeypatch.setattr(tm.Colocation, "set_budget", fail_once)
    monkeypatch.setattr(ZicoPlan, "changes", lambda plan, pair: False)
    document = run(tmp_path / "zico.json", excesses=(1.01, 1.02))
    (failure,) = document["failed"]
    assert (failure["way"], failure["error"]) == ("co-located, 1.01x", "RuntimeError: the device is busy")
    ways = [row["way"] for row in document["pairs"][0]["ways"]]
    assert ways == ["temporal", "co-located, all memory", "co-located, 1.02x", "eager temporal"]


def test_a_run_is_resumed_without_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "zico.json"
    with monkeypatch.context() as patch:
        patch.setattr(
            PairBench, "colocated", lambda bench, *args, **more: (_ for _ in ()).throw(MemoryError())
        )
        patch.setattr(zico_run, "is_lost", lambda device: True)
        with pytest.raises(zico_run.DeviceLostError):
            run(out)
    written = json.loads(out.read_text())
    assert [row["way"] for row in written["pairs"][0]["ways"]] == ["temporal"]
    first_work = written["pairs"][0]["ways"][0]["work"]
    # A process that was killed leaves what it was doing.
    written["failed"], written["running"] = [], {"names": list(PAIR), "way": "co-located"}
    out.write_text(json.dumps(written))
    document = run(out, resumes=True)
    assert [row["way"] for row in document["failed"]] == ["co-located"]
    ways = {row["way"]: row["work"] for row in document["pairs"][0]["ways"]}
    assert list(ways) == ["temporal", "eager temporal"]
    assert ways["temporal"] == first_work
    kept = json.loads(out.read_text())
    monkeypatch.setattr(zico_run, "BenchJob", None)  # nothing is left to build anything for
    assert run(out, resumes=True)["pairs"] == kept["pairs"]


def test_nothing_is_begun_when_time_is_over(tmp_path: Path) -> None:
    document = run(tmp_path / "zico.json", time_limit_s=0.0)
    assert document["pairs"] == []
    assert document["left_out"] == ["small:mlp+small:mlp"]


def test_two_processes_train_at_once_and_mps_needs_a_gpu() -> None:
    rates, failures = measure_in_processes(("small:mlp", "small:rhn"), OPTIONS, has_mps=False)
    assert failures == []
    assert list(rates) == ["two processes, eager", "two processes, graphs"]
    assert all(rate > 0 for both in rates.values() for rate in both)
    rates, failures = measure_in_processes(("small:mlp", "small:rhn"), OPTIONS, has_mps=True)
    assert rates == {}
    assert {failure.way for failure in failures} == {"MPS, eager", "MPS, graphs"}
    assert all("needs a CUDA device" in failure.error for failure in failures)


def test_a_process_that_cannot_build_its_job_says_why_and_serves_on() -> None:
    pipes, threads = [], []
    for options in (OPTIONS, replace(OPTIONS, precision="fp7")):
        ours, theirs = Pipe()
        thread = threading.Thread(target=zico_processes._serve, args=(theirs, "small:mlp", 0, options))
        thread.start()
        pipes.append(ours)
        threads.append(thread)
    with pytest.raises(BenchError, match="fp7"):
        zico_processes._together(pipes, "graphs", 0.05)
    assert min(zico_processes._together(pipes, "eager", 0.05)) > 0
    for pipe, thread in zip(pipes, threads, strict=True):
        pipe.close()
        thread.join(10)
        assert not thread.is_alive()


def test_an_mps_daemon_is_private_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "bin" / CONTROL
    control.parent.mkdir()
    control.write_text('#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $*" >> "$CALLS"\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/another")
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    with mps_daemon(tmp_path):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps")
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/another"
    assert "CUDA_MPS_LOG_DIRECTORY" not in os.environ
    started, ended = (tmp_path / "calls").read_text().splitlines()
    assert started.split() == [str(tmp_path / "mps"), "-d"]
    assert ended.split() == [str(tmp_path / "mps")]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="not on the PATH"), mps_daemon(tmp_path):
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pairs", "bert"], "expected pairs A+B"),
        (["--pairs", "bert+nobody"], "expected names among nasnet"),
        (["--pairs", "bert@0+gnmt"], "a whole number above 0"),
        (["--excesses", "1.5,0.5"], "expected numbers above 1"),
        (["--excesses", "much"], "expected numbers above 1"),
        (["--parts", "pairs,pictures"], "expected some of pairs, memory"),
        (["--read", "none.json"], "expected results of bench zico"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = invoke(tmp_path / "none.json", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_names() -> None:
    assert parse_pairs("bert+gnmt, mlp+mlp,bert+gnmt") == [("bert", "gnmt"), ("mlp", "mlp")]
    assert parse_excesses("1.3,2") == [1.3, 2.0]
    assert parse_parts("memory, tracking") == ["memory", "tracking"]
    for name in zico_case_names():
        assert zico_case(name).note
    batch = zico_case("gnmt").batch(0)
    assert (batch["source"].shape, batch["target"].shape) == ((256, 16), (256, 17))
    larger = zico_case("rhn@7")
    assert (larger.name, larger.batch(0)[0].shape) == ("rhn@7", (7, 8))
    assert "7 rows" in larger.note


def test_all_pairs_are_those_of_the_six_with_the_papers_first() -> None:
    pairs = all_pairs()
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == 21
    assert {name for pair in pairs for name in pair} == set(PAPER_NAMES)
    assert pairs[:4] == [("rhn", "gnmt"), ("nasnet", "gnmt"), ("bert", "gnmt"), ("nasnet", "resnet110")]
    assert parse_pairs("all") == pairs


def test_machines() -> None:
    assert machine_bytes(("resnet50", "bert@8")) == 32 << 30
    assert machine_bytes(("bert", "gnmt")) == machine_bytes(("rhn", "rhn")) == 11 << 30


def test_budgets_are_what_can_work() -> None:
    def stays(whole: int, least: int) -> dict[str, int]:
        found = budgets_of(("gnmt", "rhn"), (whole, least), (1.3, 1.8), has_machine=True, changes=True)
        return {stay.way: stay.budget_bytes for stay in found}

    assert stays(100, 40) == {
        "co-located, all memory": 100,
        "co-located, 1.3x": 76,
        "co-located, 1.8x": 55,
        "co-located, 11 GiB": 100,  # what they need, which is less
        "co-located, 70%": 70,
        "co-located, 50%": 50,
        "co-located, 70% again": 70,
    }
    tight = stays(100, 80)
    assert tight["co-located, 1.8x"] == tight["co-located, 50%"] == 80
    assert tight["co-located, 70%"] == tight["co-located, 70% again"] == 90
    large = stays(100 << 30, 60 << 30)
    assert large["co-located, 11 GiB"] == 11 << 30  # too small, and refused when it is to be used


def test_a_machine_that_is_too_small_is_a_failure_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [Stay("co-located, all memory", 0), Stay("co-located, 11 GiB", 1)]

    def budgets(names: Any, sizes: tuple[int, int], *args: Any, **more: Any) -> list[Stay]:
        return [Stay(small[0].way, sizes[0]), small[1]]

    monkeypatch.setattr("benchmarks.bench.zico.budgets_of", budgets)
    bench = PairBench((BenchJob(*PAIR[:1], 0, OPTIONS), BenchJob(*PAIR[:1], 1, OPTIONS)), OPTIONS)
    rows, failures = bench.colocated((), (), changes=False)
    assert [row.way for row in rows] == ["co-located, all memory"]
    assert [failure.way for failure in failures] == ["co-located, 11 GiB"]
    assert "need at least" in failures[0].error


def test_a_machine_that_is_too_small_is_the_only_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.bench.zico.budgets_of", lambda *args, **more: [Stay("co-located, 11 GiB", 1)]
    )
    bench = PairBench((BenchJob(*PAIR[:1], 0, OPTIONS), BenchJob(*PAIR[:1], 1, OPTIONS)), OPTIONS)
    rows, failures = bench.colocated((), (), changes=False)
    assert not rows
    assert [failure.way for failure in failures] == ["co-located, 11 GiB"]


def test_budgets_are_of_what_jobs_need_once_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settle, refused = FusedWork.settle, set()

    def settle_at_second_try(work: FusedWork, memory: Any) -> None:
        if id(work) not in refused:
            refused.add(id(work))
            raise BudgetError("more than it knew")
        settle(work, memory)

    monkeypatch.setattr(FusedWork, "settle", settle_at_second_try)
    bench = PairBench((BenchJob(*PAIR[:1], 0, OPTIONS), BenchJob(*PAIR[:1], 1, OPTIONS)), OPTIONS)
    rows, failures = bench.colocated((1.3,), (), changes=False)
    assert not failures
    assert [row.way for row in rows] == ["co-located, all memory", "co-located, 1.3x"]
    assert min(bench.sizes[0]) > 128 << 20
    assert rows[0].detail["budget_bytes"] == sum(map(sum, bench.sizes))


def test_the_small_relatives_train_alike_fused_and_eagerly() -> None:
    for name in ("small:rhn", "small:resnet110"):
        job = BenchJob(name, 0, OPTIONS)
        fused = [job.fleet.step(job.batch(number)).item() for number in range(3)]
        model = job.case.build(0).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        eager = []
        for number in range(3):
            optimizer.zero_grad()
            loss = job.case.loss(model, job.batch(number))
            loss.backward()
            optimizer.step()
            eager.append(loss.item())
        assert fused == pytest.approx(eager, rel=1e-4)


def test_the_cifar_network_has_the_layers_that_its_name_says() -> None:
    layers = [m for m in CifarResNet().modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) - 2 == 110  # and two 1x1 convolutions beside the stages' first blocks
    assert CifarResNet(num_blocks=1)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_resnet_50_is_the_published_one() -> None:
    with torch.device("meta"):
        model = zico_case("resnet50").build(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_a_table_is_relative_to_turns() -> None:
    rows = (WayResult("temporal", (1.0, 1.0), 0.9), WayResult("other", (2.0, 2.0), 1.35))
    result = PairResult(("a", "b"), (1.0, 2.0), (1, 2), (3, 4), rows)
    lines = table([result])
    assert lines[0] == "| pair | temporal | other |"
    assert lines[2] == "| a+b | 1.00 | 1.50 |"
    assert PairResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_a_failure_is_not_longer_than_a_paragraph() -> None:
    assert len(Failure.of(("a",), "way", RuntimeError("x" * 10_000)).error) == 500
    assert FORMAT == 2


@pytest.mark.parametrize(
    ("statuses", "num_starts", "status"), [([0], 1, 0), ([3, -11, 0], 3, 0), ([2], 1, 2), ([3] * 9, 4, 3)]
)
def test_the_script_goes_on_behind_a_lost_process(
    statuses: list[int], num_starts: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = benchmark_script("zico")
    calls: list[list[str]] = []

    def start(command: list[str], timeout: float) -> subprocess.CompletedProcess[bytes]:
        calls.append(command[5:])
        return subprocess.CompletedProcess(command, statuses[len(calls) - 1])

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr("sys.argv", ["zico.py", "--time-limit", "100", "--pairs", "a+b"])
    assert script.main() == status
    assert len(calls) == num_starts
    assert calls[0][:2] == ["--pairs", "a+b"]
    assert "--resume" not in calls[0]
    assert all("--resume" in call for call in calls[1:])
    assert all(int(call[-1]) <= 100 for call in calls)


def test_the_script_compiles_every_model_once_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    script = benchmark_script("zico")
    built: list[list[str]] = []
    ran: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **more: Any) -> None:
            built.append(command)

        def wait(self, seconds: float | None = None) -> None:
            assert len(built) == 3  # all of them run
            assert ran == []

    def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(subprocess, "run", run)
    words = ["--pairs", "small:mlp+small:rhn,small:rhn+small:nasnet", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["zico.py", *words])
    assert script.main() == 0
    assert len(ran) == 1
    for command, name in zip(built, ("small:mlp", "small:rhn", "small:nasnet"), strict=True):
        assert "--device" in command
        assert command[-6:-1] == ["--parts", "build", "--pairs", f"{name}+{name}", "--out"]


def test_a_case_is_built_and_nothing_is_measured(tmp_path: Path) -> None:
    done = invoke(tmp_path / "zico.json", "--pairs", "small:mlp+small:mlp", "--parts", "build")
    assert done.exit_code == 0, done.output
    assert "small:mlp: built in" in done.output
    document = json.loads((tmp_path / "zico.json").read_text())
    assert (document["pairs"], document["failed"], document["left_out"]) == ([], [], [])
