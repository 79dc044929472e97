"""Numbers and batches on their way to the device: right for every step, however far the host is ahead."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_fleets import assert_same, batch_of, make_fleet, states
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import trainmux as tm
from trainmux.engine import HostLeaf, Landing, Transfers

CUDA = torch.device("cuda")
SLEEP_CYCLES = 200_000_000  # about a tenth of a second
NUM_STEPS = 40
NAME = "cnn_with_dropout"


def sleep(cycles: int = SLEEP_CYCLES) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@contextmanager
def device_asleep() -> Iterator[None]:
    """What is enqueued inside does not wait until the device wakes up."""
    torch.cuda.synchronize()
    awake = torch.cuda.Event()
    sleep(10 * SLEEP_CYCLES)
    awake.record()
    yield
    assert not awake.query()
    torch.cuda.synchronize()


def make_batches(num: int) -> list[tuple[Tensor, ...]]:
    return [batch_of(NAME, number) for number in range(num)]


def fleet_on(engine: str = "cuda_graphs") -> tm.Fleet:
    return make_fleet(NAME, engine=engine, deterministic=True, lowering="aten")


def step_by_step(fleet: tm.Fleet, batches: Sequence[Any]) -> list[Tensor]:
    """The device has finished each step before the host begins the next."""
    losses = []
    for batch in batches:
        losses.append(fleet.step(batch))
        torch.cuda.synchronize()
    return losses


def step_ahead(fleet: tm.Fleet, batches: Iterable[Any], asleep: Sequence[int]) -> list[Tensor]:
    """The host goes on while the device sleeps, before the steps of these numbers."""
    losses = []
    for number, batch in enumerate(batches):
        if number in asleep:
            sleep()
        losses.append(fleet.step(batch))
    return losses


@functools.cache
def expected() -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of the reference engine, step by step."""
    fleet = fleet_on("reference")
    return step_by_step(fleet, make_batches(NUM_STEPS)), states(fleet)


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
    fleet, batches = fleet_on(engine), make_batches(NUM_STEPS)
    if where in ("pinned", "device"):
        batches = [
            tuple(leaf.pin_memory() if where == "pinned" else leaf.cuda() for leaf in batch)
            for batch in batches
        ]

    def in_one_buffer() -> Iterator[tuple[Tensor, ...]]:
        buffer = tuple(torch.empty_like(leaf) for leaf in batches[0])
        for batch in batches:
            for target, source in zip(buffer, batch, strict=True):
                target.copy_(source)
            yield buffer

    fed = in_one_buffer() if where == "one buffer" else batches
    losses = step_ahead(fleet, fed, (2, 13, 30))  # by then, whatever has to be captured is
    assert_same(losses, expected()[0])
    assert_same(states(fleet), expected()[1])


def test_batches_of_many_sizes_share_the_landing_places() -> None:
    """In ordinary memory and in pinned one."""
    sizes = [3, 2, 3, 4, 2, 3, 4] * 3
    batches = [
        tuple(leaf[:size].pin_memory() if size == 2 else leaf[:size] for leaf in batch)
        for size, batch in zip(sizes, make_batches(21), strict=True)
    ]
    losses = step_ahead(fleet_on(), batches, (5, 12, 17))
    assert_same(losses, step_by_step(fleet_on("reference"), batches))


def test_evaluation_between_steps_disturbs_nothing() -> None:
    fleet, losses, metrics = fleet_on(), [], []
    batches = make_batches(6)
    for batch in batches:
        losses.append(fleet.step(batch))
        metrics.append(fleet.evaluate(batches[:3]))
    assert_same(losses, expected()[0][:6])
    assert metrics[0] != metrics[-1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*pin_memory.*")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_fit_is_the_same_with_loader_workers(pin_memory: bool) -> None:
    inputs, targets = (torch.cat(leaves) for leaves in zip(*make_batches(10), strict=True))

    def run(num_workers: int) -> list[Tensor]:
        torch.manual_seed(3)
        loader = DataLoader(
            TensorDataset(inputs, targets),
            batch_size=4,
            shuffle=True,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(5),
        )
        fleet = fleet_on()
        fleet.fit(loader, epochs=2, progress=False)
        return states(fleet)

    assert_same(run(0), run(2))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_steps_do_not_wait_for_the_device(where: str) -> None:
    fleet = fleet_on()
    batches = [tuple(leaf.to(where) for leaf in batch) for batch in make_batches(8)]
    for batch in batches:
        fleet.step(batch)
    with device_asleep():
        fleet.step(batches[0])
        fleet.step(batches[1])


# ---- the parts by themselves ---------------------------------------------------------------------------


def test_a_batch_lands_while_a_step_is_running() -> None:
    landing = Landing(CUDA)
    leaf = HostLeaf((torch.ones(1 << 20),), torch.float32)
    for _ in range(4):
        landing.land([leaf])
    with device_asleep():
        landing.land([leaf])
        landing._buffers[landing._last].copied.synchronize()


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
