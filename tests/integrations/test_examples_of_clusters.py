"""What starts workers on clusters: the files are well formed, and their command lines are those we have."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from trainmux.cli._app import app

pytest.importorskip("optuna")

EXAMPLES = Path(__file__).parents[2] / "examples"


def options_of(words: list[str]) -> dict[str, Any]:
    """What ``trainmux`` makes of a command line; fails where it would refuse it."""
    assert words[:2] == ["trainmux", "sweep"]
    sweep = get_command(app).commands["sweep"]
    return sweep.make_context("sweep", words[2:]).params


def test_slurm_jobs_save_on_sigterm_and_queue_again(tmp_path: Path) -> None:
    """With stand-ins for the worker and for Slurm's command."""
    script = EXAMPLES / "slurm.sbatch"
    text = script.read_text(encoding="utf-8")
    (found,) = re.findall(r"^trainmux (?:.|\\\n)*? &$", text, re.M)
    words = found.replace("\\\n", " ").replace("$TRIALS", "2000").removesuffix("&")
    options = options_of(shlex.split(words))
    assert options["search"] == "examples/search.py:search"
    assert options["slots"] == 64
    assert "#SBATCH --signal=B:TERM@" in text

    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "trainmux").write_text(
        '#!/bin/bash\ntrap "sleep 0.3; echo saved >> $LOG; exit 143" TERM\n'
        "kill -TERM $PPID\nfor i in {1..100}; do sleep 0.1; done\n"
    )
    (bin_ / "scontrol").write_text('#!/bin/bash\necho "$@" >> $LOG\n')
    for name in ("trainmux", "scontrol"):
        (bin_ / name).chmod(0o755)
    log = tmp_path / "log"
    environment = {
        "PATH": f"{bin_}:/usr/bin:/bin", "LOG": str(log), "SLURM_JOB_ID": "8",
        "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "FOLDER": str(tmp_path / "runs"),
    }  # fmt: skip
    done = subprocess.run(["bash", script], env=environment, timeout=60, check=False)
    assert done.returncode == 143
    assert log.read_text().splitlines() == ["saved", "requeue 7_3"]


def test_pods_get_sigterm_themselves_and_come_back_after_a_drain() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 30, "longer than an epoch"
    assert pod["restartPolicy"] == "Never", "podFailurePolicy wants it"
    (container,) = pod["containers"]
    options = options_of(container["command"])
    assert options["storage"] == "$(STORAGE)"
    assert [one["name"] for one in container["env"]] == ["STORAGE"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(options["checkpoint"]).startswith(mounts[pod["volumes"][0]["name"]])


def test_the_search_that_they_name_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(EXAMPLES.parent)
    storage = ["--storage", f"journal:{tmp_path}/journal.log", "--checkpoint", str(tmp_path / "trials")]
    words = ["sweep", "examples/search.py:search", *storage, "--slots", "4", "--trials", "4"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "best here" in done.output
