"""The run-time profiler (Algorithm A): every node alone, on the device, with nothing else resident.

Where a step is larger than what a CUDA device has free, and always on a CPU, feature maps leave the device
after their last forward use and come back before their first use in the backward pass: so a step can be
measured as long as each node with its inputs and outputs fits. One pass warms up, three are measured, medians
are kept.

A node alone takes a little longer than among others in a CUDA graph: it begins late, and finds caches cold.
Where the whole step fits on the device it is captured and replayed too, and nodes are shortened by what they
take together beyond that, the same for each.

Nodes that change parameters run once in each pass, like all others: the arguments must be such that a step
changes nothing (no member active).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, DeviceFacts, Phase, Profile, ProfiledNode, ProfiledTensor
from trainmux.profiling._kernels import KernelGraph, KernelStep
from trainmux.runtime import borrowed_stream, capturing, warm_matrix_libraries

MEASUREMENT_VERSION = 2
"""Raised when what is measured, or how, is no longer what kept profiles have."""

NUM_PASSES = 3
_PROBE_BYTES = 256 << 20
_PROBE_REPEATS = 3
_ROOM = 1.25
"""What must be free for each byte that a pass holds at its peak: workspaces, and holes between tensors."""
_LARGEST_CUT = 0.7
"""The share of its time alone that a node may lose to the step it is part of."""
_SUSTAINED_SECONDS = 0.3
"""A step is replayed for so long at a time: a device that has just begun to work is faster than it stays."""
_NUM_HANDOVERS = 64
_HEAD_START_CYCLES = 2_000_000
"""The device waits so long before each node that the host, which launches kernels one by one, is ahead."""


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and device: each direction alone, and each while both are busy.

    ``handover_seconds`` is what a copy of next to nothing takes between two kernels of a CUDA graph, of which
    one waits for the other through it.
    """

    out: float
    into: float
    out_duplex: float
    into_duplex: float
    handover_seconds: float = 0.0


def probe_link(device: torch.device, num_bytes: int = _PROBE_BYTES) -> LinkRates:
    """Copy pinned memory back and forth. On a CPU both memories are the host's, and directions share it."""
    if device.type != "cuda":
        source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
        seconds = _median_of(lambda: _wall(lambda: target.copy_(source)))
        rate = num_bytes / seconds
        return LinkRates(rate, rate, rate / 2, rate / 2)
    host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copies(out: bool, into: bool) -> float:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        if out:
            with torch.cuda.stream(streams[0]):
                host[0].copy_(there[0], non_blocking=True)
        if into:
            with torch.cuda.stream(streams[1]):
                there[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    copies(True, True)
    out, into, both = (
        num_bytes / _median_of(lambda way=way: copies(*way))  # type: ignore[misc]
        for way in ((True, False), (False, True), (True, True))
    )
    return LinkRates(out, into, min(both, out), min(both, into), _handover_seconds(device))


def _handover_seconds(device: torch.device) -> float:
    """By how much a row of kernels in a graph gets longer for each small copy between two of them."""
    counter, there = torch.zeros(1, device=device), torch.zeros(1024, device=device)
    host = torch.zeros(1024, pin_memory=True)
    side = torch.cuda.Stream(device)

    def kernels(stream: torch.cuda.Stream, *, copies: bool) -> None:
        for _ in range(_NUM_HANDOVERS):
            counter.add_(1)
            if copies:
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    host.copy_(there, non_blocking=True)
                stream.wait_stream(side)

    found = []
    for copies in (False, True):
        with borrowed_stream(device) as stream:
            stream.wait_stream(torch.cuda.current_stream(device))
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, stream):
                kernels(stream, copies=copies)
            _replays(graph, 1)
            found.append(_median_of(partial(_replays, graph, 1)))
            del graph
    return max(0.0, found[1] - found[0]) / _NUM_HANDOVERS


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds for one of so many replays in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def measure_profile(
    graph: KernelGraph,
    arguments: Sequence[Tensor],
    *,
    width: int,
    fingerprint: str,
    facts: DeviceFacts,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Run the graph node by node with ``arguments``; ``tell`` hears of each node that is done."""
    device = arguments[0].device
    clock: _CudaClock | _HostClock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    if device.type == "cuda":
        warm_matrix_libraries(device)
    link = probe_link(device)
    seconds: list[list[float]] = [[] for _ in graph.steps]
    workspaces = [0] * len(graph.steps)
    total = (1 + NUM_PASSES) * len(graph.steps)
    swaps = device.type != "cuda" or not _fits(graph, device)
    for number in range(1 + NUM_PASSES):
        run = _Pass(graph, arguments, swaps=swaps)
        for rank, step in enumerate(graph.steps):
            run.fetch(step)
            taken, workspace = clock.measure(partial(run.run, step), run.created_bytes(step))
            if number > 0:
                seconds[rank].append(taken)
                workspaces[rank] = max(workspaces[rank], workspace)
            run.release(rank, step)
            tell(number * len(graph.steps) + rank + 1, total)
        run.close()
    alone = [statistics.median(found) for found in seconds]
    replayed = None if swaps else _replayed_seconds(graph, arguments, device)
    if replayed is not None:
        alone = in_step_seconds(alone, replayed)
    nodes = tuple(
        ProfiledNode(
            step.node.name,
            step.phase,
            step.reads,
            step.creates,
            step.changes,
            taken,
            workspace,
            is_repeatable=not step.changes,
        )
        for step, taken, workspace in zip(graph.steps, alone, workspaces, strict=True)
    )
    tensors = tuple(
        ProfiledTensor(
            tensor.name,
            tensor.byte_class,
            tensor.size_bytes,
            *(
                link.handover_seconds + tensor.size_bytes / rate
                for rate in (link.out, link.into, link.out_duplex, link.into_duplex)
            ),
        )
        for tensor in graph.tensors
    )
    return Profile(fingerprint, "measured", width, facts, tensors, nodes)


def in_step_seconds(alone: Sequence[float], together: float) -> list[float]:
    """Times of nodes that were measured alone, as they are in a step that takes ``together`` seconds.

    Each loses the same, but at most ``_LARGEST_CUT`` of its own time. Where that is not enough, or where the
    step takes longer than its nodes, all are stretched alike.
    """
    total = sum(alone)
    if not alone or total <= 0 or together <= 0:
        return list(alone)

    def cut(loss: float) -> list[float]:
        return [max(seconds - loss, seconds * (1 - _LARGEST_CUT)) for seconds in alone]

    low, high = 0.0, max(alone)
    if total > together:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(cut(middle)) > together else (low, middle)
    found = cut(high) if total > together else list(alone)
    stretch = together / sum(found)
    return [seconds * stretch for seconds in found]


def _replayed_seconds(graph: KernelGraph, arguments: Sequence[Tensor], device: torch.device) -> float | None:
    """What the step takes as one CUDA graph; ``None`` where it cannot be captured or there is no room."""
    torch.cuda.empty_cache()
    if not _fits(graph, device):
        return None
    with borrowed_stream(device) as stream:
        return _replayed_on(stream, graph, arguments, device)


def _replayed_on(
    stream: torch.cuda.Stream, graph: KernelGraph, arguments: Sequence[Tensor], device: torch.device
) -> float | None:
    stream.wait_stream(torch.cuda.current_stream(device))
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.stream(stream):
            graph.module(*arguments)
        with torch.no_grad(), capturing(captured, stream):
            kept = graph.module(*arguments)
    except RuntimeError:  # out of memory is one, too
        torch.cuda.synchronize(device)
        return None
    _replays(captured, 1)
    count = max(1, int(_SUSTAINED_SECONDS / _replays(captured, 1)))
    _replays(captured, count)  # until the device's clock is what it is under load
    taken = _median_of(partial(_replays, captured, count))
    del kept
    torch.cuda.empty_cache()
    return taken


class _Pass:
    """One pass through the graph with real tensors, feature maps away between forward and backward."""

    def __init__(self, graph: KernelGraph, arguments: Sequence[Tensor], *, swaps: bool) -> None:
        self._graph = graph
        self._swaps = swaps
        self._values: dict[fx.Node, Any] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Strides that differ from the traced ones can make a view of what was traced as a copy: such memory
        # has several owners, or is an argument's, and stays.
        self._owners: dict[int, set[int]] = {t.untyped_storage()._cdata: {-1} for t in arguments}
        self._host: dict[int, Tensor] = {}
        self._device = arguments[0].device
        given = iter(arguments)
        for node in graph.module.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(given)
            elif node.op == "get_attr":
                value: Any = graph.module
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                self._values[node] = value
        computing = {step.node for step in graph.steps}
        self._last_use = self._last_uses(computing)
        self._last_forward = _last_forward_uses(graph.steps)
        self._ending = _last_uses_of_created(graph.steps)

    def run(self, step: KernelStep) -> None:
        args, kwargs = fx.map_arg((step.node.args, dict(step.node.kwargs)), self._value)
        target: Any = step.node.target
        if step.node.op == "call_module":
            target = self._graph.module.get_submodule(str(step.node.target))
        with torch.no_grad():
            value = target(*args, **kwargs)
        self._values[step.node] = value
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if len(leaves) != len(step.results):
            raise PlanError(
                f"node {step.node.name}: expected {len(step.results)} results as traced, got {len(leaves)}; "
                "profile the program that was traced"
            )
        for number, leaf in zip(step.results, leaves, strict=True):
            if number in step.creates:
                storage = leaf.untyped_storage()
                self._storages[number] = storage
                self._owners.setdefault(storage._cdata, set()).add(number)

    def created_bytes(self, step: KernelStep) -> int:
        return sum(self._graph.tensors[number].size_bytes for number in step.creates)

    def fetch(self, step: KernelStep) -> None:
        """Bring back what a node reads."""
        for number in (*step.reads, *step.changes):
            host = self._host.pop(number, None)
            if host is not None:
                storage = self._storages[number]
                storage.resize_(host.numel())
                _bytes_of(storage, self._device).copy_(host)

    def release(self, rank: int, step: KernelStep) -> None:
        """Let go of what no later node reads, and send away feature maps that the backward pass will read."""
        for node in self._last_use.get(rank, ()):
            self._values.pop(node, None)
        for number in self._ending.get(rank, ()):
            self._let_go(number)
        for number in self._last_forward.get(rank, ()) if self._swaps else ():
            kept = self._graph.tensors[number].byte_class is ByteClass.FEATURE_MAP
            storage = self._storages.get(number)
            if kept and storage is not None and storage.nbytes() and len(self._owners[storage._cdata]) == 1:
                self._host[number] = _bytes_of(storage, self._device).to("cpu", copy=True)
                storage.resize_(0)

    def _let_go(self, number: int) -> None:
        """Hold a storage no longer; its address may be another's from now on."""
        storage = self._storages.pop(number, None)
        if storage is not None:
            owners = self._owners[storage._cdata]
            owners.discard(number)
            if not owners:
                del self._owners[storage._cdata]

    def close(self) -> None:
        self._values.clear()
        self._storages.clear()
        self._owners.clear()
        self._host.clear()

    def _value(self, node: fx.Node) -> Any:
        """The value of a node; views and parts of tuples are made when they are read."""
        if node not in self._values:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
            target: Any = node.target
            if node.op == "call_module":
                target = self._graph.module.get_submodule(str(node.target))
            with torch.no_grad():
                self._values[node] = target(*args, **kwargs)
        return self._values[node]

    def _last_uses(self, computing: set[fx.Node]) -> dict[int, list[fx.Node]]:
        """By rank: nodes whose values, views of them included, are read for the last time."""
        last: dict[fx.Node, int] = {}

        def note(node: fx.Node, rank: int) -> None:
            last[node] = max(rank, last.get(node, -1))
            if node not in computing:
                for source in node.all_input_nodes:
                    note(source, rank)

        for rank, step in enumerate(self._graph.steps):
            last.setdefault(step.node, rank)
            for source in step.node.all_input_nodes:
                note(source, rank)
        found: dict[int, list[fx.Node]] = {}
        for node, rank in last.items():
            if node.op not in ("placeholder", "get_attr"):
                found.setdefault(rank, []).append(node)
        return found


def _fits(graph: KernelGraph, device: torch.device) -> bool:
    """Whether all that a pass makes fits into what is free, with some room to spare."""
    live = most = 0
    ending = _last_uses_of_created(graph.steps)
    for rank, step in enumerate(graph.steps):
        live += sum(graph.tensors[number].size_bytes for number in step.creates)
        most = max(most, live)
        live -= sum(graph.tensors[number].size_bytes for number in ending.get(rank, ()))
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return most * _ROOM < free + cached


def _last_uses_of_created(steps: Sequence[KernelStep]) -> dict[int, list[int]]:
    """By rank: storages made in the pass that no later node touches."""
    last: dict[int, int] = {}
    for rank, step in enumerate(steps):
        last.update(dict.fromkeys((*step.reads, *step.creates, *step.changes), rank))
    ending: dict[int, list[int]] = {}
    for step in steps:
        for number in step.creates:
            ending.setdefault(last[number], []).append(number)
    return ending


def _last_forward_uses(steps: Sequence[KernelStep]) -> dict[int, list[int]]:
    """By rank: storages whose last use in the forward pass this is."""
    last: dict[int, int] = {}
    for rank, step in enumerate(steps):
        if step.phase is Phase.FORWARD:
            last.update(dict.fromkeys((*step.reads, *step.creates), rank))
    found: dict[int, list[int]] = {}
    for number, rank in last.items():
        found.setdefault(rank, []).append(number)
    return found


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class _HostClock:
    """On a CPU: wall-clock time; workspaces are not seen."""

    def measure(self, work: Callable[[], None], created_bytes: int) -> tuple[float, int]:
        return _wall(work), 0


class _CudaClock:
    """On CUDA: events around a node, the host ahead; the allocator's peak beyond what the node leaves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def measure(self, work: Callable[[], None], created_bytes: int) -> tuple[float, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        self._begin.record()
        work()
        self._end.record()
        torch.cuda.synchronize(self._device)
        extra = torch.cuda.max_memory_allocated(self._device) - before - created_bytes
        return self._begin.elapsed_time(self._end) / 1e3, max(0, extra)


def _wall(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _median_of(measure: Callable[[], float]) -> float:
    found: Iterable[float] = [measure() for _ in range(_PROBE_REPEATS)]
    return statistics.median(found)
