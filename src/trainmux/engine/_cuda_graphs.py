"""Programs as CUDA graphs: captured on first use, replayed from then on.

An eager step is bound by the host, which launches a few thousand small kernels one by one; a replay is
one launch. The graph reads and writes the group's own tensors, the host's numbers among them. The batch,
which is another with every step, is copied into buffers that the graph was captured with; results are
copied out, because the next replay overwrites them.

A program changes weights, so it cannot simply be run to warm up. It is run with no member active, which
leaves every tensor but the accumulators as it was. The second such run is recorded: the allocator's rules,
simulated over its allocations, say what the capture will reserve before it does, and one segment of that
size is reserved in its place (D8).
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmux.engine._program import ForwardProgram, StepProgram, run_module
from trainmux.errors import BudgetError, TrainmuxWarning
from trainmux.ir import MemoryUse
from trainmux.runtime import AllocationEvent, deterministic_algorithms, record_allocations
from trainmux.simulate import Allocate, AllocatorRules, Event, Free, PoolForecast

_MAX_RETIRED = 16


@dataclass(frozen=True)
class _Captured:
    """A graph with what it reads, owned here: a captured graph does not keep its inputs alive."""

    graph: torch.cuda.CUDAGraph
    arguments: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    fed: tuple[int, ...]
    forecast_handles: tuple[int, ...] = ()

    def fits(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the tensors that are not copied in are still the ones of the capture."""
        held = list(arguments)
        for position in self.fed:
            held[position] = self.arguments[position]
        return len(held) == len(self.arguments) and all(map(operator.is_, held, self.arguments))


@contextmanager
def _measured_convolutions(wanted: bool) -> Iterator[None]:
    """While active, cuDNN times its algorithms for each new shape and takes the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class CudaGraphEngine:
    """Runs programs by replaying CUDA graphs, which share one memory pool and one stream to capture on.

    A program that cannot be captured (an operator that waits for the device) runs node by node, with a
    warning.

    Torch frees the matrix libraries' workspaces of a stream when a graph captured on it is destroyed, those
    of other graphs among them (pytorch #193402). A graph that is no longer wanted is therefore kept, without
    the tensors around it, until none of its neighbours is left.
    """

    def __init__(self, device: torch.device, *, deterministic: bool = False) -> None:
        self._device = device
        self._deterministic = deterministic
        self._captured: dict[int, tuple[StepProgram | ForwardProgram, _Captured | None]] = {}
        self._retired: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(device)
        self._forecast: PoolForecast | None = PoolForecast(AllocatorRules.for_torch(torch.__version__))
        self.memory: MemoryUse | None = None
        self.num_captures = 0

    def run(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> list[Tensor]:
        """One step; what it returns is new memory each time."""
        with torch.no_grad(), torch.cuda.device(self._device):
            captured = self._find(program, arguments)
            if captured is None:
                with deterministic_algorithms(self._deterministic):
                    return run_module(program, arguments)
            for position in captured.fed:
                captured.arguments[position].copy_(arguments[position], non_blocking=True)
            captured.graph.replay()
            return [output.clone() for output in captured.outputs]

    def forget(self, programs: Sequence[StepProgram | ForwardProgram]) -> None:
        """Drop the graphs of programs that will not run again."""
        for program in programs:
            self._retire(program)
        if len(self._retired) > _MAX_RETIRED:
            for program, _ in list(self._captured.values()):
                self._retire(program)  # captured anew when it runs next
        if not any(captured for _, captured in self._captured.values()):
            self._retired.clear()

    def _retire(self, program: StepProgram | ForwardProgram) -> None:
        _, captured = self._captured.pop(id(program), (program, None))
        if captured is not None:
            self._retired.append(captured.graph)
            if self._forecast is not None:
                self._forecast.release(captured.forecast_handles)

    def _find(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> _Captured | None:
        held = self._captured.get(id(program))
        if held is not None and (held[1] is None or held[1].fits(arguments)):
            return held[1]
        self._retire(program)
        captured = None
        try:
            captured = self._capture(program, arguments)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise BudgetError(
                f"a step needs more memory than the device has: {_gib(free)} of {_gib(total)} were free when "
                "it was not enough; train fewer members at once, smaller batches, or plan for a budget"
            ) from error
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"a step could not be captured as a CUDA graph and runs node by node: {reason}",
                TrainmuxWarning,
                stacklevel=2,
            )
        # The program itself is kept too: its id must not be given to another one.
        self._captured[id(program)] = (program, captured)
        return captured

    def _capture(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> _Captured:
        fed = tuple(program.fed_positions())
        static = [
            argument.clone(memory_format=torch.contiguous_format) if position in fed else argument
            for position, argument in enumerate(arguments)
        ]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with deterministic_algorithms(self._deterministic), _measured_convolutions(not self._deterministic):
            events = self._warm_up(program, static)
            torch.cuda.empty_cache()  # the warm-up's memory is not the graph's: the two would add up
            predicted, handles = self._reserve(events)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=_handle(self._pool), stream=self._stream, capture_error_mode="thread_local"
            ):
                outputs = program.module(*static)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.num_captures += 1
        self.memory = MemoryUse(predicted, torch.cuda.memory_reserved(self._device))
        return _Captured(graph, tuple(static), tuple(outputs), fed, tuple(handles))

    def _reserve(self, events: list[AllocationEvent] | None) -> tuple[int | None, list[int]]:
        """Reserve what ``events`` need; returns what will be reserved in all, where that is known."""
        if events is None or not _default_allocator():
            self._forecast = None
        if self._forecast is None:
            return None, []
        assert events is not None
        held = torch.cuda.memory_reserved(self._device) - self._forecast.reserved_bytes
        reservation, handles = self._forecast.reserve(_named(events))
        with torch.cuda.use_mem_pool(self._pool, self._device):
            for stream, size in reservation.segments:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device)):
                    torch.empty(size, dtype=torch.uint8, device=self._device)
        return held + reservation.reserved_bytes, handles

    def _warm_up(
        self, program: StepProgram | ForwardProgram, static: Sequence[Tensor]
    ) -> list[AllocationEvent] | None:
        """Load kernels and library handles on the capture stream without changing any member.

        Returns what a run allocates, where that could be recorded.
        """
        arguments = list(static)
        totals: list[tuple[Tensor, Tensor]] = []
        with torch.cuda.stream(self._stream):
            if isinstance(program, StepProgram):
                active = program.position_of("active")
                arguments[active] = torch.zeros_like(arguments[active])
                totals = [(static[i], static[i].clone()) for i in program.accumulator_positions()]
            try:
                program.module(*arguments)
                with record_allocations(self._device) as record:
                    kept = program.module(*arguments)
                del kept
            finally:
                for total, before in totals:
                    total.copy_(before)
        self._stream.synchronize()
        return record.events


def _handle(pool: torch.cuda.MemPool) -> Any:
    return pool.id  # torch's stubs want a type of their own


def _default_allocator() -> bool:
    """Whether the rules that are simulated are those in force."""
    settings = (os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF"))
    return torch.cuda.get_allocator_backend() == "native" and not any(settings)


def _named(events: Sequence[AllocationEvent]) -> list[Event]:
    """The events with a name for each allocation: an address comes up again and again."""
    names: dict[int, str] = {}
    found: list[Event] = []
    for number, event in enumerate(events):
        if event.is_free:
            found.append(Free(names.pop(event.address)))
        else:
            names[event.address] = str(number)
            found.append(Allocate(str(number), event.size_bytes, event.stream))
    return found


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
