"""The simulated pool against the real caching allocator: the same bytes reserved, block by block."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from trainmux.simulate import Allocate, AllocatorRules, Event, Free, PoolSimulator, TieBreak

MIB = 1024 * 1024
NUM_EVENTS = 240
MAX_LIVE = 80
# Sizes at which a rule changes; they come up often, so that free blocks of equal size do too.
EDGES = (1, 512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 20 * MIB, 21 * MIB)


@pytest.fixture(autouse=True)
def _default_allocator() -> Iterator[None]:
    """The rules are those of the native allocator without settings; leave nothing cached behind."""
    if torch.cuda.get_allocator_backend() != "native":
        pytest.skip("the simulator knows the native allocator only")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if os.environ.get(name):
            pytest.skip(f"the simulator's defaults hold without {name}")
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def random_events(seed: int, num_streams: int = 1) -> list[Event]:
    """Allocations of 1 B to 64 MiB, evenly over the magnitudes, and frees in random order."""
    rng = random.Random(seed)
    events: list[Event] = []
    live: list[str] = []
    for number in range(NUM_EVENTS):
        if live and (len(live) == MAX_LIVE or rng.random() < 0.45):
            events.append(Free(live.pop(rng.randrange(len(live)))))
            continue
        size = rng.choice(EDGES) if rng.random() < 0.3 else int(2 ** rng.uniform(0, 26))
        live.append(f"t{number}")
        events.append(Allocate(live[-1], size, rng.randrange(num_streams)))
    return events


@dataclass
class DeviceRun:
    """What stood on the device after some events: hold on to it until it was compared."""

    live: dict[str, Tensor]
    segment_addresses: list[int]
    """In the order they were reserved. torch 2.11 chooses by address, and addresses are the driver's."""
    segments: dict[int, dict[str, Any]]


def run(
    events: Sequence[Event],
    streams: Sequence[torch.cuda.Stream],
    is_watched: Callable[[dict[str, Any]], bool],
) -> DeviceRun:
    """Allocate and free on the device, with an eye on the segments of one pool."""
    done = DeviceRun({}, [], {})
    for event in events:
        if isinstance(event, Free):
            del done.live[event.name]
            continue
        with torch.cuda.stream(streams[event.stream]):
            done.live[event.name] = torch.empty(event.size_bytes, dtype=torch.uint8, device="cuda")
        done.segments = {s["address"]: s for s in torch.cuda.memory_snapshot() if is_watched(s)}
        done.segment_addresses += [a for a in done.segments if a not in done.segment_addresses]
    done.segments = {s["address"]: s for s in torch.cuda.memory_snapshot() if is_watched(s)}
    return done


def simulate(events: Sequence[Event], segment_addresses: Sequence[int]) -> PoolSimulator:
    pool = PoolSimulator(AllocatorRules.for_torch(torch.__version__), segment_addresses)
    handles: dict[str, int] = {}
    for event in events:
        if isinstance(event, Free):
            pool.free(handles.pop(event.name))
        else:
            handles[event.name] = pool.allocate(event.size_bytes, event.stream)
    return pool


def assert_alike(pool: PoolSimulator, done: DeviceRun) -> None:
    """The same segments in the same order, cut into the same blocks, of which the same are in use."""
    real = [done.segments[address] for address in done.segment_addresses]
    assert len(real) == len(done.segments)
    assert pool.reserved_bytes == sum(segment["total_size"] for segment in real)
    assert pool.allocated_bytes == sum(segment["allocated_size"] for segment in real)
    assert pool.requested_bytes == sum(segment["requested_size"] for segment in real)
    assert [
        [(block.size_bytes, block.handle is not None) for block in segment.blocks]
        for segment in pool.segments()
    ] == [
        [(block["size"], block["state"] == "active_allocated") for block in segment["blocks"]]
        for segment in real
    ]


def in_pool(pool_id: tuple[int, int]) -> Callable[[dict[str, Any]], bool]:
    return lambda segment: tuple(segment["segment_pool_id"]) == tuple(pool_id)


@pytest.mark.parametrize("seed", range(20))
def test_a_capture_pool_reserves_what_was_simulated(seed: int) -> None:
    events = random_events(seed)
    static = torch.zeros(1, device="cuda")
    pool_id = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool_id):
        static.add_(1)  # a graph without a kernel warns; this one allocates nothing
        done = run(events, [torch.cuda.current_stream()], in_pool(pool_id))
    assert_alike(simulate(events, done.segment_addresses), done)
    del done
    graph.reset()


@pytest.mark.parametrize("seed", range(20))
def test_a_memory_pool_reserves_what_was_simulated(seed: int) -> None:
    events = random_events(100 + seed, num_streams=2)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        done = run(events, [torch.cuda.current_stream(), torch.cuda.Stream()], in_pool(pool.id))
    assert_alike(simulate(events, done.segment_addresses), done)
    del done  # the tensors before the pool


def unused_stream() -> torch.cuda.Stream:
    """A stream for which the ordinary pool holds nothing: what is cached for a stream would be used first."""
    used = {segment["stream"] for segment in torch.cuda.memory_snapshot()}
    for _ in range(64):  # torch hands out the same 32 streams in turn
        stream = torch.cuda.Stream()
        if stream.cuda_stream not in used:
            return stream
    pytest.skip("every stream holds memory of other tests")


@pytest.mark.parametrize("seed", range(5))
def test_the_ordinary_pool_grows_by_what_was_simulated(seed: int) -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    events = random_events(200 + seed)
    stream = unused_stream()
    before_reserved, before_allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    done = run(events, [stream], lambda segment: segment["stream"] == stream.cuda_stream)
    pool = simulate(events, done.segment_addresses)

    assert torch.cuda.memory_reserved() - before_reserved == pool.reserved_bytes
    assert torch.cuda.memory_allocated() - before_allocated == pool.allocated_bytes
    assert_alike(pool, done)
    del done


@pytest.mark.skipif(
    AllocatorRules.for_torch(torch.__version__).tie_break is TieBreak.ADDRESS,
    reason="torch 2.11 chooses by address, which is not known beforehand",
)
def test_from_torch_2_12_on_no_address_is_needed() -> None:
    for seed in range(5):
        events = random_events(300 + seed)
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            done = run(events, [torch.cuda.current_stream()], in_pool(pool.id))
        assert_alike(simulate(events, []), done)
        del done
