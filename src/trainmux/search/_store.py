"""Trials on disk: what is finished, and the state of those that have a slot.

A search with ``checkpoint=`` has a folder per trial: ``trial-00042/result.json`` when it is finished, a
member's checkpoint before. So a search that was killed goes on where its trials were saved last, also on
another machine.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmux.errors import CheckpointError, ConfigError
from trainmux.fleet import EpochRecord, Fleet, checkpoint_exists, require_choice
from trainmux.ir import file_format, load, save
from trainmux.search._trial import Trial, TrialState

_RESULT = "result.json"
_STATE = "state"
_BEST = "best"


@file_format("trial", version=1, remedy="delete its folder to train it again", error=CheckpointError)
@dataclass(frozen=True)
class _Result:
    """A finished trial. ``params`` is their text; numbers that are not finite are texts too."""

    number: int
    name: str
    params: str
    state: str
    epochs: tuple[tuple[int, int, str, str], ...]
    values: tuple[str, ...] | None
    error: str | None
    seconds: float


class TrialStore:
    """The folder of a search; without a path nothing is kept."""

    def __init__(self, path: str | os.PathLike[str] | None, resume: str | bool) -> None:
        if isinstance(resume, bool):
            resume = "must" if resume else "never"
        require_choice("resume", resume, ("auto", "must", "never"))
        self._path = None if path is None else Path(path)
        found = [] if self._path is None else sorted(self._path.glob("trial-*"))
        if resume == "must" and not found:
            raise CheckpointError(f"resume='must', but there is no search in {path}. Check checkpoint=")
        self.is_resumed = bool(found) and resume != "never"
        """Whether there are trials of an earlier search."""
        if resume == "never":
            for folder in found:
                shutil.rmtree(folder)

    def was_finished(self, trial: Trial) -> bool:
        """Whether a trial was finished before; if so, it is filled with what is known."""
        folder = next((folder for folder in self._folders(trial) if (folder / _RESULT).exists()), None)
        if folder is None:
            return False
        result = load(folder / _RESULT, _Result)
        if not trial.resumes:
            _require_same(trial, result.name, result.params)
        trial.state = TrialState(result.state)
        trial.records = [
            EpochRecord(
                epoch, step, float(loss), {key: float(value) for key, value in json.loads(text).items()}
            )
            for epoch, step, loss, text in result.epochs
        ]
        trial.values = None if result.values is None else tuple(map(float, result.values))
        trial.error, trial.seconds = result.error, result.seconds
        return True

    def resume(self, trial: Trial, fleet: Fleet) -> None:
        """Have a trial that has just got a slot go on from its last saved state, if there is one."""
        folder = next((one for one in self._folders(trial) if checkpoint_exists(one / _STATE)), None)
        if folder is None:
            return
        saved = fleet.load_member(trial.name, folder / _STATE)["trial"]
        if not trial.resumes:
            _require_same(trial, saved["name"], saved["params"])
        trial.records = [EpochRecord(*fields) for fields in saved["records"]]
        trial.seconds = saved["seconds"]

    def save(self, trial: Trial, fleet: Fleet) -> None:
        """Keep the state of a running trial."""
        folder = self._folder(trial)
        if folder is not None:
            about = {
                "name": trial.name,
                "params": params_text(trial.params),
                "records": [(r.epoch, r.step, r.loss, dict(r.metrics)) for r in trial.records],
                "seconds": trial.seconds,
            }
            fleet.save_member(trial.name, folder / _STATE, {"trial": about})

    def save_best(self, trial: Trial, fleet: Fleet) -> None:
        """Keep the weights of the best trial so far, in ``best``."""
        if self._path is not None:
            fleet.save_member(trial.name, self._path / _BEST, {"trial": {"number": trial.number}})

    def finish(self, trial: Trial) -> None:
        """Keep what became of a trial, and its state no longer."""
        folder = self._folder(trial)
        if folder is None:
            return
        result = _Result(
            trial.number,
            trial.name,
            params_text(trial.params),
            str(trial.state),
            tuple((r.epoch, r.step, repr(r.loss), _text(r.metrics)) for r in trial.records),
            None if trial.values is None else tuple(map(repr, trial.values)),
            trial.error,
            trial.seconds,
        )
        save(folder / _RESULT, result)
        for other in self._folders(trial):
            shutil.rmtree(other / _STATE, ignore_errors=True)

    def _folder(self, trial: Trial) -> Path | None:
        return next(iter(self._folders(trial)), None)

    def _folders(self, trial: Trial) -> list[Path]:
        """The trial's folder, and those of the trials that it resumes."""
        if self._path is None:
            return []
        return [self._path / f"trial-{number:05d}" for number in (trial.number, *trial.resumes)]


def params_text(params: Mapping[str, Any]) -> str:
    """Parameters as text, by which two trials are compared."""
    return json.dumps(dict(params), sort_keys=True, default=repr)


def _text(metrics: Mapping[str, float]) -> str:
    return json.dumps({key: repr(value) for key, value in metrics.items()})


def _require_same(trial: Trial, name: str, params: str) -> None:
    if (trial.name, params_text(trial.params)) != (name, params):
        raise ConfigError(
            f"expected trial {trial.number} to be {name!r} with {params} as in the checkpoint, got "
            f"{trial.name!r} with {params_text(trial.params)}: the search space has changed. Give another "
            "checkpoint=, or resume=False to start over"
        )
