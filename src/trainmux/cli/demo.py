"""``trainmux demo``: a sweep over the digits data set as one fleet, then one by one, compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from torch import nn

import trainmux as tm

from . import _digits
from ._sweep import (
    BATCH_SIZE,
    SHUFFLE_SEED,
    Score,
    Setting,
    build,
    loss_fn,
    metric_fn,
    settings,
    train_alone,
)


class DeviceUnavailableError(Exception):
    """The device asked for is not there."""


@dataclass(frozen=True)
class Row:
    """One member of the results table: its score in the fleet, and alone."""

    setting: Setting
    fused: Score
    alone: Score


@dataclass(frozen=True)
class FleetRun:
    """What training the sweep as one fleet gave, and how long it took.

    ``build_seconds`` is the part of ``seconds`` that went into tracing and fusing: making the fleet,
    and what the first batch of each size took longer than a usual one.
    """

    models: Mapping[str, nn.Module]
    scores: Mapping[str, Score]
    seconds: float
    build_seconds: float


def pick_device(choice: str) -> torch.device:
    """``auto`` is the GPU if there is one; ``cuda`` without one raises ``DeviceUnavailableError``."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailableError("torch sees no CUDA device here; use --device cpu or --device auto")
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(choice)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Best validation accuracy first, then lowest training loss; a loss that is not finite comes last."""

    def key(row: Row) -> tuple[bool, float, float, str]:
        broken = not math.isfinite(row.fused.loss)
        return broken, -row.fused.accuracy, row.fused.loss if not broken else 0.0, row.setting.name

    return sorted(rows, key=key)


def results_table(rows: Sequence[Row]) -> Table:
    """The members in the order of ``ranked``."""
    table = Table(title="Members by validation accuracy")
    for heading in ("#", "learning rate", "weight decay", "seed", "train loss", "accuracy", "alone"):
        table.add_column(heading, justify="right")
    for place, row in enumerate(ranked(rows), start=1):
        setting = row.setting
        table.add_row(
            str(place),
            f"{setting.lr:g}",
            f"{setting.weight_decay:g}",
            str(setting.seed),
            f"{row.fused.loss:.4f}",
            f"{row.fused.accuracy:.1%}",
            f"{row.alone.accuracy:.1%}",
        )
    return table


def timing_lines(num_members: int, fused_s: float, build_s: float, alone_s: float) -> list[str]:
    """Both wall times, what of the fleet's was building, and their ratio with and without it."""
    training_s = fused_s - build_s
    lines = [
        f"as one fleet   {fused_s:7.1f} s for {num_members} members, "
        f"of which tracing and fusing {build_s:.1f} s, training {training_s:.1f} s",
        f"one by one     {alone_s:7.1f} s in eager torch, same batches, same run",
        f"one by one / fleet: {alone_s / fused_s:.2f}×",
    ]
    if training_s > 0:
        lines[-1] += f"; leaving tracing and fusing out, {alone_s / training_s:.2f}×"
    return lines


def save_best(model: nn.Module, row: Row, epochs: int, out: Path) -> tuple[Path, Path]:
    """Weights and buffers to ``best.safetensors``, settings and score to ``best.json``, in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    weights, record = out / "best.safetensors", out / "best.json"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    settings_and_score = {
        "name": row.setting.name,
        "model": {"class": "benchmarks.workloads.SmallCNN", "channels": 16, "num_classes": 10},
        "optimizer": "AdamW",
        **asdict(row.setting),
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "train_loss": row.fused.loss,
        "validation_accuracy": row.fused.accuracy,
    }
    # Written beside its name and then renamed: whoever reads the folder never sees half a file.
    partial = out / "best.partial"
    save_file(tensors, partial)
    os.replace(partial, weights)
    partial.write_text(json.dumps(settings_and_score, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, record)
    return weights, record


def train_fleet(data: _digits.Digits, device: torch.device, epochs: int) -> FleetRun:
    """The whole sweep as one fleet."""
    train = _digits.ClockedLoader(_digits.train_loader(data, BATCH_SIZE, SHUFFLE_SEED))
    validation = _digits.ClockedLoader(_digits.validation_loader(data))
    example = next(iter(_digits.train_loader(data, BATCH_SIZE, SHUFFLE_SEED)))

    begin = perf_counter()
    models: dict[str, nn.Module] = {}
    members = []
    for setting in settings():
        model, optimizer = build(setting)
        models[setting.name] = model
        members.append(tm.Member(model, optimizer, name=setting.name, seed=setting.seed))
    made = perf_counter()
    fleet = tm.Fleet(members, loss=loss_fn, example_batch=example, device=str(device))
    constructed = perf_counter()
    history = fleet.fit(train, epochs=epochs, validation=validation, metric_fn=metric_fn)
    fleet.sync()
    seconds = perf_counter() - begin

    accuracies = fleet.evaluate(_digits.validation_loader(data), metric_fn)
    return FleetRun(
        models=models,
        scores={
            name: Score(loss=float(history[name][-1].loss), accuracy=float(accuracies[name]["accuracy"]))
            for name in models
        },
        seconds=seconds,
        build_seconds=(constructed - made) + train.first_use_seconds + validation.first_use_seconds,
    )


def train_one_by_one(
    data: _digits.Digits, device: torch.device, epochs: int, console: Console
) -> tuple[dict[str, Score], float]:
    """The same sweep, member after member, and its wall time."""
    # What torch sets up on its first steps is not part of the comparison.
    train_alone(settings()[0], data, device, epochs=1)
    begin = perf_counter()
    members = track(
        settings(), description="one by one", console=console, disable=not console.is_terminal, transient=True
    )
    scores = {setting.name: train_alone(setting, data, device, epochs) for setting in members}
    return scores, perf_counter() - begin


def run_demo(*, device: str, epochs: int, out: Path, console: Console | None = None) -> list[Row]:
    """Train the sweep both ways, print table and times, save the best member into ``out``."""
    console = console or Console()
    place = pick_device(device)
    data = _digits.load()
    num_members = len(settings())
    console.print(
        f"{num_members} small CNNs (learning rate × weight decay × seed), {len(data.train)} training and "
        f"{len(data.validation)} validation images, {epochs} epochs, on {place}",
        soft_wrap=True,
    )
    fleet_run = train_fleet(data, place, epochs)
    console.print(f"Now the same {num_members} one by one, in eager torch")
    alone, alone_seconds = train_one_by_one(data, place, epochs, console)

    rows = ranked([Row(s, fleet_run.scores[s.name], alone[s.name]) for s in settings()])
    console.print(results_table(rows))
    for line in timing_lines(num_members, fleet_run.seconds, fleet_run.build_seconds, alone_seconds):
        console.print(line, highlight=False, soft_wrap=True)
    best = rows[0]
    weights, record = save_best(fleet_run.models[best.setting.name], best, epochs, out)
    console.print(f"best member: {best.setting.name}, saved as {weights} with {record.name}", soft_wrap=True)
    return rows
