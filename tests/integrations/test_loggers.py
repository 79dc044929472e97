"""Loggers against the real libraries: a run per trial, with its parameters, its state, each epoch once."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainmux as tm

pytest.importorskip("optuna")
import optuna
from tests.integrations.study_cases import make_member, member, settings

EPOCHS = 4
STATES = {0: "complete", 1: "failed", 2: "complete", 3: "pruned"}
NUM_EPOCHS = {0: EPOCHS, 1: 0, 2: EPOCHS, 3: 2}


class PruneThree(optuna.pruners.BasePruner):
    """Prunes trial 3 after its second epoch."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number == 3 and (trial.last_step or 0) >= 1


def make(trial: Any) -> tm.Member:
    return member(math.inf) if trial.number == 1 else make_member(trial)


class Interrupt(tm.Callback):
    def on_epoch_end(self, state: Any) -> None:
        if state.epoch == 3:
            raise KeyboardInterrupt


def search(logger: Any, path: Path) -> list[Any]:
    """The trials of a study whose search is interrupted after three epochs, two saved, and resumed."""

    def once(*callbacks: Any) -> list[Any]:
        study = optuna.create_study(
            storage=f"sqlite:///{path}/study.db",
            study_name="a",
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=PruneThree(),
        )
        how = settings(max_epochs=EPOCHS, checkpoint=path / "trials", checkpoint_every=2)
        more = {"deterministic": True, "callbacks": [logger(), *callbacks]}
        tm.optuna.optimize(study, make, total_trials=4, **how, **more)
        return list(study.trials)

    with pytest.warns(tm.TrainmuxWarning, match="failed"), pytest.raises(KeyboardInterrupt):
        once(Interrupt())
    return once()


def check_losses(trial: Any, found: list[tuple[int, float]]) -> None:
    """Every epoch of a trial is there once, with the loss that the study has."""
    assert [epoch for epoch, _ in found] == list(range(1, NUM_EPOCHS[trial.number] + 1))
    if trial.intermediate_values:
        expected = {epoch + 1: value for epoch, value in trial.intermediate_values.items()}
        assert dict(found) == pytest.approx(expected, nan_ok=True)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    trials = search(lambda: tm.loggers.TensorBoardLogger(tmp_path / "tb"), tmp_path)
    for trial in trials:
        events = EventAccumulator(str(tmp_path / f"tb/trial-{trial.number:05d}"))
        events.Reload()
        losses = events.Scalars("loss") if "loss" in events.Tags()["scalars"] else []
        check_losses(trial, [(event.step, event.value) for event in losses])
        data = events.summary_metadata
        contents = {
            tag: plugin_data_pb2.HParamsPluginData.FromString(one.plugin_data.content)
            for tag, one in data.items()
            if tag.startswith("_hparams_/")
        }
        params = contents["_hparams_/session_start_info"].session_start_info.hparams
        assert {key: value.number_value for key, value in params.items()} == pytest.approx(trial.params)
        status = contents["_hparams_/session_end_info"].session_end_info.status
        assert (status == api_pb2.STATUS_FAILURE) == (STATES[trial.number] == "failed")
        texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("state/text_summary")]
        assert texts[-1].startswith(STATES[trial.number])


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    def logger() -> Any:
        return tm.loggers.WandbLogger("digits", "my sweep", mode="offline", dir=str(tmp_path))

    trials = search(logger, tmp_path)
    for trial in trials:
        losses: list[tuple[int, float]] = []
        state, code = "", -1
        files = sorted(tmp_path.glob(f"wandb/offline-run-*-my-sweep-{trial.number}/*.wandb"))
        assert files
        for record in (record for file in files for record in wandb_records(file)):
            if record.WhichOneof("record_type") == "history":
                values = {item.nested_key[0]: item.value_json for item in record.history.item}
                losses.append((record.history.step.num, float(values["loss"].strip('"'))))
            for update in record.summary.update:
                state = update.value_json if update.key == "state" else state
            if record.WhichOneof("record_type") == "exit":
                code = record.exit.exit_code
            if record.WhichOneof("record_type") == "run":
                assert (record.run.run_group, record.run.project) == ("my sweep", "digits")
                config = {item.key: item.value_json for item in record.run.config.update}
                assert float(config["lr"]) == trial.params["lr"] if trial.params else "lr" not in config
        check_losses(trial, losses)
        assert state.strip('"') == STATES[trial.number]
        assert (code == 1) == (state.strip('"') == "failed")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own dependencies
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trials = search(lambda: tm.loggers.MLflowLogger("digits", "it's mine", tracking_uri=uri), tmp_path)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits").experiment_id
    runs = client.search_runs([experiment])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [(run.info.run_name, run.info.status) for run in parents] == [("it's mine", "FINISHED")]
    by_number = {run.data.tags["trainmux.trial"]: run for run in runs if run not in parents}
    assert len(by_number) == len(runs) - 1 == len(trials) == 4
    expected = {"complete": "FINISHED", "failed": "FAILED", "pruned": "KILLED"}
    for trial in trials:
        run = by_number[str(trial.number)]
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert run.data.tags["trainmux.state"] == STATES[trial.number]
        assert run.info.status == expected[STATES[trial.number]]
        assert run.data.params == {key: str(value) for key, value in trial.params.items()}
        found = client.get_metric_history(run.info.run_id, "loss")
        check_losses(trial, [(metric.step, metric.value) for metric in found])
