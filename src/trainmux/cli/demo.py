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

Loaders = Callable[[], DataLoader[Any]]
"""Makes loaders of the training images, all with the same batches in the same order."""


class SmallCNN(nn.Sequential):
    """Classify 8×8 gray images: two convolutions and a linear layer."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * channels, 10),
        )


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
            model = SmallCNN()
        return model, torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Run:
    """One way to train the sweep: losses ``[step, member]``, validation accuracies, wall times."""

    losses: Tensor
    accuracies: Tensor
    build_seconds: float
    train_seconds: float


def settings() -> list[Setting]:
    """Sixteen members: learning rate × weight decay × seed."""
    return [Setting(*values) for values in product(LEARNING_RATES, WEIGHT_DECAYS, SEEDS)]


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy_fn(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    is_correct: Tensor = model(images).argmax(1) == labels
    return is_correct.float().mean()


def load_data(device: torch.device) -> tuple[Loaders, list[Any]]:
    """Split scikit-learn's 1,797 digits into loaders for training and one batch for validation."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits, dtype=torch.long, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    held_out, kept = order[:NUM_VALIDATION], order[NUM_VALIDATION:]
    train = TensorDataset(images[kept], labels[kept])

    def make_loader() -> DataLoader[Any]:
        # Whole batches are indexed at once, so that loading does not hide the time of training.
        sampler = RandomSampler(train, generator=torch.Generator().manual_seed(1))
        return DataLoader(train, sampler=BatchSampler(sampler, BATCH_SIZE, drop_last=True), batch_size=None)

    return make_loader, [images[held_out], labels[held_out]]


def train_fleet(
    loaders: Loaders, validation: list[Any], device: torch.device, epochs: int, tell: Callable[[], None]
) -> tuple[Run, list[nn.Module]]:
    """Train the whole sweep as one fleet; give its run and the trained models."""
    begin = perf_counter()
    members = []
    for setting in settings():
        model, optimizer = setting.build()
        members.append(tm.Member(model, optimizer, name=setting.name, seed=setting.seed))
    fleet = tm.Fleet(members, loss=loss_fn, example_batch=next(iter(loaders())), device=device)
    losses, built, loader = [], begin, loaders()
    for _ in range(epochs):
        for batch in loader:
            losses.append(fleet.step(batch).clone())
            if len(losses) == 1:  # the first step traces, fuses and, on a GPU, captures
                built = perf_counter()
            tell()
    fleet.sync()
    end = perf_counter()
    scores = fleet.evaluate([validation], accuracy_fn)
    accuracies = torch.tensor([next(iter(scores[name].values())) for name in fleet.names])
    models = [member.model for member in fleet.members]
    return Run(torch.stack(losses).cpu(), accuracies, built - begin, end - built), models


def train_alone(
    loaders: Loaders, validation: list[Any], device: torch.device, epochs: int, tell: Callable[[], None]
) -> Run:
    """Train the members one after another in a plain PyTorch loop, each on the fleet's batches."""
    losses, accuracies = [], []
    begin = perf_counter()
    for setting in settings():
        model, optimizer = setting.build()
        model.to(device)
        loader = loaders()
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                tell()
        with torch.no_grad():
            accuracies.append(accuracy_fn(model, validation))
    stacked = torch.stack(losses).cpu()
    seconds = perf_counter() - begin
    return Run(stacked.view(len(settings()), -1).T, torch.stack(accuracies).cpu(), 0.0, seconds)


def results_table(fused: Run, alone: Run) -> Table:
    """Each member, best accuracy first: its last loss and its accuracy, in the fleet and alone."""
    table = Table(title="The same results: in the fleet | trained alone", title_justify="left")
    for heading in ("member", "last loss", "alone", "accuracy", "alone"):
        table.add_column(heading, justify="left" if heading == "member" else "right")
    for row in _ranked(fused):
        table.add_row(
            settings()[row].name,
            f"{fused.losses[-1, row]:.5f}",
            f"{alone.losses[-1, row]:.5f}",
            f"{fused.accuracies[row]:.1%}",
            f"{alone.accuracies[row]:.1%}",
        )
    return table


def summary(fused: Run, alone: Run) -> list[str]:
    """State how far the losses differ, and both wall times."""
    differences = (fused.losses - alone.losses).abs().amax(1)
    num_steps, num_members = fused.losses.shape
    first = min(10, num_steps)
    build, train, whole = fused.build_seconds, fused.train_seconds, fused.build_seconds + fused.train_seconds
    return [
        f"largest difference of any loss: {differences[:first].max():.1e} in the first {first} steps, "
        f"{differences.max():.1e} in all {num_steps} (rounding)",
        f"as one fleet {whole:6.1f} s: {build:.1f} s to build, {train:.1f} s to train",
        f"one by one   {alone.train_seconds:6.1f} s for the same {num_members} members and batches",
        f"{alone.train_seconds / whole:.1f}× faster, {alone.train_seconds / train:.1f}× once built",
    ]


def save_best(model: nn.Module, fused: Run, row: int, epochs: int, out: Path) -> Path:
    """Write weights to ``best.safetensors``, settings and score to ``best.json``, in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "best.safetensors"
    save_file({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, weights)
    score = {"epochs": epochs, "validation_accuracy": fused.accuracies[row].item()}
    setting = settings()[row]
    record = {"name": setting.name, **asdict(setting), **score}
    (out / "best.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return weights


def run_demo(*, device: str, epochs: int, out: Path, console: Console | None = None) -> tuple[Run, Run]:
    """Train the sweep both ways, print the comparison, save the best member; give both runs."""
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "torch sees no CUDA device here; use --device cpu or --device auto", param_hint="--device"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = console or Console(highlight=False)
    place = torch.device(device)
    loaders, validation = load_data(place)
    members, num_steps = settings(), epochs * len(loaders())
    console.print(
        f"{len(members)} small CNNs on handwritten digits: {len(LEARNING_RATES)} learning rates × "
        f"{len(WEIGHT_DECAYS)} weight decays × {len(SEEDS)} seeds, {num_steps} steps each, on {device}"
    )
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("as one fleet", total=num_steps)
        fused, models = train_fleet(loaders, validation, place, epochs, lambda: bars.advance(task))
        other = bars.add_task("one by one", total=num_steps * len(members))
        alone = train_alone(loaders, validation, place, epochs, lambda: bars.advance(other))
    console.print(results_table(fused, alone))
    for line in summary(fused, alone):
        console.print(line)
    best = _ranked(fused)[0]
    weights = save_best(models[best], fused, best, epochs, out)
    console.print(f"best member: {members[best].name}, saved as {weights}", soft_wrap=True)
    return fused, alone


def _ranked(run: Run) -> list[int]:
    """Members by accuracy, then by loss."""
    return sorted(
        range(len(run.accuracies)), key=lambda row: (-run.accuracies[row].item(), run.losses[-1, row].item())
    )
