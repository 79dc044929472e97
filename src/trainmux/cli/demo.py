"""``trainmux demo``: train a sweep as one fleet, train it again one by one, and compare losses and time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import trainmux as tm

LEARNING_RATES = (1e-3, 2e-3, 3e-3, 4e-3)
"""Rates at which the model trains steadily: at larger ones rounding errors grow until any two runs differ."""
WEIGHT_DECAYS = (1e-4, 1e-1)
SEEDS = (0, 1)
BATCH_SIZE = 64
NUM_VALIDATION = 360


@dataclass(frozen=True)
class Setting:
    """The hyper-parameters of one member."""

    lr: float
    weight_decay: float
    seed: int

    @property
    def name(self) -> str:
        return f"lr={self.lr:g} wd={self.weight_decay:g} seed={self.seed}"

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make the model, its weights drawn from the seed, and its optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = small_cnn()
        return model, torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)


SETTINGS = [Setting(*values) for values in product(LEARNING_RATES, WEIGHT_DECAYS, SEEDS)]


@dataclass(frozen=True)
class Run:
    """One way to train the sweep: losses ``[step, member]``, validation accuracies, wall times."""

    losses: Tensor
    accuracies: Tensor
    build_seconds: float
    train_seconds: float


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's 1,797 digits: loaders that all give the same batches, and one batch for validation."""

    make_loader: Callable[[], DataLoader[Any]]
    validation: list[Tensor]

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
        labels = torch.tensor(digits, dtype=torch.long, device=device)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
        held_out, kept = order[:NUM_VALIDATION], order[NUM_VALIDATION:]
        train = TensorDataset(images[kept], labels[kept])

        def make_loader() -> DataLoader[Any]:
            # Whole batches are indexed at once, so that loading does not hide the time of training.
            order = RandomSampler(train, generator=torch.Generator().manual_seed(1))
            return DataLoader(train, sampler=BatchSampler(order, BATCH_SIZE, drop_last=True), batch_size=None)

        return cls(make_loader, [images[held_out], labels[held_out]])


def small_cnn(channels: int = 16) -> nn.Sequential:
    """A classifier of 8×8 gray images: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, 10),
    )


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy_fn(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    is_correct: Tensor = model(images).argmax(1) == labels
    return is_correct.float().mean()


def train_fleet(
    digits: Digits, device: torch.device, epochs: int, tell: Callable[[], None]
) -> tuple[Run, list[nn.Module]]:
    """Train the whole sweep as one fleet; give its run and the trained models."""
    begin = perf_counter()
    members = [tm.Member(*one.build(), name=one.name, seed=one.seed) for one in SETTINGS]
    loader = digits.make_loader()
    example = next(iter(digits.make_loader()))
    fleet = tm.Fleet(members, loss=loss_fn, example_batch=example, device=device)
    losses, built = [], begin
    for _ in range(epochs):
        for batch in loader:
            losses.append(fleet.step(batch).clone())
            if len(losses) == 1:  # the first step traces, fuses and, on a GPU, captures
                built = perf_counter()
            tell()
    fleet.sync()
    end = perf_counter()
    scores = fleet.evaluate([digits.validation], accuracy_fn)
    accuracies = torch.tensor([next(iter(scores[name].values())) for name in fleet.names])
    models = [member.model for member in fleet.members]
    return Run(torch.stack(losses).cpu(), accuracies, built - begin, end - built), models


def train_alone(digits: Digits, device: torch.device, epochs: int, tell: Callable[[], None]) -> Run:
    """Train the members one after another in a plain PyTorch loop, each on the fleet's batches."""
    losses, accuracies = [], []
    begin = perf_counter()
    for setting in SETTINGS:
        model, optimizer = setting.build()
        model.to(device)
        loader = digits.make_loader()
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                tell()
        with torch.no_grad():
            accuracies.append(accuracy_fn(model, digits.validation))
    stacked = torch.stack(losses).cpu().view(len(SETTINGS), -1).T
    return Run(stacked, torch.stack(accuracies).cpu(), 0.0, perf_counter() - begin)


def show(fused: Run, alone: Run, order: list[int], console: Console) -> None:
    """Print each member's last loss and accuracy, how far the losses differ, and both wall times."""
    table = Table(title="The same results: in the fleet | trained alone", title_justify="left")
    for heading in ("member", "last loss", "alone", "accuracy", "alone"):
        table.add_column(heading, justify="left" if heading == "member" else "right")
    for row in order:
        losses = [f"{run.losses[-1, row]:.5f}" for run in (fused, alone)]
        accuracies = [f"{run.accuracies[row]:.1%}" for run in (fused, alone)]
        table.add_row(SETTINGS[row].name, *losses, *accuracies)
    console.print(table)
    differences = (fused.losses - alone.losses).abs().amax(1)
    num_steps, num_members = fused.losses.shape
    first = min(10, num_steps)
    build, train = fused.build_seconds, fused.train_seconds
    console.print(
        f"largest difference of any loss: {differences[:first].max():.1e} in the first {first} steps, "
        f"{differences.max():.1e} in all {num_steps} (rounding)\n"
        f"as one fleet {build + train:6.1f} s: {build:.1f} s to build, {train:.1f} s to train\n"
        f"one by one   {alone.train_seconds:6.1f} s for the same {num_members} members and batches\n"
        f"{alone.train_seconds / (build + train):.1f}× faster, {alone.train_seconds / train:.1f}× once built"
    )


def run_demo(*, device: str, epochs: int, out: Path, console: Console | None = None) -> tuple[Run, Run]:
    """Train the sweep both ways, print the comparison, save the best member; give both runs.

    ``out`` gets the best member's weights (``best.safetensors``) and settings with score (``best.json``).
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "torch sees no CUDA device here; use --device cpu or --device auto", param_hint="--device"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = console or Console(highlight=False)
    place = torch.device(device)
    digits = Digits.load(place)
    SETTINGS[0].build()  # torch imports most of itself for a first optimizer: neither way is to pay for both
    num_steps = epochs * len(digits.make_loader())
    console.print(
        f"{len(SETTINGS)} small CNNs on handwritten digits: {len(LEARNING_RATES)} learning rates × "
        f"{len(WEIGHT_DECAYS)} weight decays × {len(SEEDS)} seeds, {num_steps} steps each, on {device}"
    )
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("as one fleet", total=num_steps)
        fused, models = train_fleet(digits, place, epochs, lambda: bars.advance(task))
        other = bars.add_task("one by one", total=num_steps * len(SETTINGS))
        alone = train_alone(digits, place, epochs, lambda: bars.advance(other))
    accuracies, losses = fused.accuracies.tolist(), fused.losses[-1].tolist()
    order = sorted(range(len(SETTINGS)), key=lambda row: (-accuracies[row], losses[row]))
    show(fused, alone, order, console)
    best = SETTINGS[order[0]]
    out.mkdir(parents=True, exist_ok=True)
    weights = models[order[0]].state_dict()
    save_file({name: tensor.detach().cpu() for name, tensor in weights.items()}, out / "best.safetensors")
    score = {"epochs": epochs, "validation_accuracy": accuracies[order[0]]}
    record = json.dumps({"name": best.name, **asdict(best), **score}, indent=2)
    (out / "best.json").write_text(record + "\n", encoding="utf-8")
    console.print(f"best member: {best.name}, saved as {out / 'best.safetensors'}", soft_wrap=True)
    return fused, alone
