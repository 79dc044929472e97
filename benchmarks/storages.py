"""``python -m benchmarks storages``: how many calls a study's storage takes, of one worker and of several.

Each worker is a process that asks for a trial with one parameter, reports nine values and tells the result,
over and over. A write is an ask, a report or a tell.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .environment import describe
from .records import Results

CALLS = ("ask", "report", "tell")
_REPORTS = 9


def open_study(storage: str, name: str) -> Any:
    """A study at a URL, or ``journal:FILE``."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    place: Any = storage
    if storage.startswith("journal:"):
        backend = optuna.storages.journal.JournalFileBackend(storage.removeprefix("journal:"))
        place = optuna.storages.JournalStorage(backend)
    return optuna.create_study(
        storage=place,
        study_name=name,
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(),
    )


def work(storage: str, name: str, seconds: float, results: Any) -> None:
    """Be a worker; puts the number of calls, and the seconds that they took, by kind."""
    study = open_study(storage, name)
    count, taken_s = dict.fromkeys(CALLS, 0), dict.fromkeys(CALLS, 0.0)

    def timed(kind: str, call: Any, *args: Any) -> Any:
        begin_s = time.monotonic()
        found = call(*args)
        count[kind] += 1
        taken_s[kind] += time.monotonic() - begin_s
        return found

    def ask() -> Any:
        trial = study.ask()
        trial.suggest_float("lr", 0, 1)
        return trial

    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        trial = timed("ask", ask)
        for step in range(_REPORTS):
            timed("report", trial.report, 0.5, step)
        timed("tell", study.tell, trial, 0.5)
    results.put((count, taken_s))


def measure(storage: str, workers: int, seconds: float) -> dict[str, Any]:
    """Writes a second of all workers together, and milliseconds a call."""
    name = f"storages-{time.time_ns()}"
    open_study(storage, name)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(storage, name, seconds, results)) for _ in range(workers)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    total = {kind: sum(count[kind] for count, _ in found) for kind in CALLS}
    taken_s = {kind: sum(taken[kind] for _, taken in found) for kind in CALLS}
    return {
        "writes_per_s": sum(total.values()) / seconds,
        **{f"{kind}_ms": 1e3 * taken_s[kind] / max(1, total[kind]) for kind in CALLS},
    }


def command(
    postgresql: Annotated[str | None, typer.Option(help="URL of a database, to measure it too.")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of processes, with commas.")] = "1,4",
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 15.0,
    out: Annotated[Path | None, typer.Option(help="Results as JSON.")] = None,
) -> None:
    """Measure how many calls a second a journal, SQLite and PostgreSQL take."""
    results = Results(out, "storages", describe("cpu")) if out is not None else None
    for kind in ("journal", "sqlite", "postgresql"):
        for count in map(int, workers.split(",")):
            with tempfile.TemporaryDirectory(prefix="storages-") as folder:
                places = {
                    "journal": f"journal:{folder}/journal.log",
                    "sqlite": f"sqlite:///{folder}/study.db",
                }
                place = places.get(kind, postgresql)
                if place is None:
                    continue
                found = measure(place, count, seconds)
            if results is not None:
                results.add({"storage": kind, "workers": count, "seconds": seconds, **found})
            print(
                f"{kind}, {count} workers: " + ", ".join(f"{key} {value:.3g}" for key, value in found.items())
            )
