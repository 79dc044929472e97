"""``trainmux sweep``: workers that train the trials of one study."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

import trainmux as tm

from ._load import load

_JOURNAL = "journal:"
_ATTEMPTS = 5
"""To open a study: workers that start together may all try to make its tables."""


def run_sweep(
    name: str,
    storage: str | None,
    study_name: str,
    options: Mapping[str, Any],
    workers: str | None,
    use_ray: bool,
) -> int:
    """Train the search that ``FILE:NAME`` names, here or in further processes; returns the exit status.

    ``options`` are arguments of ``tm.optuna.optimize`` that replace those of the search.
    """
    if workers is None and not use_ray:
        results = _train(name, storage, study_name, options)
        print(_summary(results))
        was_ended = any(trial.state is tm.TrialState.WAITING for trial in results)
        return 128 + signal.SIGTERM if was_ended else 0
    if storage is None:
        raise typer.BadParameter("expected --storage for workers to share a study, got none")
    if "worker" in options:
        raise typer.BadParameter("expected --worker for a single worker, got it with --workers or --ray")
    # What is wrong is said once, and only one process makes the tables.
    _open_study(storage, study_name, load(name, dict).get("study", {}))
    # A terminal has room for one table only.
    options = {"progress": "plain", **options}
    if use_ray:
        return _on_ray(name, storage, study_name, options, workers)
    return _in_processes(_command(name, storage, study_name, options), _devices(workers))


def _train(name: str, storage: str | None, study_name: str, options: Mapping[str, Any]) -> tm.Results:
    arguments = {**load(name, dict)}
    if "make_member" not in arguments:
        raise typer.BadParameter(
            f"expected make_member among the arguments in {name}, got {sorted(arguments)}"
        )
    study = _open_study(storage, study_name, arguments.pop("study", {}))
    study.sampler.reseed_rng()  # else workers would suggest the same
    return tm.optuna.optimize(study, **{**arguments, "sigterm": True, **options})


def _open_study(storage: str | None, name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise tm.ConfigError("expected Optuna, got none: pip install 'trainmux[optuna]'") from None
    for attempt in range(_ATTEMPTS):
        try:
            place: Any = storage
            if storage is not None and storage.startswith(_JOURNAL):
                # Absolute: otherwise a lock that a killed worker leaves is never released.
                path = os.path.abspath(storage.removeprefix(_JOURNAL))
                backend = optuna.storages.journal.JournalFileBackend(path)
                place = optuna.storages.JournalStorage(backend)
            return optuna.create_study(
                **{**arguments, "storage": place, "study_name": name, "load_if_exists": True}
            )
        except Exception as error:
            if attempt + 1 == _ATTEMPTS:
                raise tm.SearchError(
                    f"expected study {name!r} in {storage}, got {type(error).__name__}: {error}. "
                    "Check --storage and the search's 'study'"
                ) from error
            time.sleep(0.2 * 2**attempt)
    raise AssertionError


def _summary(results: tm.Results) -> str:
    text = repr(results)
    if len(results.metric) == 1 and results.ranked():
        best = results.best
        text += f"\nbest here: {best.name}, {results.metric[0]} {best.value:.6g}, {dict(best.params)}"
    return text


# ---- workers ------------------------------------------------------------------------------------------


def _devices(workers: str | None) -> list[str | None]:
    """``CUDA_VISIBLE_DEVICES`` of each worker; ``None`` where there is no GPU."""
    num_gpus = torch.cuda.device_count()
    named = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    gpus = (named or [str(index) for index in range(num_gpus)])[:num_gpus]
    if workers in (None, "auto"):
        return [*gpus] or [None]
    if workers is None or not workers.isdigit() or int(workers) < 1:
        raise typer.BadParameter(f"expected --workers to be auto or a number above 0, got {workers}")
    if gpus and int(workers) > num_gpus:
        raise typer.BadParameter(f"expected at most one worker per GPU, {num_gpus}, got {workers}")
    return [*gpus[: int(workers)]] or [None] * int(workers)


def _command(name: str, storage: str, study_name: str, options: Mapping[str, Any]) -> list[str]:
    flags = {"total_trials": "trials"}
    given = [(flags.get(option, option), value) for option, value in options.items()]
    texts = [("storage", storage), ("study", study_name), *given]
    return [sys.executable, "-m", "trainmux", "sweep", name, *(f"--{key}={value}" for key, value in texts)]


def _in_processes(command: Sequence[str], devices: Sequence[str | None]) -> int:
    """Run one worker per device, pass SIGTERM on to them, and wait until all have ended."""
    environments = [{} if device is None else {"CUDA_VISIBLE_DEVICES": device} for device in devices]
    running = [subprocess.Popen(command, env={**os.environ, **more}) for more in environments]

    def pass_on(number: int, frame: Any) -> None:
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        statuses = [process.wait() for process in running]
    except KeyboardInterrupt:  # they have got it too
        statuses = [process.wait() for process in running]
    return max(abs(status) for status in statuses)


def _on_ray(name: str, storage: str, study_name: str, options: Mapping[str, Any], workers: str | None) -> int:
    """Run one actor per GPU of the cluster, or as many as asked for on CPUs; Ray restarts those that die."""
    try:
        import ray
    except ModuleNotFoundError:
        raise tm.ConfigError("expected Ray, got none: pip install 'trainmux[ray]'") from None
    ray.init(ignore_reinit_error=True)
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    count = (num_gpus or 1) if workers in (None, "auto") else int(workers or 1)
    path, _, attribute = name.rpartition(":")
    where = f"{Path(path).resolve()}:{attribute}"

    command = _command(where, storage, study_name, options)
    needs = {"num_gpus": 1 if num_gpus else 0, "num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}
    remote: Any = ray.remote(**needs)(_Actor)
    actors = [remote.remote() for _ in range(count)]
    for text in ray.get([actor.train.remote(command) for actor in actors]):
        print(text.strip())
    return 0


class _Actor:
    """A worker on Ray, in a process of its own: only a main thread can handle SIGTERM."""

    def train(self, command: Sequence[str]) -> str:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
