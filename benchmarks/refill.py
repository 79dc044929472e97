"""``python -m benchmarks refill``: what it costs to give the slots of a fleet to other members as it trains.

Every member lives so many steps, then another one takes its slot, as in a search; their ends are spread over
the time. Newcomers are there, and are prepared by a thread of its own. They differ from those before in
settings of the optimizer, or in numbers of their code, too: the probability of dropout.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import trainmux as tm

from .cases import Case, find_case, scaled, split, to_device
from .environment import choose_device, describe
from .records import Results
from .timing import seconds_of

VARIED = ("settings", "numbers")
PARTS = ("wait", "drop", "add", "next_step", "step", "prepare")
"""Of a refill, on the host: the wait for a newcomer, dropping, adding, the step after it, and any other one;
and what the other thread does."""
AHEAD = 3
"""Newcomers that are prepared, or about to be, beside those that train."""


def mlp(seed: int) -> nn.Module:
    """Two layers with dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    """32 vectors and their classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def case_of(name: str, device: str) -> tuple[Case, int]:
    """The model of that name, in full size on a GPU, and how many of them train at once."""
    if name == "mlp":
        return Case("mlp", 32, mlp, classify, vectors), 64
    if name != "bert":
        raise typer.BadParameter(f"expected bert or mlp, got {name}")
    return find_case("bert_base_mlm" if device == "cuda" else "small:bert_mlm"), 8


class Newcomers:
    """Members one after another, prepared by another thread before it is their turn."""

    def __init__(self, fleet: tm.Fleet, members: Sequence[tm.Member], pool: ThreadPoolExecutor) -> None:
        self._fleet, self._pool = fleet, pool
        self._rest = deque(members)
        self._ready: deque[tuple[tm.Member, Future[float]]] = deque()
        self._ask()

    def _ask(self) -> None:
        while self._rest and len(self._ready) < AHEAD:
            member = self._rest.popleft()
            self._ready.append((member, self._pool.submit(self._prepare, member)))

    def _prepare(self, member: tm.Member) -> float:
        begin = perf_counter()
        self._fleet.prepare(member)
        return perf_counter() - begin

    def take(self) -> tuple[tm.Member, float]:
        """The next one, and the seconds that it took to prepare it."""
        member, prepared = self._ready.popleft()
        seconds = prepared.result()
        self._ask()
        return member, seconds


def member_of(base: nn.Module, number: int, vary: str) -> tm.Member:
    """One configuration by number, of a copy of ``base``: drawing weights takes long."""
    model = scaled(base, number % 100)
    dropout = 0.1 if vary == "settings" else 0.05 + 0.3 * (number * 0.618034 % 1)
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    rate, decay = 1e-4 * (1 + number % 10), 0.01 * (1 + number % 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    return tm.Member(model, optimizer, name=f"trial-{number}")


def measure(
    name: str, members: int | None, vary: str, steps_per_life: int, lives: int, rounds: int, device: str
) -> dict[str, Any]:
    """Time steps with and without refills in turn, and the parts of a refill on the host."""
    case, usual = case_of(name, device)
    width, place = members or usual, torch.device(device)
    batch = to_device(case.batch(0), place)
    base = case.build(0)
    first = [member_of(base, number, vary) for number in range(width)]
    on_gpu = place.type == "cuda"
    how: dict[str, Any] = {"precision": "bf16", "lowering": "inductor"} if on_gpu else {"lowering": "aten"}
    fleet = tm.Fleet(first, case.loss, batch, device=device, **how)
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    number = width

    def timed(part: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin = perf_counter()
        result = call(*args, **options)
        parts[part].append(perf_counter() - begin)
        return result

    def newcomers(count: int) -> list[tm.Member]:
        nonlocal number
        number += count
        return [member_of(base, each, vary) for each in range(number - count, number)]

    def train(num_steps: int, queue: Newcomers | None) -> None:
        """Steps; with a queue, members are replaced one by one, ``width`` in each life."""
        num_done = 0
        for step in range(num_steps):
            part = "step"
            while queue is not None and num_done < (step + 1) * width // steps_per_life:
                member, prepared_s = timed("wait", queue.take)
                timed("drop", fleet.drop, fleet.names[0], write_back=False)
                timed("add", fleet.add, member)
                parts["prepare"].append(prepared_s)
                num_done, part = num_done + 1, "next_step"
            timed(part, fleet.step, batch)

    num_steps = steps_per_life * lives
    seconds: dict[str, list[float]] = {"plain": [], "refilled": []}
    with ThreadPoolExecutor(1) as pool:
        fleet.step(batch)
        fleet.wait_until_compiled()
        # Before anything is timed: numbers that differ become inputs, memory is pinned, graphs are captured.
        train(steps_per_life, Newcomers(fleet, newcomers(width), pool))
        fleet.wait_until_compiled()
        for times in parts.values():
            times.clear()
        for _ in range(rounds):
            queue = Newcomers(fleet, newcomers(width * lives), pool)
            for way, given in (("plain", None), ("refilled", queue)):
                work = partial(train, num_steps, given)
                seconds[way].append(seconds_of(work, place) / num_steps)
    plain, refilled = (statistics.median(times) for times in seconds.values())
    return {
        "plain_step_ms": 1e3 * plain,
        "refilled_step_ms": 1e3 * refilled,
        "cost_percent": 100 * (refilled / plain - 1),
        "refills": width * lives * rounds,
        **{f"{part}_ms": 1e3 * statistics.median(times) for part, times in parts.items()},
        "longest_add_ms": 1e3 * max(parts["add"]),
        "detail": {way: [1e3 * each for each in times] for way, times in seconds.items()},
    }


def command(
    models: Annotated[str, typer.Option(help="bert, mlp, with commas.")] = "bert,mlp",
    members: Annotated[int | None, typer.Option(min=1, help="Slots; by default 8 and 64.")] = None,
    vary: Annotated[str, typer.Option(help="What newcomers differ in.")] = ",".join(VARIED),
    steps_per_life: Annotated[int, typer.Option(min=1, help="Steps of each member.")] = 100,
    lives: Annotated[int, typer.Option(min=1, help="Refills of each slot in a round.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="With and without refills, in turn.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="File of results; rows measured before stay.")] = Path(
        "runs/bench/refill.json"
    ),
) -> None:
    """Compare steps of a fleet whose slots are refilled all the time with steps of one that is left alone."""
    place = choose_device(device)
    results = Results(out, "refill", describe(place))
    for name in split(models):
        for each in split(vary):
            if each not in VARIED:
                raise typer.BadParameter(f"expected {' or '.join(VARIED)}, got {each}")
            row = measure(name, members, each, steps_per_life, lives, rounds, place)
            about = {"model": name, "members": members or case_of(name, place)[1], "vary": each}
            results.add({**about, "steps_per_life": steps_per_life, **row})
            print(
                f"{name}, {each}: {row['cost_percent']:.1f}% of {row['plain_step_ms']:.2f} ms; on the host "
                f"drop {row['drop_ms']:.2f}, add {row['add_ms']:.2f}, prepare {row['prepare_ms']:.2f} ms",
                flush=True,
            )
