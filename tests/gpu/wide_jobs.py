"""Jobs with megabytes of feature maps, for tests of what the device holds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from colocation_cases import assert_same_state, cycled, state_of
from torch import Tensor, nn

import trainmux as tm

MIB = 1 << 20
REGION = 2 * MIB
BATCH_SIZE = 4096
WIDTH = 512


def cuda() -> torch.device:
    """The device that tests run on."""
    return torch.device("cuda", torch.cuda.current_device())


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


@functools.cache
def wide_alone(seed: int, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    fleet = wide_fleet(seed)
    losses = [fleet.step(batch).cpu() for batch in cycled(wide_batches(seed), steps)]
    return torch.stack(losses), state_of(fleet)


def assert_wide_as_alone(result: tm.ColocationResult, job: tm.Job, seed: int) -> None:
    steps = result[job.name].num_steps
    losses, state = wide_alone(seed, steps)
    assert torch.equal(result[job.name].losses, losses), job.name
    assert job.fleet is not None
    assert_same_state(state_of(job.fleet), state, job.name)


@functools.cache
def warm_up() -> None:
    """Have all kernels loaded that wide jobs use: they take memory of the context's, once."""
    tm.colocate([wide_job("a", 0, 2), wide_job("b", 1, 2)], "20GiB", region_bytes=REGION, poisons=True).run()
    wide_alone(0, 2)
