"""Captures stay within the pool that was promised for them; one that made its pool grow is made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainmux.engine import CaptureRoom

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def room() -> CaptureRoom:
    return CaptureRoom(DEVICE, deterministic=False)


@pytest.fixture
def x() -> Tensor:
    return torch.full((4,), 2.0, device=DEVICE)


def of(mebibytes: int) -> Tensor:
    return torch.ones(mebibytes * MIB, dtype=torch.uint8, device=DEVICE)


def fitting(x: Tensor) -> Tensor:
    """One large tensor after another: a segment of the peak's size holds them."""
    for size in (48, 64, 32):
        x = x + of(size)[:4].float()
    return x


def fragmenting(x: Tensor) -> Tensor:
    """Two holes of 20 MiB, and then 40 MiB that fit into neither: the peak is 60 MiB, in one segment 100."""
    first, middle, last = of(20), of(20), of(20)
    x = x + first[:4] + last[:4]
    del first, last
    return x + of(40)[:4] + middle[:4]


def with_products(x: Tensor) -> Tensor:
    """The matrix libraries' workspaces must outlive a capture that is dropped."""
    square = torch.eye(512, device=DEVICE) * x[0]
    return fragmenting(x) + (square @ square).diagonal()[:4]


def assert_within_promise(room: CaptureRoom) -> None:
    memory = room.memory
    assert memory is not None
    assert memory.predicted_bytes is not None
    assert memory.reserved_bytes == torch.cuda.memory_reserved()
    assert memory.reserved_bytes <= memory.predicted_bytes + 2 * MIB  # a segment of small blocks


@pytest.mark.parametrize(
    ("work", "num_captures"),
    [(fitting, 1), (fragmenting, 2), (with_products, 2)],
    ids=["fits", "grows", "products"],
)
def test_reserved_bytes_stay_within_what_was_promised(
    work: Callable[[Tensor], Tensor], num_captures: int, room: CaptureRoom, x: Tensor
) -> None:
    expected = work(x)
    graph, result = room.capture(lambda: work(x), lambda: work(x))
    assert_within_promise(room)
    assert room.num_captures == num_captures
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(result, work(x)), "expected a replay to compute what its kernels do"
        assert value != 2.0 or torch.equal(result, expected)


def test_a_capture_beside_others_leaves_them_alone(room: CaptureRoom, x: Tensor) -> None:
    first, first_result = room.capture(lambda: with_products(x), lambda: with_products(x))
    num_captures, pool_bytes = room.num_captures, room.pool_bytes
    second, second_result = room.capture(lambda: fragmenting(x), lambda: fragmenting(x))
    assert room.num_captures == num_captures + 1, "expected graphs beside it to be left alone"
    assert room.pool_bytes <= pool_bytes + 42 * MIB
    x.fill_(5.0)
    for graph, result, work in ((first, first_result, with_products), (second, second_result, fragmenting)):
        graph.replay()
        assert torch.equal(result, work(x))


def test_several_pieces_share_a_pool_and_are_made_again_together(room: CaptureRoom, x: Tensor) -> None:
    out = torch.zeros(4, device=DEVICE)

    def put() -> None:
        out.copy_(fitting(x))

    def add() -> None:
        out.add_(fragmenting(x))

    def rehearse() -> None:
        put()
        add()

    graphs = room.capture_all(rehearse, [put, add])
    assert room.num_kept == len(graphs) == 2
    assert_within_promise(room)
    for graph in graphs:
        graph.replay()
    assert torch.equal(out, fitting(x) + fragmenting(x))


def test_a_pool_that_becomes_garbage_while_memory_comes_from_another(room: CaptureRoom) -> None:
    """Torch ends the process where a pool is destroyed then."""
    for _ in range(20):
        cycle: list[object] = [torch.cuda.MemPool()]
        cycle.append(cycle)
        del cycle
        with room.allocating():
            of(1)
            kept = [[number] for number in range(10_000)]  # enough for Python to look for cycles
        del kept
