"""``python -m benchmarks studies``: steps of a search with a study in some storage, and without a study.

Members are MLPs on real images (scikit-learn's digits), as many as there are slots, and all train to the end,
so that nothing but reporting and asking the pruner lies between them. Searches are run in turn, each several
times; a search's step time is that of its median epoch, what happens between two epochs included.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import trainmux as tm

from .environment import choose_device, describe
from .records import Results
from .search import Shuffled, images_of, loss, member

STORAGES = ("none", "memory", "journal", "sqlite")
_WARM_UP = 2
"""Epochs that are not counted."""


class Clock(tm.Callback):
    """Notes when epochs end."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_epoch_end(self, state: Any) -> None:
        self.ends_s.append(time.perf_counter())


def step_seconds(storage: str, slots: int, epochs: int, batch: int, device: str, seed: int) -> dict[str, Any]:
    """One search; seconds per step, and how many values the study has by the end."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    where = torch.device(device)
    train, _ = images_of("digits", where)
    batches, clock = Shuffled(train, batch), Clock()
    sampler = optuna.samplers.RandomSampler(seed)
    settings: dict[str, Any] = {
        "loss": loss,
        "loader": batches,
        "slots": slots,
        "max_epochs": epochs,
        "device": device,
        "callbacks": [clock],
        "progress": False,
        "lowering": "aten",  # compilation in the background would hit some searches more than others
    }
    reports = 0
    with tempfile.TemporaryDirectory(prefix="studies-") as folder:
        if storage == "none":
            scratch = optuna.create_study(sampler=sampler)
            asked = (member(scratch.ask(), "mlp", 8, torch.device("cpu")) for _ in range(slots))
            tm.sweep(asked, **settings)
        else:
            place: Any = {"memory": None, "sqlite": f"sqlite:///{folder}/study.db"}.get(storage)
            if storage == "journal":
                backend = optuna.storages.journal.JournalFileBackend(f"{folder}/journal.log")
                place = optuna.storages.JournalStorage(backend)
            # Asked after every report, and never says so: medians of nothing.
            pruner = optuna.pruners.MedianPruner(n_startup_trials=slots)
            study = optuna.create_study(storage=place, sampler=sampler, pruner=pruner)
            tm.optuna.optimize(
                *(study, lambda trial: member(trial, "mlp", 8, torch.device("cpu"))),
                n_trials=slots,
                **settings,
            )
            done = study.get_trials(deepcopy=False)
            assert all(trial.state.name == "COMPLETE" for trial in done)
            reports = sum(len(trial.intermediate_values) for trial in done)
    epochs_s = [after - before for before, after in itertools.pairwise(clock.ends_s[_WARM_UP - 1 :])]
    return {"step_ms": 1e3 * statistics.median(epochs_s) / len(batches), "reports": reports}


def command(
    storages: Annotated[str, typer.Option(help=f"Some of {', '.join(STORAGES)}.")] = ",".join(STORAGES),
    slots: int = 64,
    epochs: Annotated[int, typer.Option(min=_WARM_UP + 1, help="Epochs of each trial.")] = 22,
    batch: int = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Searches with each storage.")] = 5,
    device: str = "auto",
    out: Annotated[Path | None, typer.Option(help="Results as JSON.")] = None,
) -> None:
    """Compare the time of a step with a study in each storage to that without a study."""
    where = str(choose_device(device))
    results = Results(out, "studies", describe(where)) if out is not None else None
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        names = storages.split(",")
        for storage in names if number % 2 else names[::-1]:
            row = step_seconds(storage, slots, epochs, batch, where, number)
            found.setdefault(storage, []).append(row)
            print(f"{storage}: {row['step_ms']:.3f} ms, {row['reports']} reports", flush=True)
    for storage, rows in found.items():
        steps = [row["step_ms"] for row in rows]
        ratios = [
            row["step_ms"] / bare["step_ms"] for row, bare in zip(rows, found.get("none", []), strict=False)
        ]
        about = {"storage": storage, "slots": slots, "epochs": epochs, "batch_size": batch}
        measured = {
            "step_ms": statistics.median(steps),
            "all_step_ms": steps,
            "ratio": statistics.median(ratios) if ratios else None,
            "reports": rows[-1]["reports"],
        }
        if results is not None:
            results.add({**about, **measured})
        ratio = f"{measured['ratio']:.3f}" if ratios else "?"
        print(f"{storage:8} {measured['step_ms']:8.3f} ms a step, {ratio} of none")
