"""Numbers and batches on their way to the device: right for every step, however far the host is ahead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainmux as tm
from trainmux.engine import HostLeaf, Landing, Transfers

CUDA = torch.device("cuda")
SLEEP_CYCLES = 200_000_000  # about a tenth of a second
NUM_STEPS = 40


def sleep(cycles: int = SLEEP_CYCLES) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def mse(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def make_batches(num: int, size: int = 16) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(num)
    ]


def make_member(seed: int) -> tm.Member:
    """Its learning rate is another one with every step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 / (1.0 + 0.3 * step * (seed + 1))
    )
    return tm.Member(model, optimizer, name=f"m{seed}", seed=seed, scheduler=schedule)


def make_fleet(engine: str = "cuda_graphs") -> tm.Fleet:
    return tm.Fleet(
        [make_member(seed) for seed in range(4)],
        loss=mse,
        example_batch=make_batches(1)[0],
        device="cuda",
        deterministic=True,
        engine=engine,
        lowering="aten",
    )


def weights(fleet: tm.Fleet) -> list[Tensor]:
    fleet.sync()
    return [tensor.detach().clone() for member in fleet.members for tensor in member.model.parameters()]


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left.cpu(), right.cpu())


def step_by_step(fleet: tm.Fleet, batches: Sequence[Any]) -> list[Tensor]:
    """The device has finished each step before the host begins the next."""
    losses = []
    for batch in batches:
        losses.append(fleet.step(batch))
        torch.cuda.synchronize()
    return losses


@functools.cache
def expected() -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of the reference engine, step by step."""
    fleet = make_fleet("reference")
    return step_by_step(fleet, make_batches(NUM_STEPS)), weights(fleet)


@pytest.mark.parametrize(
    ("engine", "where"),
    [
        *(("cuda_graphs", where) for where in ("host", "one buffer", "pinned", "device")),
        ("reference", "host"),
    ],
)
def test_a_host_that_is_far_ahead_changes_nothing(engine: str, where: str) -> None:
    """Each step has another learning rate and bias correction for every member; a batch in ordinary memory
    may be overwritten as soon as ``step`` returns."""
    fleet, losses, batches = make_fleet(engine), [], make_batches(NUM_STEPS)
    if where in ("pinned", "device"):
        batches = [
            tuple(leaf.pin_memory() if where == "pinned" else leaf.cuda() for leaf in batch)
            for batch in batches
        ]
    buffer = tuple(torch.empty_like(leaf) for leaf in batches[0])
    for number, batch in enumerate(batches):
        if where == "one buffer":
            for target, source in zip(buffer, batch, strict=True):
                target.copy_(source)
            batch = buffer
        if number in (2, 13, 30):  # by now, whatever has to be captured is
            sleep()
        losses.append(fleet.step(batch))
    assert_same(losses, expected()[0])
    assert_same(weights(fleet), expected()[1])


def test_batches_of_many_sizes_share_the_landing_places() -> None:
    """In ordinary memory and in pinned one."""
    sizes = [16, 3, 16, 40, 3, 16, 40] * 3
    batches = [
        tuple(leaf[:size].pin_memory() if size == 3 else leaf[:size] for leaf in batch)
        for size, batch in zip(sizes, make_batches(21, 40), strict=True)
    ]
    ahead, losses = make_fleet(), []
    for number, batch in enumerate(batches):
        if number in (5, 12, 17):
            sleep()
        losses.append(ahead.step(batch))
    assert_same(losses, step_by_step(make_fleet("reference"), batches))


def test_evaluation_between_steps_disturbs_nothing() -> None:
    fleet, losses, metrics = make_fleet(), [], []
    batches = make_batches(6)
    for batch in batches:
        losses.append(fleet.step(batch))
        metrics.append(fleet.evaluate(batches[:3]))
    assert_same(losses, expected()[0][:6])
    assert metrics[0] != metrics[-1]


def test_members_that_stop_come_and_go_while_the_host_is_ahead() -> None:
    def live(fleet: tm.Fleet, careful: bool) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(make_batches(24)):
            if number == 6:
                fleet.stop("m1")
            if number == 12:
                fleet.replace("m2", make_member(7))
            if number == 18:
                fleet.add(make_member(8))
            if not careful and number % 6 in (2, 5):
                sleep()
            losses.append(fleet.step(batch))
            if careful:
                torch.cuda.synchronize()
        return losses + weights(fleet)

    assert_same(live(make_fleet(), False), live(make_fleet("reference"), True))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*pin_memory.*")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_fit_is_the_same_with_loader_workers(pin_memory: bool) -> None:
    inputs, targets = (torch.cat(leaves) for leaves in zip(*make_batches(10), strict=True))

    def run(num_workers: int) -> list[Tensor]:
        torch.manual_seed(3)
        loader = DataLoader(
            TensorDataset(inputs, targets),
            batch_size=16,
            shuffle=True,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(5),
        )
        fleet = make_fleet()
        fleet.fit(loader, epochs=2, progress=False)
        return weights(fleet)

    assert_same(run(0), run(2))


def test_steps_with_host_batches_do_not_wait_for_the_device() -> None:
    """The host enqueues a few steps while the device sleeps: each returns long before the sleep is over."""
    fleet = make_fleet()
    batches = make_batches(8)
    for batch in batches:
        fleet.step(batch)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    sleep(10 * SLEEP_CYCLES)
    done.record()
    fleet.step(batches[0])
    fleet.step(batches[1])
    assert not done.query()
    torch.cuda.synchronize()


# ---- the parts by themselves ---------------------------------------------------------------------------


def test_a_batch_lands_while_a_step_is_running() -> None:
    landing = Landing(CUDA)
    leaf = HostLeaf((torch.ones(1 << 20),), torch.float32)
    for _ in range(4):
        landing.land([leaf])
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    sleep(10 * SLEEP_CYCLES)
    asleep.record()
    landing.land([leaf])
    landing._buffers[landing._last].copied.synchronize()
    assert not asleep.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("buffer_bytes", [1 << 12, 1 << 20, 64 << 20])
def test_many_tensors_cross_the_link_unchanged(buffer_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1000, 333), (7,), (), (0,), (64, 3, 3, 3), (2_000_003,), (5, 5)]
    on_host = [torch.randn(shape, generator=generator) for shape in shapes]
    on_host += [torch.arange(1001), torch.randn(77, generator=generator).to(torch.bfloat16)]
    on_host.append(
        torch.randn(8, 16, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last)
    )
    on_host.append(torch.randn(33, 9, generator=generator).t())
    transfers = Transfers(torch.device("cuda", 0), buffer_bytes)
    on_device = [torch.zeros_like(tensor, device="cuda") for tensor in on_host]
    sleep(10_000_000)  # what is queued before must not be overtaken
    for tensor in on_device:
        tensor.fill_(1)
    transfers.copy(list(zip(on_device, on_host, strict=True)))
    back = [torch.zeros_like(tensor) for tensor in on_host]
    transfers.copy(list(zip(back, on_device, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(back, on_host, strict=True))
    # Another dtype, and from device to device, by torch's own copies.
    wide = torch.zeros(1000, 333, dtype=torch.float64)
    twin = torch.zeros(7, device="cuda")
    transfers.copy([(wide, on_device[0]), (twin, on_device[1])])
    assert torch.equal(wide, on_host[0].double())
    assert torch.equal(twin.cpu(), on_host[1])
