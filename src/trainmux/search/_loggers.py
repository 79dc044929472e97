"""Logs of a search where people already look: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import os
import re
import time
from pathlib import Path
from typing import Any

from trainmux.errors import ConfigError
from trainmux.fleet import EpochRecord
from trainmux.search._logger import Logger, number_of, plain_params
from trainmux.search._results import Results
from trainmux.search._trial import Trial, TrialState


class TensorBoardLogger(Logger[Any]):
    """Writes a TensorBoard folder per trial: ``folder/trial-00042``.

    Metrics by epoch, the parameters in the HParams tab, and as a text how the trial ended. A resumed trial
    hides the epochs that it trains again, and so does a new search in an old folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        tensorboard = _import("torch.utils.tensorboard", "tensorboard")
        self._writer_of = tensorboard.SummaryWriter
        self._folder = Path(folder)
        self._with_params: set[int] = set()

    def on_search_start(self, is_resumed: bool) -> None:
        super().on_search_start(is_resumed)
        self._with_params.clear()

    def _open(self, trial: Trial, number: int) -> Any:
        first = self._written[number] + 1
        return self._writer_of(self._folder / f"trial-{number:05d}", purge_step=first)

    def _log(self, run: Any, trial: Trial, record: EpochRecord) -> None:
        values = record.values()
        try:
            self._write_params(run, trial, tuple(values))
            for key, value in values.items():
                run.add_scalar(key, value, record.epoch)
            run.flush()
        except Exception:
            # The thread that writes its file is dead by now: go on in another one.
            self._runs.pop(number_of(trial), None)
            self._with_params.discard(trial.number)
            raise

    def _close(self, run: Any, trial: Trial, state: TrialState) -> None:
        self._write_params(run, trial, ())
        run.add_text("state", f"{state}: {trial.error}" if trial.error else str(state), trial.epoch)
        if state is not TrialState.WAITING:
            run.file_writer.add_summary(_session_end(is_success=state is not TrialState.FAILED))
        run.close()
        self._with_params.discard(trial.number)

    def _write_params(self, run: Any, trial: Trial, metrics: tuple[str, ...]) -> None:
        """Write the parameters once, as soon as it is known which metrics there are."""
        if trial.number in self._with_params:
            return
        self._with_params.add(trial.number)
        hparams = importlib.import_module("torch.utils.tensorboard.summary").hparams
        experiment, start, _ = hparams(plain_params(trial.params), dict.fromkeys(metrics, 0.0))
        run.file_writer.add_summary(experiment)
        run.file_writer.add_summary(start)


class WandbLogger(Logger[Any]):
    """Writes a Weights & Biases run per trial, all in the group ``group`` of ``project``.

    ``group`` names the search: a resumed one goes on in its runs, so another search takes another name. The
    parameters are the run's ``config``, epochs its steps. The summary has ``state`` and ``error``; runs of
    failed trials end as failed. ``init`` has further arguments of ``wandb.init`` (``entity``, ``mode``,
    ``dir``, ``tags``, …).
    """

    def __init__(self, project: str, group: str, **init: Any) -> None:
        super().__init__()
        self._wandb = _import("wandb", "wandb")
        self._init = {
            "project": project,
            "group": group,
            "job_type": "trial",
            # Runs are many and side by side: none may take over stdout, or watch the machine.
            "settings": self._wandb.Settings(silent=True, console="off", x_disable_stats=True),
            **init,
        }
        self._id = re.sub(r"[^\w-]", "-", group)
        self._done: dict[str, int] = {}  # the last epoch of a run when it was opened

    def _open(self, trial: Trial, number: int) -> Any:
        run = self._wandb.init(
            **{
                **self._init,
                "reinit": "create_new",
                "id": f"{self._id}-{number}",
                "name": trial.name,
                "config": plain_params(trial.params),
                "resume": "allow" if self._is_resumed else "never",
            }
        )
        # The service knows how far a run was; where it is not asked (offline), our notes do.
        notes = _notes(run).parent.parent.glob(f"*run-*-{run.id}/{_NOTE}") if self._is_resumed else ()
        self._done[run.id] = max([run.step - 1, *(int(note.read_text() or 0) for note in notes)])
        return run

    def _log(self, run: Any, trial: Trial, record: EpochRecord) -> None:
        if record.epoch > self._done[run.id]:
            run.log({**record.values(), "epoch": record.epoch}, step=record.epoch)
            _notes(run).write_text(str(record.epoch))

    def _close(self, run: Any, trial: Trial, state: TrialState) -> None:
        run.summary.update({"state": str(state), "error": trial.error})
        run.finish(exit_code=int(state is TrialState.FAILED))


class MLflowLogger(Logger[str]):
    """Writes an MLflow run per trial, nested in a run of the search.

    ``name`` is that of the search's run in ``experiment``; a resumed search goes on in the last one of this
    name. Trials that are complete end as ``FINISHED``, pruned ones as ``KILLED``, failed ones as ``FAILED``,
    unfinished ones as ``SCHEDULED``; the tags ``trainmux.state`` and ``trainmux.error`` say more.
    ``tracking_uri`` is MLflow's own by default.
    """

    def __init__(self, experiment: str, name: str = "search", tracking_uri: str | None = None) -> None:
        super().__init__()
        mlflow = _import("mlflow", "mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri)
        self._names = (experiment, name)
        self._experiment = self._parent = ""
        self._done: dict[str, int] = {}  # the last epoch of a run when it was opened

    def on_search_start(self, is_resumed: bool) -> None:
        super().on_search_start(is_resumed)
        experiment, name = self._names
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = found.experiment_id if found else self._client.create_experiment(experiment)
        self._parent = self._run_with({"trainmux.search": name.replace('"', "'")}, name)

    def on_search_end(self, results: Results) -> None:
        self._attempt(self._client.set_terminated, self._parent, "FINISHED")
        super().on_search_end(results)

    def on_exception(self, error: BaseException) -> None:
        if self._parent:
            status = "FAILED" if isinstance(error, Exception) else "KILLED"
            self._attempt(self._client.set_terminated, self._parent, status)

    def _open(self, trial: Trial, number: int) -> str:
        run = self._run_with({"mlflow.parentRunId": self._parent, "trainmux.trial": str(number)}, trial.name)
        params = plain_params(trial.params).items()
        found = [self._entities.Param(_key(key), str(value)) for key, value in params]
        for first in range(0, len(found), _MOST_PARAMS):
            self._client.log_batch(run, params=found[first : first + _MOST_PARAMS])
        return run

    def _log(self, run: str, trial: Trial, record: EpochRecord) -> None:
        if record.epoch > self._done[run]:
            now_ms = int(time.time() * 1000)
            metrics = [
                self._entities.Metric(_key(key), value, now_ms, record.epoch)
                for key, value in record.values().items()
            ]
            self._client.log_batch(run, metrics=metrics)

    def _close(self, run: str, trial: Trial, state: TrialState) -> None:
        tags = {"trainmux.state": str(state), **({"trainmux.error": trial.error} if trial.error else {})}
        self._client.log_batch(run, tags=[self._entities.RunTag(*tag) for tag in tags.items()])
        self._client.set_terminated(run, _STATUS[state])

    def _run_with(self, tags: dict[str, str], name: str) -> str:
        """The run of these tags, if the search is resumed and there is one, or else a new one."""
        found = []
        if self._is_resumed:
            text = " and ".join(f'tags.`{key}` = "{value}"' for key, value in tags.items())
            newest = ["attributes.start_time DESC"]
            found = self._client.search_runs([self._experiment], text, max_results=1, order_by=newest)
        if not found:
            run: str = self._client.create_run(self._experiment, tags=tags, run_name=name).info.run_id
            self._done[run] = 0
            return run
        run = found[0].info.run_id
        self._client.update_run(run, status="RUNNING")
        losses = self._client.get_metric_history(run, "loss")
        self._done[run] = max((metric.step for metric in losses), default=0)
        return run


_STATUS = {
    TrialState.COMPLETE: "FINISHED",
    TrialState.PRUNED: "KILLED",
    TrialState.FAILED: "FAILED",
    TrialState.WAITING: "SCHEDULED",
}
_NOTE = "trainmux-epoch"
"""File in the folder of a W&B run: its last epoch."""
_MOST_PARAMS = 100
"""That MLflow takes in one batch."""


def _notes(run: Any) -> Path:
    return Path(run.dir).parent / _NOTE


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(
            f"expected {package}, got none: pip install {package}, or 'trainmux[loggers]'"
        ) from None


def _key(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w./ :-]", "_", name)


def _session_end(is_success: bool) -> Any:
    """The record that marks a run of TensorBoard's HParams as ended, well or not."""
    api = importlib.import_module("tensorboard.plugins.hparams.api_pb2")
    data = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    status = api.STATUS_SUCCESS if is_success else api.STATUS_FAILURE
    end = data.HParamsPluginData(session_end_info=data.SessionEndInfo(status=status))
    plugin = summary.SummaryMetadata.PluginData(plugin_name="hparams", content=end.SerializeToString())
    metadata = summary.SummaryMetadata(plugin_data=plugin)
    value = summary.Summary.Value(tag="_hparams_/session_end_info", metadata=metadata)
    return summary.Summary(value=[value])
