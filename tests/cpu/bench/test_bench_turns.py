"""Several measurements built at once, timed in turn."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.bench import turns as turns_module
from benchmarks.bench.record import read_records
from benchmarks.bench.runner import Options, _chunks, _jobs, run
from benchmarks.bench.turns import GO, READY, Turns

# By its path: to import the package takes seconds, and what waits here needs none of it.
WAITS = f"""
import runpy, sys, time
wait_for_turn = runpy.run_path({turns_module.__file__!r})["wait_for_turn"]
folder, log = sys.argv[1:]
wait_for_turn(folder)
with open(log, "a") as file:
    file.write("in\\n"); file.flush()
    time.sleep(0.2)
    file.write("out\\n"); file.flush()
"""


def started(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments])


def test_one_measures_at_a_time_and_none_before_all_are_built(tmp_path: Path) -> None:
    log = tmp_path / "log"
    turns = Turns(3)
    folders = [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
    statuses: list[int | None] = [-1, -1, -1]

    def take(index: int, program: str) -> None:
        process = started(program, str(folders[index]), str(log))
        statuses[index] = turns.take(process, folders[index], 60)

    programs = [WAITS, WAITS, "raise SystemExit(3)"]
    threads = [threading.Thread(target=take, args=item) for item in enumerate(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0, 0, 3]
    assert log.read_text(encoding="utf-8").split() == ["in", "out", "in", "out"]
    assert not (folders[2] / GO).exists()


def test_one_that_is_not_built_in_time_is_ended_and_holds_nobody_up(tmp_path: Path) -> None:
    process = started("import time; time.sleep(60)")
    assert Turns(1).take(process, tmp_path, 0.2) is None
    assert process.wait(10) == -9
    assert not (tmp_path / READY).exists()


def test_a_run_with_builds_at_once_gives_the_same_records(tmp_path: Path) -> None:
    options = Options(
        workloads=["small:mlp"],
        ways=["eager", "trainmux", "compiled_graph"],
        widths=[2],
        device="cpu",
        out=tmp_path / "out.json",
        block_seconds=0.01,
        num_blocks=2,
        builds_at_once=3,
    )
    records = run(options)
    assert [record.way for record in records] == ["eager", "trainmux", "compiled_graph"]
    assert [record.error for record in records] == [None, None, "needs a CUDA device"]
    assert read_records(options.out) == records
    assert "--builds-at-once 3" in records[0].command


def test_those_that_build_in_their_turn_come_after_all_others(tmp_path: Path) -> None:
    log = tmp_path / "log"
    turns = Turns(3)
    program = WAITS.replace('"in\\n"', 'folder[-1] + "\\n"').replace('"out\\n"', '""')
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()

    def take(folder: Path) -> None:
        process = started(program, str(folder), str(log))
        assert turns.take(process, folder, 60, goes_last=folder.name == "a") == 0

    threads = [threading.Thread(target=take, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = log.read_text(encoding="utf-8").split()
    assert sorted(order) == ["a", "b", "c"]
    assert order[-1] == "a"


def test_a_way_with_a_width_of_its_own_is_built_beside_the_others(tmp_path: Path) -> None:
    options = Options(
        workloads=["small:mlp", "small:cnn"],
        ways=["compiled_graph@1", "trainmux@1", "compiled_graph", "trainmux", "eager"],
        widths=[2, 4],
        device="cpu",
        out=tmp_path / "out.json",
        fleet={"lowering": "aten"},
    )
    jobs = [(job.workload, job.way, job.width) for job in _jobs(options)]
    assert len(jobs) == len(set(jobs)) == 2 * (2 + 3 * 2)
    assert {width for _, way, width in jobs if way == "compiled_graph"} == {1, 2, 4}
    assert [job.fleet for job in _jobs(options) if job.way == "trainmux"] == [{"lowering": "aten"}] * 6
    # compiled_graph is the same at any width, so it counts once: six builds for each workload.
    assert [len(chunk) for chunk in _chunks(range(len(jobs)), _jobs(options), 6)] == [8, 8]
