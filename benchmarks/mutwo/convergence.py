"""Convergence: a small language model on the text of Python's own library, in three ways, to one accuracy.

Members differ in their learning rate. Every way sees the same batches in the same order, and the same code
evaluates the members' own models: the share of bytes of a held-out text that are guessed right.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainmux as tm
from benchmarks.plans import static_bytes
from benchmarks.workloads.language import TransformerBlock

from .cells import TIGHT, Cell
from .planned import Protocol, Row

LENGTH = 64
NUM_EVALUATIONS = 20
RATES = (1e-3, 5e-4, 2e-3, 2.5e-4)
MAX_BYTES = 4 << 20
SMALLEST_SHARES = (1 / 2, 2 / 3, 5 / 6, 1.0)
"""Of the memory beyond static that a plan without decisions needs: the first one that works is taken."""


class ByteModel(nn.Module):
    """Bytes ``[B, T]`` → logits ``[B, T, 256]`` of the byte that follows each."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, hidden_size)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, hidden_size))
        self.blocks = nn.ModuleList(TransformerBlock(hidden_size, 4, 0.0) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, 256)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.bytes(text) + self.positions
        for block in self.blocks:
            hidden = block(hidden, self.mask)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of every byte but the first, of rows of ``LENGTH + 1`` bytes."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


@cache
def text() -> Tensor:
    """Sources of Python's own library, in the order of their names; the last ones are held out."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    joined = b"".join(source.read_bytes() for source in sources)[:MAX_BYTES]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def batch_of(number: int, batch_size: int, held_out: int) -> Tensor:
    """Draw rows from the text before the last ``held_out`` bytes; the same for the same number."""
    source = text()[:-held_out]
    generator = torch.Generator().manual_seed(number)
    begins = torch.randint(len(source) - LENGTH - 1, (batch_size, 1), generator=generator)
    return source[begins + torch.arange(LENGTH + 1)]


@torch.no_grad()
def accuracy(model: nn.Module, held_out: int) -> float:
    """The share of the last ``held_out`` bytes that the model guesses right."""
    num_rows = held_out // (LENGTH + 1)
    rows = text()[-num_rows * (LENGTH + 1) :].view(num_rows, -1).to(next(model.parameters()).device)
    right = sum((model(part[:, :-1]).argmax(-1) == part[:, 1:]).sum() for part in rows.split(128))
    return float(right) / rows[:, 1:].numel()


def measure(cells: Sequence[Cell], protocol: Protocol) -> Iterator[Row]:
    for cell in cells:
        yield {**cell.key, **_trained(cell, protocol)}


def _trained(cell: Cell, protocol: Protocol) -> Row:
    sizes, device = protocol.text, protocol.device
    models = []
    for number in range(cell.members):
        torch.manual_seed(number)
        models.append(ByteModel(sizes.hidden_size, sizes.num_layers).train())
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate) for model, rate in zip(models, RATES, strict=False)
    ]
    row: Row = {"steps": [], "accuracy": [], "rates": list(RATES[: cell.members])}
    if cell.way == "one by one":
        for model in models:
            model.to(device)
        step, sync = _one_by_one(models, optimizers, protocol), lambda: None
    else:
        lowering = "inductor" if device.type == "cuda" else "aten"
        members = [
            tm.Member(model, optimizer, seed=number)
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
        ]
        example = batch_of(0, cell.batch_size, sizes.held_out)
        options: dict[str, Any] = {"precision": protocol.precision, "lowering": lowering}
        fleet = tm.Fleet(members, loss_of, example, device=device, **options)
        if cell.budget == TIGHT:
            row |= _planned(fleet, protocol)
        step, sync = fleet.step, fleet.sync
    begin = perf_counter()
    for number in range(sizes.steps):
        step(batch_of(number, cell.batch_size, sizes.held_out).to(device))
        if (number + 1) % max(1, sizes.steps // NUM_EVALUATIONS) == 0:
            sync()
            row["steps"].append(number + 1)
            row["accuracy"].append([accuracy(model, sizes.held_out) for model in models])
    return row | {"seconds": perf_counter() - begin}


def _one_by_one(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], protocol: Protocol
) -> Any:
    def step(batch: Tensor) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            enabled = protocol.precision == "bf16"
            with torch.autocast(protocol.device.type, dtype=torch.bfloat16, enabled=enabled):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()

    return step


def _planned(fleet: tm.Fleet, protocol: Protocol) -> Row:
    """Use the paper's policy within a budget below the peak, the smallest of a few that works."""
    whole = fleet.plan(None, "none", time_limit=protocol.plan_seconds)
    held = static_bytes(whole) + whole.record.fixed_bytes
    for share in SMALLEST_SHARES:
        budget = int(held + share * (whole.peak_bytes - held))
        try:
            plan = fleet.plan(budget, "mutwo", time_limit=protocol.plan_seconds)
        except tm.BudgetError:
            continue
        found = {"num_swaps": len(plan.swaps), "num_recomputes": len(plan.recomputes)}
        return {"share": share, "budget_bytes": plan.budget_bytes, **found}
    raise tm.BudgetError(
        f"expected a plan by mutwo within {whole.peak_bytes} bytes, got none; use a larger batch"
    )
