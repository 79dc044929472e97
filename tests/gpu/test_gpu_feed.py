"""Numbers and batches on their way to the device: right for every step, however far the host is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainmux as tm
from trainmux.engine import HostFeed, HostLeaf, Landing, Transfers

CUDA = torch.device("cuda")
SLEEP_CYCLES = 200_000_000  # about a tenth of a second


def mse(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def make_batches(num: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(num)
    ]


def make_member(seed: int, optimizer: str = "AdamW", **options: Any) -> tm.Member:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01 * (seed + 1))
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 / (1.0 + 0.3 * step * (seed + 1)))
    return tm.Member(model, made, name=f"m{seed}", seed=seed, scheduler=schedule, **options)


def make_fleet(engine: str, optimizer: str = "AdamW", **options: Any) -> tm.Fleet:
    return tm.Fleet(
        [make_member(seed, optimizer) for seed in range(4)],
        loss=mse,
        example_batch=make_batches(1)[0],
        device="cuda",
        deterministic=True,
        engine=engine,
        lowering="aten",
        **options,
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


def far_ahead(fleet: tm.Fleet, batches: Sequence[Any], *, sleeps: Sequence[int] = (0,)) -> list[Tensor]:
    """The device sleeps at some steps, so that the host is ahead for as long as it is let."""
    losses = []
    for number, batch in enumerate(batches):
        if number in sleeps:
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        losses.append(fleet.step(batch))
    torch.cuda.synchronize()
    return losses


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_schedules_through_replays_are_bitwise_the_reference(optimizer: str) -> None:
    """Fifty steps without a wait, each with another learning rate and bias correction for every member."""
    batches = make_batches(50)
    replayed, reference = make_fleet("cuda_graphs", optimizer), make_fleet("reference", optimizer)
    assert_same(far_ahead(replayed, batches, sleeps=()), step_by_step(reference, batches))
    assert_same(weights(replayed), weights(reference))


@pytest.mark.parametrize("engine", ["cuda_graphs", "reference"])
@pytest.mark.parametrize("where", ["host", "pinned", "device"])
def test_a_host_that_is_far_ahead_changes_nothing(engine: str, where: str) -> None:
    batches: list[tuple[Tensor, ...]] = list(make_batches(100))
    if where == "pinned":
        batches = [tuple(leaf.pin_memory() for leaf in batch) for batch in batches]
    elif where == "device":
        batches = [tuple(leaf.cuda() for leaf in batch) for batch in batches]
    ahead, careful = make_fleet(engine), make_fleet(engine)
    far_ahead(ahead, batches[:2], sleeps=())  # whatever has to be captured is
    step_by_step(careful, batches[:2])
    assert_same(far_ahead(ahead, batches[2:], sleeps=(0, 11, 50)), step_by_step(careful, batches[2:]))
    assert_same(weights(ahead), weights(careful))


def test_a_batch_may_be_overwritten_as_soon_as_step_returns() -> None:
    batches = make_batches(30)
    buffer = tuple(torch.empty_like(leaf) for leaf in batches[0])
    ahead, careful = make_fleet("cuda_graphs"), make_fleet("cuda_graphs")
    losses = []
    for number, batch in enumerate(batches):
        for target, source in zip(buffer, batch, strict=True):
            target.copy_(source)
        if number % 10 == 1:
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        losses.append(ahead.step(buffer))
    assert_same(losses, step_by_step(careful, batches))


def test_batches_of_many_sizes_share_the_landing_places() -> None:
    sizes = [16, 3, 16, 40, 3, 16, 16, 40, 1, 16] * 3
    batches = [
        tuple(leaf[:size] for leaf in batch) for size, batch in zip(sizes, make_batches(30, 40), strict=True)
    ]
    ahead, careful = make_fleet("cuda_graphs"), make_fleet("reference")
    assert_same(far_ahead(ahead, batches, sleeps=(5, 12, 20)), step_by_step(careful, batches))


def test_evaluation_between_steps_disturbs_nothing() -> None:
    batches = make_batches(12)
    plain, evaluated = make_fleet("cuda_graphs"), make_fleet("cuda_graphs")
    expected = step_by_step(plain, batches)
    got, metrics = [], []
    for batch in batches:
        got.append(evaluated.step(batch))
        metrics.append(evaluated.evaluate(batches[:3]))
    assert_same(got, expected)
    assert metrics[0] != metrics[-1]


def test_members_that_stop_come_and_go_while_the_host_is_ahead() -> None:
    def live(fleet: tm.Fleet, careful: bool) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(make_batches(40)):
            if number == 10:
                fleet.stop("m1")
            if number == 20:
                fleet.replace("m2", make_member(7))
            if number == 30:
                fleet.add(make_member(8))
            if not careful and number % 10 in (3, 9):
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            losses.append(fleet.step(batch))
            if careful:
                torch.cuda.synchronize()
        return losses + weights(fleet)

    assert_same(live(make_fleet("cuda_graphs"), False), live(make_fleet("reference"), True))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*pin_memory.*")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_fit_is_the_same_with_loader_workers(pin_memory: bool) -> None:
    inputs, targets = (torch.cat(leaves) for leaves in zip(*make_batches(20), strict=True))

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
        fleet = make_fleet("cuda_graphs")
        fleet.fit(loader, epochs=3, progress=False)
        return weights(fleet)

    assert_same(run(0), run(2))


def test_steps_with_host_batches_do_not_wait_for_the_device() -> None:
    """The host enqueues a few steps while the device sleeps: each returns long before the sleep is over."""
    fleet = make_fleet("cuda_graphs")
    batches = make_batches(8)
    far_ahead(fleet, batches, sleeps=())
    done = torch.cuda.Event()
    torch.cuda._sleep(10 * SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    done.record()
    fleet.step(batches[0])
    fleet.step(batches[1])
    assert not done.query()
    torch.cuda.synchronize()


# ---- the parts by themselves ---------------------------------------------------------------------------


def test_feed_keeps_every_push_apart() -> None:
    feed = HostFeed({"n": (torch.int64, (3,)), "x": (torch.float64, (2, 3))}, CUDA)
    seen = []
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    for number in range(100):
        feed.host["n"][:] = number
        feed.host["x"][1] = number / 3
        feed.push()
        feed.host["n"][:] = -1
        seen.append((feed.device["n"].clone(), feed.device["x"].clone()))
    for number, (n, x) in enumerate(seen):
        assert n.tolist() == [number] * 3
        assert x.tolist() == [[0.0] * 3, [number / 3] * 3]


@pytest.mark.parametrize("pinned", [False, True])
def test_landing_keeps_every_batch_apart(pinned: bool) -> None:
    landing = Landing(CUDA)
    sizes = [1000, 1000, 200_000, 7] * 10
    given = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    given = [tensor.pin_memory() for tensor in given] if pinned else given
    seen = []
    for number, tensor in enumerate(given):
        if number % 8 == 0:
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        labels = torch.arange(5) + number
        landed = landing.land([HostLeaf((tensor,), torch.float32), HostLeaf((labels,), torch.int64)])
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        seen.append([leaf.clone() for leaf in landed])
    for number, (values, labels) in enumerate(seen):
        assert values.shape == given[number].shape
        assert values.eq(number).all()
        assert labels.tolist() == list(range(number, number + 5))


def test_a_batch_lands_while_a_step_is_running() -> None:
    landing = Landing(CUDA)
    leaf = HostLeaf((torch.ones(1 << 20),), torch.float32)
    for _ in range(4):
        landing.land([leaf])
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(10 * SLEEP_CYCLES)  # type: ignore[no-untyped-call]
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
    torch.cuda._sleep(10_000_000)  # what is queued before must not be overtaken
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
