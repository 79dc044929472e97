"""One measurement in a process of its own: ``python -m benchmarks.bench.child JOB.json RESULT.json``.

A fresh process has a fresh device: nothing is left of the way before, and one that runs out of memory takes
nobody with it.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .job import BenchError, Job
from .record import write_json
from .ways.table import find_way

MAX_DETAIL_CHARACTERS = 4000
MAX_WARNINGS = 20


def run(job: Job) -> dict[str, Any]:
    """The measurement as JSON under ``measurement``, or what stopped it under ``error``; and all warnings."""
    result: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            result["measurement"] = asdict(find_way(job.way).measure(job))
        except BenchError as error:
            result["error"] = str(error)
        except Exception as error:
            result["error"] = first_line(error)
            result["detail"] = traceback.format_exc()[-MAX_DETAIL_CHARACTERS:]
    messages = [f"{warning.category.__name__}: {first_line(warning.message)}" for warning in caught]
    result["warnings"] = list(dict.fromkeys(messages))[:MAX_WARNINGS]
    return result


def first_line(problem: Warning | BaseException | str) -> str:
    """``Type: message`` of an error, or the message of a warning, cut to one line of decent length."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if isinstance(problem, BaseException) and not isinstance(problem, Warning):
        text = f"{type(problem).__name__}: {text}"
    return text[:300]


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:])
    job = Job(**json.loads(job_file.read_text(encoding="utf-8")))
    write_json(result_file, run(job))


if __name__ == "__main__":
    main()
