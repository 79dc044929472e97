"""Fleets and jobs with megabytes of feature maps, for tests of what the device holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from colocation_cases import assert_same_state, cycled, smallest_budget, state_of
from torch import Tensor, nn

import trainmux as tm

MIB = 1 << 20
REGION = 2 * MIB
BATCH_SIZE = 4096
WIDTH = 512


def cuda() -> torch.device:
    """The device that tests run on."""
    return torch.device("cuda", torch.cuda.current_device())


def used_bytes() -> int:
    """What is in use on the device, the context included."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def wide_model(seed: int, num_layers: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers)


@functools.cache
def wide_batches(seed: int, size: int = BATCH_SIZE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, WIDTH, generator=generator) for _ in range(3)]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def wide_fleet(seed: int, num_layers: int = 6, **options: Any) -> tm.Fleet:
    model = wide_model(seed, num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    member = tm.Member(model, optimizer, name=f"wide {seed}")
    settings: dict[str, Any] = {"device": "cuda", "deterministic": True, "lowering": "aten", **options}
    return tm.Fleet([member], mean_square, wide_batches(seed)[0], **settings)


def wide_job(name: str, seed: int, steps: int | None, **options: Any) -> tm.Job:
    given: dict[str, Any] = {"fleet": wide_fleet(seed), "loader": wide_batches(seed), **options}
    return tm.Job(name, steps=steps, **given)


Trained = tuple[Tensor, dict[str, Tensor]]
"""Losses and state."""


def trained_alone(fleet: tm.Fleet, batches: Sequence[Any], steps: int) -> Trained:
    losses = torch.stack([fleet.step(batch).cpu() for batch in cycled(batches, steps)])
    return losses, state_of(fleet)


def assert_as_alone(result: tm.ColocationResult, job: tm.Job, alone: Trained) -> None:
    assert job.fleet is not None
    assert torch.equal(result[job.name].losses, alone[0]), job.name
    assert_same_state(state_of(job.fleet), alone[1], job.name)


@functools.cache
def wide_alone(seed: int, steps: int) -> Trained:
    return trained_alone(wide_fleet(seed), wide_batches(seed), steps)


def assert_wide_as_alone(result: tm.ColocationResult, *jobs: tm.Job) -> None:
    """Wide jobs have the losses and the state of their fleets alone."""
    for job in jobs:
        assert job.fleet is not None
        (member,) = job.fleet.names
        seed = int(member.removeprefix("wide "))
        assert_as_alone(result, job, wide_alone(seed, result[job.name].num_steps))


def run_beside(
    jobs: Sequence[tm.Job], *, spare_bytes: int | None = None, **options: Any
) -> tm.ColocationResult:
    """Run jobs, of which none may fail; with ``spare_bytes`` in so much more than the smallest budget."""
    colocation = tm.colocate(jobs, "20GiB", region_bytes=REGION, **options)
    if spare_bytes is not None:
        colocation.set_budget(smallest_budget(colocation) + spare_bytes)
    result = colocation.run()
    assert [repr(job.error) for job in result.jobs.values() if job.error] == []
    return result


@functools.cache
def warm_up() -> None:
    """Have all kernels loaded that wide jobs use: they take memory of the context's, once."""
    run_beside([wide_job("a", 0, 2), wide_job("b", 1, 2)], poisons=True)
    wide_alone(0, 2)


def captures_of(colocation: tm.Colocation) -> dict[str, int]:
    """How many graphs each job has captured."""
    return {name: admitted.work.num_captures for name, admitted in colocation._inside.items()}  # type: ignore[attr-defined]


# ---- fleets so large that segments of a megabyte or two do not matter -----------------------------------


def normed_member(number: int, features: int = 1024, depth: int = 6) -> tm.Member:
    torch.manual_seed(number)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(features, features), nn.GELU(), nn.LayerNorm(features)]
    model = nn.Sequential(*layers)
    return tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-3), name=f"m{number}")


def normed_batch(size: int, seed: int = 0, features: int = 1024) -> Tensor:
    """On the host."""
    return torch.randn(size, features, generator=torch.Generator().manual_seed(seed))


def normed_fleet(batch: Tensor, num_members: int = 4, depth: int = 6, **options: Any) -> tm.Fleet:
    members = [normed_member(number, features=batch.shape[1], depth=depth) for number in range(num_members)]
    return tm.Fleet(members, mean_square, batch, device="cuda", **options)
