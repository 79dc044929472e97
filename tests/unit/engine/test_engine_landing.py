"""Batches that land while a step runs: whatever order streams go on in, each step reads its own batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice

import pytest
import torch
from tests.fake_cuda import FakeDevice, FakeEvent
from torch import Tensor

from trainmux.engine import NUM_LANDINGS, HostLeaf, Landing

CPU = torch.device("cpu")


class SimulatedLane:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.num_copies = 0
        self.events: list[FakeEvent] = []
        self.landing_bytes: list[int] = []

    def make_event(self) -> FakeEvent:
        self.events.append(FakeEvent(self.device))
        return self.events[-1]

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes,), 99, dtype=torch.uint8)

    def landing(self, size_bytes: int) -> Tensor:
        self.landing_bytes.append(size_bytes)
        event = self.make_event()
        event.record(self.device.compute)
        event.wait(self.device.copies)
        return torch.full((size_bytes,), 77, dtype=torch.uint8)

    def mark(self, event: FakeEvent) -> None:
        event.record(self.device.compute)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: FakeEvent, done: FakeEvent) -> None:
        after.wait(self.device.copies)
        for target, source in pairs:
            self.num_copies += 1
            self.device.copies.append(lambda t=target, s=source: t.copy_(s) is t)
        done.record(self.device.copies)
        done.wait(self.device.compute)


def leaf(tensor: Tensor, dtype: torch.dtype | None = None) -> HostLeaf:
    return HostLeaf((tensor,), tensor.dtype if dtype is None else dtype)


def train(lane: SimulatedLane, batches: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """A loop that is ahead of the device; returns what each step read. Batches are spoilt once landed."""
    landing = Landing(CPU, lane)  # type: ignore[arg-type]
    read: list[list[Tensor]] = []

    def reads(tensors: list[Tensor]) -> bool:
        read.append([tensor.clone() for tensor in tensors])
        return True

    for batch in batches:
        given = [tensor.clone() for tensor in batch]
        landed = landing.land([leaf(tensor) for tensor in given])
        for tensor in given:
            tensor.fill_(0)
        lane.device.compute.append(lambda landed=landed: reads(landed))
        lane.device.wander()
    lane.device.finish()
    return read


def make_batches(num: int, *, sizes: Sequence[int] = (4,)) -> list[list[Tensor]]:
    own = torch.Generator().manual_seed(0)
    lengths = islice(cycle(sizes), num)
    return [[torch.randn(n, 3, generator=own), torch.randint(1, 9, (n,), generator=own)] for n in lengths]


def same(read: Sequence[Sequence[Tensor]], batches: Sequence[Sequence[Tensor]]) -> bool:
    pairs = zip(chain(*read), chain(*batches), strict=True)
    return all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("sizes", [(4,), (4, 4, 4, 1), (1, 2, 3, 4, 5, 6, 7)])
def test_every_step_reads_its_own_batch_in_any_order(sizes: tuple[int, ...]) -> None:
    for seed in range(25):
        batches = make_batches(12, sizes=sizes)
        assert same(train(SimulatedLane(FakeDevice(seed)), batches), batches)


@pytest.mark.parametrize("missing", ["after", "done", "host"])
def test_the_simulation_finds_a_wait_that_is_missing(missing: str) -> None:
    class Hasty(FakeEvent):
        def wait(self, stream: deque[Callable[[], bool]]) -> None:
            is_copy = stream is self._device.copies
            if missing == "host" or (missing == "after") != is_copy:
                super().wait(stream)

        def query(self) -> bool:
            return missing == "host" or super().query()

    class HastyLane(SimulatedLane):
        def make_event(self) -> FakeEvent:
            return Hasty(self.device)

    batches = make_batches(12)
    assert not all(same(train(HastyLane(FakeDevice(seed)), batches), batches) for seed in range(25))


def test_the_copy_does_not_wait_for_the_step_before() -> None:
    """While a step is in progress, the next batch lands completely."""
    lane = SimulatedLane(FakeDevice(0))
    landing = Landing(CPU, lane)  # type: ignore[arg-type]
    *first, last = make_batches(NUM_LANDINGS + 1)
    for batch in first:  # new memory waits for whoever had it before
        landing.land([leaf(tensor) for tensor in batch])
    lane.device.finish()
    lane.device.compute.append(lambda: False)  # a step that takes for ever
    landed = landing.land([leaf(tensor) for tensor in last])
    while lane.device.advance():
        pass
    assert same([landed], [last])


def test_what_is_staged_travels_in_one_copy_and_nobody_waits_for_a_device_that_keeps_up() -> None:
    lane = SimulatedLane(FakeDevice(0))
    landing = Landing(CPU, lane)  # type: ignore[arg-type]
    assert landing.land([]) == []
    for batch in make_batches(6):
        landing.land([leaf(tensor) for tensor in batch])
        lane.device.finish()
    assert lane.num_copies == 6
    assert all(event.num_waits == 0 for event in lane.events)


def test_buffers_are_kept_and_grow_only_when_they_must() -> None:
    lane = SimulatedLane(FakeDevice(0))
    train(lane, make_batches(20, sizes=(4, 2, 1, 3)))
    assert len(lane.landing_bytes) == NUM_LANDINGS
    lane = SimulatedLane(FakeDevice(0))
    train(lane, make_batches(20, sizes=(1,) * 10 + (500,) * 10))
    assert len(lane.landing_bytes) == 2 * NUM_LANDINGS


def land(*leaves: HostLeaf) -> list[Tensor]:
    lane = SimulatedLane(FakeDevice(0))
    landed = Landing(CPU, lane).land(leaves)  # type: ignore[arg-type]
    lane.device.finish()
    views = [tensor for tensor in landed if tensor._base is not None]
    assert not any(view.storage_offset() * view.itemsize % 512 for view in views)
    return landed


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(6, dtype=torch.int16).reshape(2, 3),
        torch.tensor([True, False]),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3).expand(4, 3),
        torch.nn.Parameter(torch.randn(5)),
        torch.randn(5, dtype=torch.bfloat16),
    ],
    ids=lambda t: f"{tuple(t.shape)}{t.dtype}",
)
def test_values_and_strides_are_those_of_to(tensor: Tensor) -> None:
    (landed,) = land(leaf(tensor))
    expected = tensor.detach().to("meta").stride() if tensor.numel() else tensor.stride()
    assert torch.equal(landed, tensor.detach())
    assert landed.stride() == expected
    assert not landed.requires_grad


def test_leaves_arrive_in_the_dtype_they_are_held_in_and_stacked() -> None:
    rows = tuple(torch.randn(2, 3) for _ in range(4))
    one, landed = land(leaf(rows[0], torch.float64), HostLeaf(rows, torch.float64, stacked=True))
    assert torch.equal(one, rows[0].double())
    assert torch.equal(landed, torch.stack(rows).double())
    assert landed.is_contiguous()


def test_what_is_no_ordinary_tensor_goes_the_plain_way() -> None:
    class Marked(torch.Tensor):
        pass

    sparse = torch.eye(3).to_sparse()
    marked = torch.ones(2).as_subclass(Marked)
    plain = torch.ones(3)
    given, landed, same_object = land(leaf(sparse), leaf(plain), leaf(marked))
    assert given is sparse
    assert same_object is marked
    assert landed is not plain
    assert torch.equal(landed, plain)
