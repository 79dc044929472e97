"""Zico's experiments on one GPU: ``trainmux bench zico``, started again where its process is lost.

    python benchmarks/zico.py --out benchmarks/results/zico_h200.json

First all models are compiled, side by side in processes of their own; a second run finds them compiled. Then
Figure 8's four pairs are measured, then as many of the 21 pairs of the six models as there is time for, each
by turns, at once, in budgets that its peaks exceed 1.3, 1.5 and 1.8 times, and eagerly; the budget of two of
them changes while they run. Options are those of ``trainmux bench zico``, and ``--no-build``. A fault of the
device ends the process that had it: another one goes on behind it, with what was measured kept.

For a machine where trainmux is not installed, with ``PYTHONPATH=src``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bench.zico_plan import parse_pairs

DEFAULTS = {"--pairs": "all", "--seconds": "1", "--out": "runs/bench/zico.json"}
TIME_LIMIT_SECONDS = 430.0
GRACE_SECONDS = 120.0
"""What a process may take beyond its limit: it begins nothing more after it, but ends what it has begun."""
MAX_STARTS = 4
BUILD_SHARE = 0.6
"""Of that time, what compiling may take beforehand."""
OPTION_ERROR = 2
COMMAND = [sys.executable, "-m", "trainmux", "bench", "zico"]


def build(words: list[str], seconds: float) -> None:
    """Compile every model that ``words`` name, all at the same time, for at most so many seconds."""
    given = argparse.ArgumentParser(allow_abbrev=False)
    given.add_argument("--pairs")
    given.add_argument("--figures")
    given.add_argument("--read", action="append")
    ours, words = given.parse_known_args(words)
    try:
        pairs = [] if ours.read else parse_pairs(ours.pairs)
    except ValueError:
        return  # the run itself will say
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            own = ["--parts", "build", "--pairs", f"{name}+{name}", "--out", str(Path(folder) / name)]
            processes.append(subprocess.Popen([*COMMAND, *words, *own], stdout=subprocess.DEVNULL))
        until = time.monotonic() + seconds
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    print(f"compiled after {seconds - (until - time.monotonic()):.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_SECONDS, help="seconds in all")
    parser.add_argument("--no-build", action="store_true", help="compile each model when it is needed")
    given, words = parser.parse_known_args()
    for option, value in DEFAULTS.items():
        if not any(word == option or word.startswith(f"{option}=") for word in words):
            words += [option, value]
    begin, status = time.monotonic(), 1
    if not given.no_build:
        build(words, BUILD_SHARE * given.time_limit)
    for start in range(MAX_STARTS):
        left = given.time_limit - (time.monotonic() - begin)
        if left < 1:
            break
        resume = ["--resume"] if start and "--resume" not in words else []
        command = [*COMMAND, *words, *resume, "--time-limit", f"{left:.0f}"]
        try:
            status = subprocess.run(command, timeout=left + GRACE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            print(f"ended: nothing came for {GRACE_SECONDS:.0f} s beyond the limit of time", file=sys.stderr)
            return 1
        if status in (0, OPTION_ERROR):
            break
        print(f"the process ended with status {status}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
