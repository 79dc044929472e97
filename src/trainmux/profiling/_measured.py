"""The run-time profiler (Algorithm A): every node alone, on the device, with nothing else resident.

Where a step is larger than what a CUDA device has free, and always on a CPU, feature maps leave the device
after their last forward use and come back before their first use in the backward pass: so a step can be
measured as long as each node with its inputs and outputs fits. One pass warms up, the next one is measured,
medians are kept. Of nodes that do the same work three are measured; one without its like is run three times,
unless it changes what others left: then it must run once. One that another width has measured is not measured
again. Nodes write to memory that is there before they run, as they will under a plan; what one needs besides
is its workspace, results that it cannot write to their place among it.

A node alone takes a little longer than among others in a CUDA graph: it begins late, and finds caches cold.
Where the whole step fits on the device it is captured and replayed too, and nodes are shortened by what they
take together beyond that, the same for each. During replays of a model's first step the link is measured:
copies that run while kernels do are slower than alone, and so are the kernels. And that step is replayed with
small copies that wait for some of its nodes, and for which others wait: each such dependency costs.

The arguments must be such that a step changes nothing (no member active).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainmux.ir import DeviceFacts, Profile
from trainmux.profiling._clocks import (
    CudaClock,
    HostClock,
    NodeSamples,
    enqueue_replays,
    replays,
)
from trainmux.profiling._kernels import KernelGraph
from trainmux.profiling._link import LinkRates, LinkUnderLoad, probe_link, probe_link_under_load
from trainmux.profiling._pass import Into, Pass, last_uses_of_created
from trainmux.profiling._sync_cost import TinyCopies
from trainmux.runtime import borrowed_stream, capturing, warm_matrix_libraries

MEASUREMENT_VERSION = 10
"""Raised when what is measured, or how, is no longer what kept profiles have."""

NUM_SAMPLES = 3
"""Measurements of which the median counts: of as many nodes that do the same work, or of one that has no
like."""
_ROOM = 1.25
"""Free bytes required per byte of a pass's peak, for workspaces and fragmentation."""
_LARGEST_CUT = 0.7
"""The share of its time alone that a node may lose to the step it is part of."""
_SUSTAINED_SECONDS = 0.3
"""A step is replayed at least so long before it counts: a device that has just begun to work is 5% faster
than it stays."""
_WARM_UP_SECONDS = 2.0
"""The first step is replayed so long beforehand: clocks fall for seconds as a device warms up."""
_MOST_SUSTAINED_SECONDS = 1.0
_SETTLED = 1.003
"""Two windows of replays in a row differ by less than this factor once the device's clock has settled."""
_WINDOW_SECONDS = 0.1
_LOAD_SECONDS = 0.05
"""Seconds of replays while copies are measured."""


@dataclass(frozen=True)
class CopyCosts:
    """The slowdown of copies and kernels by each other, and the cost of dependencies between them."""

    link: LinkUnderLoad
    sync_seconds: float = 0.0


class Measurements:
    """Measurements for several profiles: the idle link, nodes by what decides their time, copies by model.

    Rates of copies during the steps of one model differ by less than 1% between widths, and the cost of a
    dependency by no more than between two measurements.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: dict[Hashable, NodeSamples] = {}
        self.copy_costs: dict[Hashable, CopyCosts] = {}
        self._is_warm = False

    @functools.cached_property
    def link(self) -> LinkRates:
        return probe_link(self.device)

    def sustained_seconds(self, captured: torch.cuda.CUDAGraph) -> float:
        """Seconds of a replay once the device's clock is what it is under load."""
        replays(captured, 1)
        once = replays(captured, 1)
        if not self._is_warm:
            replays(captured, int(_WARM_UP_SECONDS / once))
            self._is_warm = True
        return settled_seconds(lambda seconds: replays(captured, max(2, int(seconds / once))))


def measure_profile(
    graph: KernelGraph,
    arguments: Sequence[Tensor],
    *,
    model: Hashable,
    width: int,
    fingerprint: str,
    facts: DeviceFacts,
    into: Into,
    handed_over: Mapping[int, frozenset[int]],
    known: Measurements,
    branches: Sequence[int] = (),
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Run the graph node by node with ``arguments``; ``tell`` hears of each node that is done.

    ``into`` calls a node's operator with memory for its results; those in ``handed_over``, by rank, need not
    come to lie there. What is ``known``, of nodes and of this ``model``, is not measured; the rest becomes
    known. On a CUDA device concurrent steps are measured too, as many at a time as each of ``branches`` says,
    where there is room.
    """
    device = known.device
    begin = partial(Pass, graph, arguments, into, handed_over)
    swaps = device.type != "cuda" or not fits(graph, device)
    concurrent: tuple[tuple[int, float], ...] = ()
    with _own_stream(device):
        samples = _measured_nodes(graph, handed_over, partial(begin, swaps=swaps), known, tell)
        seconds = [sample.seconds for sample in samples]
        together = None if swaps else _replayed_seconds(graph, begin, known, model)
        if together is not None:
            seconds = in_step_seconds(seconds, together)
            concurrent = _side_by_side(graph, begin, known, branches)
    costs = known.copy_costs.get(model) or CopyCosts(LinkUnderLoad(known.link))
    link = costs.link.link
    tensors, nodes = graph.profiled(
        seconds,
        (link.out, link.into, link.out_duplex, link.into_duplex),
        copy_seconds=link.handover_seconds,
        workspaces=[sample.workspace_bytes for sample in samples],
    )
    return Profile(
        fingerprint,
        "measured",
        width,
        facts,
        tensors,
        nodes,
        costs.link.slowdown,
        concurrent,
        sync_seconds=costs.sync_seconds,
    )


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, a stream that has the matrix libraries' workspaces already; others get none for this."""
    if device.type != "cuda":
        yield
        return
    outside = torch.cuda.current_stream(device)
    with borrowed_stream(device) as stream:
        stream.wait_stream(outside)
        try:
            with torch.cuda.stream(stream):
                warm_matrix_libraries(device)
                yield
        finally:
            outside.wait_stream(stream)


def _measured_nodes(
    graph: KernelGraph,
    handed_over: Mapping[int, frozenset[int]],
    begin: Callable[[], Pass],
    known: Measurements,
    tell: Callable[[int, int], None],
) -> list[NodeSamples]:
    """Samples of each node alone. Those not known yet come from a pass behind one to warm up, and from
    another one where the device had to wait for the host."""
    # A result that is handed over is not copied to its place, which takes time.
    handed = [
        tuple(number in handed_over.get(rank, ()) for number in step.results)
        for rank, step in enumerate(graph.steps)
    ]
    keys = list(zip(graph.signatures(), handed, strict=True))
    alike: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(keys):
        if key not in known.samples:
            alike.setdefault(key, []).append(rank)
    samples = {key: NodeSamples() for key in alike}
    clock = CudaClock(known.device) if known.device.type == "cuda" else HostClock()

    def one_pass(times: Mapping[int, int], before: int) -> None:
        """Run all nodes, and measure some of them so many times; ``before`` nodes were done before."""
        run = begin()
        for rank, step in enumerate(graph.steps):
            for _ in range(times.get(rank, 0)):
                mine = samples[keys[rank]]
                run.prepare(rank, step)
                mine.add(clock.measure(partial(run.run, step), mine.head_start_seconds))
            if rank not in times:
                run.prepare(rank, step)
                run.run(step)
            run.release(rank)
            tell(before + rank + 1, 2 * len(graph.steps))
        run.close()

    if alike:
        one_pass({}, 0)
        times = {}
        for ranks in alike.values():
            chosen = _spread(ranks, NUM_SAMPLES)
            again = 1 if graph.steps[ranks[0]].changes else -(-NUM_SAMPLES // len(chosen))
            times.update(dict.fromkeys(chosen, again))
        for _ in range(NUM_SAMPLES):
            one_pass(times, len(graph.steps))
            times = {rank: times[rank] for rank in times if not samples[keys[rank]].is_clean}
            if not times:
                break
    known.samples.update(samples)
    return [known.samples[key] for key in keys]


def _spread(ranks: Sequence[int], most: int) -> list[int]:
    """At most so many of the ``ranks``, first, last and evenly between."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[number * (len(ranks) - 1) // (most - 1)] for number in range(most)]


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


def _captured(device: torch.device, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Capture ``work`` on the current stream; ``None`` where it cannot be captured or there is no room."""
    graph = torch.cuda.CUDAGraph()
    try:
        with capturing(graph, torch.cuda.current_stream(device)):
            work()
    except RuntimeError:  # out of memory is one, too
        torch.cuda.synchronize(device)
        return None
    return graph


def _replayed_seconds(
    graph: KernelGraph, begin: Callable[[], Pass], known: Measurements, model: Hashable
) -> float | None:
    """Seconds of the whole step, replayed; ``None`` where it cannot be captured or there is no room.

    The first step of a model is also replayed while copies run.
    """
    device = known.device
    torch.cuda.empty_cache()
    if not fits(graph, device):
        return None
    captured = _captured(device, lambda: begin().run_all())
    if captured is None:
        return None
    taken = known.sustained_seconds(captured)
    if model in known.copy_costs:
        return taken
    count = max(1, int(_LOAD_SECONDS / taken))
    load = partial(enqueue_replays, captured, count)
    loaded = probe_link_under_load(load, count * taken, known.link, device)
    del captured, load
    torch.cuda.empty_cache()
    known.copy_costs[model] = CopyCosts(loaded, _sync_seconds(graph, begin, known, taken))
    return taken


def _sync_seconds(
    graph: KernelGraph, begin: Callable[[], Pass], known: Measurements, without: float
) -> float:
    """Seconds that a dependency on a copy adds to a step of ``without`` seconds; 0 where it is not known."""
    try:
        copies = TinyCopies(len(graph.steps), known.device)
    except RuntimeError:
        return 0.0
    if not copies.num_dependencies:
        return 0.0

    def with_copies() -> None:
        with copies:
            begin().run_all(copies)

    captured = _captured(known.device, with_copies)
    if captured is None:
        return 0.0
    taken = known.sustained_seconds(captured)
    del captured
    torch.cuda.empty_cache()
    return max(0.0, taken - without) / copies.num_dependencies


def settled_seconds(replay_for: Callable[[float], float]) -> float:
    """Seconds of a replay, the mean of two windows that agree; ``replay_for`` gives those of one window."""
    before, taken = replay_for(_SUSTAINED_SECONDS), replay_for(_WINDOW_SECONDS)
    sustained = _SUSTAINED_SECONDS + _WINDOW_SECONDS
    while not before / _SETTLED < taken < before * _SETTLED and sustained < _MOST_SUSTAINED_SECONDS:
        before, taken = taken, replay_for(_WINDOW_SECONDS)
        sustained += _WINDOW_SECONDS
    return (before + taken) / 2


def _side_by_side(
    graph: KernelGraph, begin: Callable[[], Pass], known: Measurements, branches: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Seconds by number of concurrent steps. All work on the same arguments, which no step changes."""
    found, device = [], known.device
    for number in branches:
        torch.cuda.empty_cache()
        if not fits(graph, device, number):
            break
        with ExitStack() as lent:
            streams = [lent.enter_context(borrowed_stream(device)) for _ in range(number - 1)]
            for stream in streams:
                with torch.cuda.stream(stream):
                    warm_matrix_libraries(device)
            torch.cuda.synchronize(device)
            captured = _captured(device, partial(_run_on_all, begin, device, streams))
            if captured is None:
                break
            found.append((number, known.sustained_seconds(captured)))
            del captured
    torch.cuda.empty_cache()
    return tuple(found)


def _run_on_all(
    begin: Callable[[], Pass], device: torch.device, streams: Sequence[torch.cuda.Stream]
) -> None:
    """Enqueue a step on the current stream and on each of ``streams``, which fork from it and join it."""
    main = torch.cuda.current_stream(device)
    for stream in streams:
        stream.wait_stream(main)
    for stream in (main, *streams):
        with torch.cuda.stream(stream):
            begin().run_all()
    for stream in streams:
        main.wait_stream(stream)


def fits(graph: KernelGraph, device: torch.device, num_passes: int = 1) -> bool:
    """Whether the tensors of so many concurrent passes fit into free memory, with room to spare."""
    live = most = 0
    ending = last_uses_of_created(graph.steps)
    for rank, step in enumerate(graph.steps):
        live += sum(graph.tensors[number].size_bytes for number in step.creates)
        most = max(most, live)
        live -= sum(graph.tensors[number].size_bytes for number in ending.get(rank, ()))
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return num_passes * most * _ROOM < free + cached
