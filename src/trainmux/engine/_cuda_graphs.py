"""Programs as CUDA graphs: captured on first use, replayed from then on.

An eager step is bound by the host, which launches a few thousand small kernels one by one; a replay is
one launch. The graph reads and writes the group's own tensors, the host's numbers among them. The batch,
which is another with every step, is copied into buffers that the graph was captured with; results are
copied out, because the next replay overwrites them.

A program changes weights, so it cannot simply be run to warm up. It is run with no member active, which
leaves every tensor but the accumulators as it was.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmux.engine._capture_room import CaptureRoom
from trainmux.engine._order import Apply
from trainmux.engine._program import ForwardProgram, StepProgram
from trainmux.engine._reference import ReferenceEngine
from trainmux.errors import BudgetError, TrainmuxWarning
from trainmux.ir import MemoryUse
from trainmux.sizes import format_bytes
from trainmux.tracing import failure_text

_MAX_RETIRED = 16


@dataclass(frozen=True)
class _Captured:
    """A graph with what it reads, owned here: a captured graph does not keep its inputs alive."""

    graph: torch.cuda.CUDAGraph
    arguments: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    fed: tuple[int, ...]

    def fits(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the tensors that are not copied in are still the ones of the capture."""
        held = list(arguments)
        for position in self.fed:
            held[position] = self.arguments[position]
        return len(held) == len(self.arguments) and all(map(operator.is_, held, self.arguments))

    def replay(self) -> list[Tensor]:
        """One run on what was copied in; its results as new tensors."""
        self.graph.replay()
        return [output.clone() for output in self.outputs]


class CudaGraphEngine:
    """Runs programs by replaying CUDA graphs, which share one memory pool and one stream to capture on.

    A program that cannot be captured (an operator that waits for the device) runs node by node, with a
    warning. What captures need of the device (a pool, a stream with the matrix libraries' workspaces) is
    taken at the first one: a fleet whose steps someone else runs takes none.

    Torch frees the matrix libraries' workspaces of a stream when a graph captured on it is destroyed, those
    of other graphs among them (pytorch #193402). A graph that is no longer wanted is therefore kept, without
    the tensors around it, until none of its neighbours is left.
    """

    def __init__(self, device: torch.device, *, deterministic: bool = False) -> None:
        self._device = device
        self._deterministic = deterministic
        self._by_node = ReferenceEngine(deterministic=deterministic)
        self._captured: dict[int, tuple[StepProgram | ForwardProgram, _Captured | None]] = {}
        self._retired: list[torch.cuda.CUDAGraph] = []
        self._made_room: CaptureRoom | None = None
        self.not_captured = ""
        """Why the last program was not captured, if so: the operator, the user's line, torch's reason."""

    @property
    def memory(self) -> MemoryUse | None:
        """Bytes predicted for the device and held by it, at the last capture."""
        return None if self._made_room is None else self._made_room.memory

    @property
    def num_captures(self) -> int:
        return 0 if self._made_room is None else self._made_room.num_captures

    @property
    def _room(self) -> CaptureRoom:
        if self._made_room is None:
            self._made_room = CaptureRoom(self._device, deterministic=self._deterministic)
        return self._made_room

    def run(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> list[Tensor]:
        """One step; what it returns is new memory each time."""
        with torch.no_grad():
            return self.begin(program, arguments)()

    def begin(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> Apply:
        """Capture a program that is new and copy the batch in; the result runs the step. For ``no_grad``."""
        with torch.cuda.device(self._device):
            captured = self._find(program, arguments)
            if captured is None:
                return self._on_device(self._by_node.begin(program, arguments))
            for position in captured.fed:
                captured.arguments[position].copy_(arguments[position], non_blocking=True)
            return captured.replay

    def _on_device(self, apply: Apply) -> Apply:
        def end() -> list[Tensor]:
            with torch.cuda.device(self._device):
                return apply()

        return end

    def forget(self, programs: Sequence[StepProgram | ForwardProgram]) -> None:
        """Drop the graphs of programs that will not run again."""
        self._by_node.forget(programs)
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

    def _find(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> _Captured | None:
        held = self._captured.get(id(program))
        if held is not None and (held[1] is None or held[1].fits(arguments)):
            return held[1]
        self._retire(program)
        captured = None
        try:
            captured = self._capture(program, arguments)
            self.not_captured = ""
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise BudgetError(
                f"a step needs more memory than the device has: {format_bytes(free)} of "
                f"{format_bytes(total)} were free when "
                "it was not enough; train fewer members at once, smaller batches, or plan for a budget"
            ) from error
        except RuntimeError as error:
            self.not_captured = failure_text(error)
            warnings.warn(
                f"a step could not be captured as a CUDA graph and runs node by node: {self.not_captured}",
                TrainmuxWarning,
                stacklevel=2,
            )
        # The program itself is kept too: its id must not be given to another one.
        self._captured[id(program)] = (program, captured)
        return captured

    def _capture(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> _Captured:
        fed = program.fed_positions
        static = [
            argument.clone(memory_format=torch.contiguous_format) if position in fed else argument
            for position, argument in enumerate(arguments)
        ]
        totals: list[tuple[Tensor, Tensor]] = []
        if isinstance(program, StepProgram):
            totals = [(static[i], static[i].clone()) for i in program.accumulator_positions()]
        try:
            graph, outputs = self._room.capture(
                lambda: program.module(*_without_members(program, static)), lambda: program.module(*static)
            )
        finally:
            for total, before in totals:
                total.copy_(before)
        return _Captured(graph, tuple(static), tuple(outputs), fed)


def _without_members(program: StepProgram | ForwardProgram, static: Sequence[Tensor]) -> list[Tensor]:
    """The arguments with no member active: a step then changes nothing but the accumulators."""
    arguments = list(static)
    if isinstance(program, StepProgram):
        active = program.position_of("active")
        arguments[active] = torch.zeros_like(arguments[active])
    return arguments
