"""``python -m benchmarks chaos``: workers of one study, killed at random moments.

Each worker is a process that works on the study with ``trainmux.optuna.optimize``. One of them at a time is
killed (SIGKILL) at a random moment, start-up included, and a new one is started at once, until there were as
many kills as asked for; then the workers may finish. Meanwhile the study's storage may be away for some
seconds: a journal's folder is renamed, a SQLite database is locked by another process. Workers that end for
that are started again, too.

Each worker writes down the epochs that each trial was trained, from the thread that trains. Afterwards the
study says what became of each configuration, and the epochs say what was trained more than once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import trainmux as tm

from .environment import describe
from .records import Results

STORAGES = ("journal", "sqlite")
_STEPS = 4
"""Steps of an epoch."""
_IMPORTS = ("optuna", "alembic", "torch._functorch.partitioners", "torch._inductor.pattern_matcher")
_FINISHED = ("COMPLETE", "PRUNED")


@dataclass(frozen=True)
class Run:
    """What is done to which search. ``folder`` gets the storage, checkpoints and the workers' notes."""

    folder: Path
    storage: str
    trials: int = 200
    kills: int = 100
    outages: int = 0
    outage_s: float = 30.0
    workers: int = 2
    slots: int = 8
    max_epochs: int = 27
    checkpoint_every: int = 2
    epoch_s: float = 1.0
    between_s: float = 4.0
    heartbeat: float = 1.0
    seed: int = 0
    lowering: str = "auto"

    @property
    def store(self) -> Path:
        """The folder of the storage alone."""
        return self.folder / "storage"

    @property
    def notes(self) -> Path:
        """Where workers write down what they train."""
        return self.folder / "epochs.jsonl"

    def open_study(self) -> Any:
        """The study, made where it is not there yet."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        place: Any = f"sqlite:///{self.store}/study.db"
        if self.storage == "journal":
            backend = optuna.storages.journal.JournalFileBackend(str(self.store / "journal.log"))
            place = optuna.storages.JournalStorage(backend)
        return optuna.create_study(
            storage=place,
            study_name="chaos",
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=8, reduction_factor=2),
        )


# ---- a worker -----------------------------------------------------------------------------------------


class Notes(tm.Callback):
    """Writes down which trials were trained up to which epoch, in one write that no kill can split.

    An epoch takes at least ``epoch_s`` seconds, so that kills hit every part of one.
    """

    def __init__(self, path: Path, epoch_s: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._epoch_s = epoch_s

    def on_epoch_end(self, state: Any) -> None:
        trained = {name: state.fleet.num_updates(name) // _STEPS for name in state.fleet.names}
        os.write(self._file, (json.dumps({"pid": os.getpid(), "trained": trained}) + "\n").encode())
        time.sleep(self._epoch_s)


def member(trial: Any) -> tm.Member:
    """A small MLP with Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return tm.Member(
        model, torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1, log=True))
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    error: Tensor = model(batch[0]) - batch[1]
    return error.square().mean()


def work(run: Run, pause_s: float) -> None:
    """Be a worker until the study has all its trials."""
    os.dup2(os.open(run.folder / "workers.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    time.sleep(pause_s)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_STEPS, 32, 8, generator=generator)
    tm.optuna.optimize(
        *(run.open_study(), member),
        loss=loss,
        loader=[(part, part.sum(1, keepdim=True).sin()) for part in inputs],
        slots=run.slots,
        total_trials=run.trials,
        max_epochs=run.max_epochs,
        checkpoint=run.folder / "trials",
        checkpoint_every=run.checkpoint_every,
        heartbeat=run.heartbeat,
        callbacks=[Notes(run.notes, run.epoch_s)],
        progress=False,
        device="cpu",
        lowering=run.lowering,
    )


# ---- what happens to it -------------------------------------------------------------------------------


def take_away(run: Run) -> None:
    """Have the storage out of reach for a while."""
    if run.storage == "sqlite":
        database = sqlite3.connect(run.store / "study.db", timeout=60, isolation_level=None)
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(run.outage_s)
        database.execute("ROLLBACK")
        database.close()
    else:
        elsewhere = run.store.with_name("elsewhere")
        run.store.rename(elsewhere)
        time.sleep(run.outage_s)
        elsewhere.rename(run.store)


@dataclass
class Workers:
    """The processes that work on the study."""

    run: Run
    processes: list[ForkServerProcess] = field(default_factory=list)
    num_ended: int = 0

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # What a worker would import otherwise, for seconds; each has a process of its own all the same.
        self._context.set_forkserver_preload([__name__, *_IMPORTS])
        self.processes = [self._start() for _ in range(self.run.workers)]

    def _start(self, pause_s: float = 0.0) -> ForkServerProcess:
        process = self._context.Process(target=work, args=(self.run, pause_s), daemon=True)
        process.start()
        return process

    def kill(self, index: int) -> None:
        """Kill a worker and start another."""
        self.processes[index].kill()
        self.processes[index].join()
        self.processes[index] = self._start()

    def watch(self, seconds: float) -> None:
        """Wait, and start those again that end with an error meanwhile."""
        end_s = time.monotonic() + seconds
        while True:
            for index, process in enumerate(self.processes):
                if process.exitcode:
                    self.num_ended += 1
                    self.processes[index] = self._start(pause_s=1.0)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(0.05, left_s))

    def are_done(self) -> bool:
        """Whether a worker has found the search to be over."""
        return any(process.exitcode == 0 for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def execute(run: Run) -> dict[str, Any]:
    """Let the run happen, and return what came of it; raises ``SystemExit`` where it was too short."""
    run.store.mkdir(parents=True)
    run.open_study()
    chance = random.Random(run.seed)
    outages = [run.kills * (number + 1) // (run.outages + 1) for number in range(run.outages)]
    absences = [threading.Thread(target=take_away, args=(run,)) for _ in outages]
    begin_s = time.monotonic()
    workers = Workers(run)
    try:
        for number in range(run.kills):
            if number in outages:
                absences[outages.index(number)].start()
            workers.watch(chance.uniform(0, 2 * run.between_s))
            if workers.are_done():
                raise SystemExit(
                    f"the search was over after {number} of {run.kills} kills: give it more trials"
                )
            workers.kill(chance.randrange(run.workers))
        while not workers.are_done():
            workers.watch(0.1)
    finally:
        for absence in absences:
            if absence.is_alive():
                absence.join()
        workers.stop()
    return {"seconds": time.monotonic() - begin_s, "ended": workers.num_ended, **judge(run)}


# ---- what came of it ----------------------------------------------------------------------------------


def judge(run: Run) -> dict[str, Any]:
    """Count what became of each configuration, and the epochs that were trained more than once.

    ``lost`` are configurations that did not end COMPLETE or PRUNED exactly once, ``unlinked`` failed trials
    without a retry that names them, ``most_repeated`` the most epochs that a trial went back when a worker
    took it up from another.
    """
    trials = run.open_study().get_trials(deepcopy=False)
    before = {trial.number: trial.system_attrs.get("retry_history", []) for trial in trials}
    void = {trial.number for trial in trials if trial.user_attrs.get("trainmux_error")}
    roots = {number: (history or [number])[0] for number, history in before.items()}
    ends = Counter(roots[trial.number] for trial in trials if trial.state.name in _FINISHED)
    retried = {history[-1] for number, history in before.items() if history and number not in void}
    failed = {trial.number for trial in trials if trial.state.name == "FAIL"} - void

    furthest: dict[int, int] = {}
    holders: dict[int, Any] = {}
    repeated, most, trained = 0, 0, 0
    for line in run.notes.read_text(encoding="utf-8").splitlines():
        note = json.loads(line)
        for name, epoch in note["trained"].items():
            number = int(name.removeprefix("trial-"))
            root = roots[number]
            trained += 1
            back = max(0, furthest.get(root, 0) - epoch + 1)
            repeated += back > 0
            if holders.get(root) != (note["pid"], number):
                most = max(most, back)
            holders[root] = note["pid"], number
            furthest[root] = max(furthest.get(root, 0), epoch)
    states = Counter(trial.state.name for trial in trials)
    return {
        "configurations": len(set(roots.values()) - void),
        **{state.lower(): states[state] for state in ("COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING")},
        "lost": sum(ends[root] != 1 for root in set(roots.values()) - void),
        "unlinked": len(failed - retried),
        "void": len(void),
        "epochs": trained,
        "repeated": repeated,
        "most_repeated": most,
    }


def is_as_promised(run: Run, found: dict[str, Any]) -> bool:
    """Whether nothing was lost, and nothing trained again that was saved."""
    return (
        found["configurations"] == run.trials
        and not any(found[name] for name in ("running", "waiting", "lost", "unlinked"))
        and found["most_repeated"] <= run.checkpoint_every
    )


def command(
    storages: Annotated[str, typer.Option(help=f"Some of {', '.join(STORAGES)}.")] = ",".join(STORAGES),
    trials: Annotated[int, typer.Option(min=1, help="Configurations of the study.")] = 200,
    kills: Annotated[int, typer.Option(min=0, help="Workers that are killed.")] = 100,
    outages: Annotated[int, typer.Option(min=0, help="Times that the storage is away.")] = 0,
    outage_s: Annotated[float, typer.Option(help="Seconds that it is away.")] = 30.0,
    between_s: Annotated[float, typer.Option(help="Seconds between two kills, in the mean.")] = 4.0,
    epoch_s: Annotated[float, typer.Option(help="Seconds that an epoch lasts at least.")] = 1.0,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Results as JSON.")] = None,
) -> None:
    """Kill workers of a search at random moments. Ends with status 1 if anything was lost."""
    results = Results(out, "chaos", describe("cpu")) if out is not None else None
    is_good = True
    for storage in storages.split(","):
        with tempfile.TemporaryDirectory(prefix="chaos-") as name:
            run = Run(
                Path(name) / storage, storage, trials, kills, outages, outage_s,
                between_s=between_s, epoch_s=epoch_s, seed=seed,
            )  # fmt: skip
            found = execute(run)
        is_good &= is_as_promised(run, found)
        about = {"storage": storage, "trials": trials, "kills": kills, "outages": outages, "seed": seed}
        settings = {
            name: getattr(run, name)
            for name in (
                "outage_s", "workers", "slots", "max_epochs", "checkpoint_every", "epoch_s", "between_s",
                "heartbeat",
            )
        }  # fmt: skip
        if results is not None:
            results.add({**about, **settings, **found})
        print(f"{storage}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
    raise typer.Exit(0 if is_good else 1)
