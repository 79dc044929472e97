"""Zico's experiments on one GPU: ``trainmux bench zico``, started again where its process is lost.

    python benchmarks/zico.py --out benchmarks/results/zico_h200.json

Without options of its own this takes about eight minutes on an H200: Figure 8's four pairs first, then as
many of the 21 pairs of the six models as there is time for, each by turns, at once, in budgets that its peaks
exceed 1.3, 1.5 and 1.8 times, and eagerly; the budget of two of them changes while they run. Options are
those of ``trainmux bench zico``. A fault of the device ends the process that had it: another one goes on
behind it, with what was measured kept.

For a machine where trainmux is not installed, with ``PYTHONPATH=src``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

DEFAULTS = {"--pairs": "all", "--seconds": "1", "--out": "runs/bench/zico.json"}
TIME_LIMIT_SECONDS = 430.0
GRACE_SECONDS = 120.0
"""What a process may take beyond its limit: it begins nothing more after it, but ends what it has begun."""
MAX_STARTS = 4
OPTION_ERROR = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_SECONDS, help="seconds in all")
    given, words = parser.parse_known_args()
    for option, value in DEFAULTS.items():
        if not any(word == option or word.startswith(f"{option}=") for word in words):
            words += [option, value]
    begin, status = time.monotonic(), 1
    for start in range(MAX_STARTS):
        left = given.time_limit - (time.monotonic() - begin)
        if left < 1:
            break
        resume = ["--resume"] if start and "--resume" not in words else []
        command = [sys.executable, "-m", "trainmux", "bench", "zico", *words, *resume]
        try:
            status = subprocess.run(
                [*command, "--time-limit", f"{left:.0f}"], timeout=left + GRACE_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"ended: nothing came for {GRACE_SECONDS:.0f} s beyond the limit of time", file=sys.stderr)
            return 1
        if status in (0, OPTION_ERROR):
            break
        print(f"the process ended with status {status}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
