"""Who holds which memory of a GPU while jobs share it, at every stage of a co-location.

    python benchmarks/colocate_memory.py --guests 4 --steps 6

Two wide MLPs side by side within the smallest budget, the same with one that cannot be traced, and guests
that come and go. At each stage the device is looked at, and what it holds is told by torch's pools and
streams, by job, by arena, and as the rest (context, graphs). The last line says by how much the budget was
passed, if it was. Memory only: times are not measured here. A device that others use meanwhile gives other
numbers.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from trainmux.colocate._memory_facts import MemoryFacts, look_at_memory

import trainmux as tm
from trainmux.errors import TrainmuxWarning

MIB = 1 << 20
REGION = 2 * MIB


class Stages:
    """Looks at the device, and tells what it sees against the first look."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: MemoryFacts | None = None
        self.most_over: int | None = None

    def tell(self, stage: str, colocation: tm.Colocation | None = None, *, quiet: bool = False) -> None:
        """One look; ``quiet`` notes only whether the budget was passed."""
        facts = look_at_memory(self._device, colocation)
        if self._first is None:
            self._first = facts
        if colocation is not None and facts.jobs:
            over = facts.used_bytes - self._first.used_bytes - colocation.budget_bytes
            self.most_over = over if self.most_over is None else max(self.most_over, over)
        if not quiet:
            print(f"== {stage}\n{facts.table(self._first)}\n", flush=True)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def untraceable(model: nn.Module, batch: Tensor) -> Tensor:
    loss = mean_square(model, batch)
    return loss * 2 if float(loss.detach()) > 1e9 else loss


def job(name: str, options: argparse.Namespace, steps: int | None, *, eager: bool = False) -> tm.Job:
    layers = [one for _ in range(options.layers) for one in (nn.Linear(512, 512), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [torch.randn(options.batch, 512) for _ in range(3)]
    if eager:
        return tm.Job(name, model, optimizer, untraceable, batches, steps=steps, device="cuda")
    member = tm.Member(model, optimizer, name=name)
    fleet = tm.Fleet([member], mean_square, batches[0], device="cuda", lowering=options.lowering)
    return tm.Job(name, fleet=fleet, loader=batches, steps=steps)


def smallest_budget(colocation: tm.Colocation) -> int:
    rows = colocation.results().jobs.values()
    return sum(row.local_bytes for row in rows) + max(row.peak_bytes for row in rows)


def pair(options: argparse.Namespace, stages: Stages, *, eager: bool) -> None:
    """Two jobs within the smallest budget."""
    what = "a fused and an eager job" if eager else "two fused jobs"
    jobs = [job("a", options, options.steps), job("b", options, options.steps, eager=eager)]
    stages.tell(f"{what}: built")

    def look(event: tm.JobStep) -> None:
        is_last = event.step == options.steps
        stages.tell(f"{what}: step {event.step} of {event.job}", event.colocation, quiet=not is_last)

    colocation = tm.colocate(jobs, "90%", region_bytes=REGION, callbacks=[look])
    stages.tell(f"{what}: co-located")
    colocation.set_budget(smallest_budget(colocation))
    print_failures(colocation.run())
    del jobs, colocation
    settle()
    stages.tell(f"{what}: over")


def guests(options: argparse.Namespace, stages: Stages) -> None:
    """One job that stays, others that come and go."""
    num_seen = 0

    def turn_over(event: tm.JobStep) -> None:
        nonlocal num_seen
        others = [row for row in event.colocation.usage() if row.name != "stays" and row.state != "done"]
        if event.job != "stays" or others or num_seen > options.guests:
            return
        settle()
        stages.tell(f"{num_seen} guests have left", event.colocation)
        num_seen += 1
        if num_seen > options.guests:
            event.colocation.remove("stays")
        else:
            event.colocation.add(job(f"guest {num_seen}", options, 2))

    stays = job("stays", options, 1 << 20)
    print_failures(tm.colocate([stays], "90%", region_bytes=REGION, callbacks=[turn_over]).run())


def print_failures(result: Any) -> None:
    for name in result.failed:
        print(f"FAILED {name}: {result[name].error!r}", flush=True)


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--guests", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--lowering", default="aten", choices=("aten", "inductor"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore", TrainmuxWarning)
    stages = Stages(torch.device("cuda", torch.cuda.current_device()))
    # Kernels are loaded into the context when they first run, and do not count.
    for eager in (False, True):
        jobs = [job("a", options, 2), job("b", options, 2, eager=eager)]
        print_failures(tm.colocate(jobs, "90%", region_bytes=REGION).run())
    del jobs
    settle()
    torch._C._cuda_clearCublasWorkspaces()  # no graph is left that may use them; jobs' own are to be seen
    settle()
    stages.tell("start, kernels loaded")
    pair(options, stages, eager=False)
    pair(options, stages, eager=True)
    guests(options, stages)
    assert stages.most_over is not None
    print(f"most beyond the budget: {stages.most_over / MIB:.1f} MiB (below 0: never)")
    return int(stages.most_over > 0)


if __name__ == "__main__":
    sys.exit(main())
