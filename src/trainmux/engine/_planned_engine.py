"""Steps of a planned program: inputs in, parts run or replayed, results out (µ-TWO Algorithm H, B.1.5).

In a ring the backward pass of the first sub-array is still to come when a step returns: its forward pass was
the last thing that the step did, during the backward pass of the last sub-array. Its losses are there, its
update comes with the next step, or with ``finish``. What it will read until then may not be overwritten: new
inputs of the first sub-array wait in a landing buffer until its forward pass begins.

The first step after a ``finish`` has no backward pass in flight. It runs one all the same, of a forward pass
with no member active, which changes nothing: so there is one body, and one graph of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from trainmux.engine._capture_room import CaptureRoom, kernel_settings
from trainmux.engine._lanes import HostLanes, StreamLanes, WatchedLanes, watched_lanes
from trainmux.engine._planned import Memory, PlannedProgram
from trainmux.engine._program import ForwardProgram, StepProgram
from trainmux.engine._sub_arrays import member_axes
from trainmux.errors import BudgetError, TrainmuxWarning, first_line
from trainmux.ir import MemoryUse, Part, Program
from trainmux.profiling import KernelGraph
from trainmux.runtime import borrowed_stream, capturing


class PlannedEngine:
    """Runs one planned program over the memory given to it.

    ``steps`` has the work of each sub-array, ``graphs`` its kernels. Where ``branches`` says on how many each
    sub-array's members train, they are those of one of them. With a ``room`` parts are captured there and
    replayed as CUDA graphs; without one, on a CPU, and where a part cannot be captured, every instruction is
    enqueued by the host. Branches are the streams of ``like``, an engine with as many that does not run
    meanwhile: each stream has workspaces of the matrix libraries. ``poisons`` is for tests.
    """

    def __init__(
        self,
        program: Program,
        steps: Sequence[StepProgram | ForwardProgram],
        graphs: Sequence[KernelGraph],
        memory: Memory,
        *,
        branches: Sequence[int] | None = None,
        like: PlannedEngine | None = None,
        deterministic: bool = False,
        room: CaptureRoom | None = None,
        poisons: bool = False,
    ) -> None:
        self._device = memory.slab.device
        branches = branches or [1] * len(steps)
        self._lanes = HostLanes(max(branches))
        if self._device.type == "cuda":
            other = None if like is None else like._lanes
            others = other if isinstance(other, StreamLanes) else None
            self._lanes = StreamLanes(self._device, max(branches), others)
        self._planned = PlannedProgram(
            program,
            graphs,
            memory,
            self._lanes,
            branches=branches,
            deterministic=deterministic,
            poisons=poisons,
        )
        self._branches = tuple(branches)
        self._deterministic = deterministic
        self._steps = tuple(steps)
        self._axes = [member_axes(step) for step in steps]
        self._is_ring = bool(program.prologue.instructions)
        self._in_flight = False
        self.is_torn = False
        """Whether a step has failed when something that lasts had changed, or was lost."""
        self._landing = self._make_landing() if self._is_ring else {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._room = room

    @property
    def in_flight(self) -> bool:
        """Whether a backward pass and its update are still to come."""
        return self._in_flight

    @property
    def memory(self) -> MemoryUse | None:
        """Bytes predicted for the device and held by it, once captured."""
        return None if self._room is None else self._room.memory

    def argument(self, sub_array: int, position: int) -> Tensor:
        """An argument of a sub-array's step where it lies between steps: to be read and written there.

        Of several branches each has its own copy of what members share: all of them, along a new first axis.
        """
        location = self._planned.graphs[sub_array].inputs[position]
        return self._planned.between_steps(sub_array, location, self._axes[sub_array][position])

    def load_constants(self) -> None:
        """Copy the tensors that belong to the graphs themselves to their places."""
        for sub_array, graph in enumerate(self._planned.graphs):
            for name, location in graph.constants.items():
                value: Tensor = graph.module.get_buffer(name)
                self._planned.between_steps(sub_array, location, None).copy_(value)

    def step(
        self, fed: Sequence[Mapping[int, Tensor]], watched: WatchedLanes | None = None
    ) -> list[list[Tensor]]:
        """One step of every sub-array; ``fed`` has what is new, by position among the arguments.

        Returns what each sub-array's step returned. In a ring, what the first one's update returns (norm,
        finite) is that of the step before until ``finish`` is called. ``watched`` lanes can tell afterwards
        when each instruction of the body ran; what is in flight is finished before.
        """
        if watched is not None:
            self.finish()
        for sub_array, new in enumerate(fed):
            for position, value in new.items():
                lands = self._is_ring and sub_array == 0
                target = self._landing[position] if lands else self.argument(sub_array, position)
                target.copy_(value, non_blocking=True)
        _within_memory(self._device, lambda: self._run_step(watched))
        return [self.results(sub_array) for sub_array in range(len(self._steps))]

    def _run_step(self, watched: WatchedLanes | None) -> None:
        """Everything from inputs that are there to results that are there."""
        self._prepare()
        kept: list[tuple[Tensor, Tensor]] = []
        if self._is_ring and not self._in_flight:
            # Accumulators take in what inactive members compute, too.
            totals = [self.argument(0, position) for position in self._steps[0].accumulator_positions()]
            kept = [(total, _to_host(total)) for total in totals]
            self._land()
            for position in self._steps[0].mask_positions():
                self.argument(0, position).zero_()
            self._run(self._planned.program.prologue)
        with self._changing():
            if watched is None:
                self._run(self._planned.program.body)
            else:
                self._run_watched(watched)
        self._in_flight = self._is_ring
        for total, before in kept:
            _put_back(total, before)

    def finish(self) -> None:
        """Run what is in flight to its end; what the host's memory is to hold is there on return."""
        if self._in_flight:
            with self._changing():
                _within_memory(self._device, lambda: self._run(self._planned.program.epilogue))
        if self._device.type == "cuda" and self._planned.memory.host_offsets:
            torch.cuda.synchronize(self._device)

    def watched_lanes(self) -> WatchedLanes:
        """HostLanes like its own, with a clock, for a step to be watched."""
        return watched_lanes(self._lanes)

    def forget_graphs(self) -> None:
        """Capture anew at the next step: the room lets its graphs go. Nothing may be in flight."""
        self._graphs = {}

    def results(self, sub_array: int) -> list[Tensor]:
        """Results of the last step of a sub-array, as new tensors."""
        return [result.clone() for result in self._planned.results(sub_array)]

    # ---- inputs ------------------------------------------------------------------------------------

    def _make_landing(self) -> dict[int, Tensor]:
        """Buffers for what is fed to the first sub-array, by position; one for what all branches share."""
        found = {}
        for position in self._steps[0].positions_fed_anew:
            like = self.argument(0, position)
            is_shared = self._branches[0] > 1 and self._axes[0][position] is None
            found[position] = torch.zeros_like(like[0] if is_shared else like)
        return found

    def _land(self) -> None:
        for position, landed in self._landing.items():
            self.argument(0, position).copy_(landed)

    # ---- running -----------------------------------------------------------------------------------

    def _run(self, part: Part) -> None:
        graph = self._graphs.get(id(part))
        if graph is not None:
            self._planned.has_changed = True  # nobody could tell how far it came
            graph.replay()
        else:
            self._enqueue(part)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside, state changes; a forward pass in flight is lost where this does not come to its end."""
        loses, self._in_flight = self._in_flight, False
        try:
            yield
        except BaseException:
            self.is_torn |= loses or self._planned.has_changed
            raise

    def _enqueue(self, part: Part, lanes: WatchedLanes | None = None) -> None:
        """Instruction by instruction; new inputs of a ring's first sub-array land before it begins anew."""
        lands = self._is_ring and part is self._planned.program.body
        self._planned.run(part, {(0, 0): self._land} if lands else None, lanes)

    def _run_watched(self, lanes: WatchedLanes) -> None:
        """The body once, with a clock: as a graph of its own where parts are graphs."""
        body = self._planned.program.body
        if self._room is None:
            self._enqueue(body, lanes)
            return
        # On a stream of its own: when a graph goes, so do the libraries' workspaces of the stream that it was
        # captured on (pytorch #193402), and the other graphs still need theirs.
        with borrowed_stream(self._device) as stream:
            graph = torch.cuda.CUDAGraph()
            with kernel_settings(deterministic=self._deterministic), capturing(graph, stream):
                self._enqueue(body, lanes)
            graph.replay()
            lanes.read()  # waits for the replay
            del graph

    def _prepare(self) -> None:
        """Capture every part, once, on inputs that are real; what a rehearsal overwrites is put back.

        Where other programs run in the same memory, their leavings lie where inputs belong: indices among
        them would point anywhere.
        """
        if self._room is None or self._graphs:
            return
        program = self._planned.program
        masks, totals = [], []
        for sub_array, step in enumerate(self._steps):
            masks += [self.argument(sub_array, position) for position in step.mask_positions()]
            totals += [self.argument(sub_array, position) for position in step.accumulator_positions()]
        if self._is_ring:
            masks += [self._landing[position] for position in self._steps[0].mask_positions()]
        # On the host: accumulators are as large as the parameters, and the budget has no room for them twice.
        saved = [(tensor, _to_host(tensor)) for tensor in (*masks, *totals)]
        self._land()

        parts = [part for part in (program.prologue, program.body, program.epilogue) if part.instructions]

        def rehearse() -> None:
            # All parts in their order: static tensors that are swapped lie elsewhere after each of them.
            for part in parts:
                for tensor in masks:
                    tensor.zero_()
                self._enqueue(part)

        try:
            graphs = self._room.capture_all(rehearse, [partial(self._enqueue, part) for part in parts])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(
                "a planned step could not be captured as CUDA graphs and runs instruction by instruction: "
                f"{first_line(error)}",
                TrainmuxWarning,
                stacklevel=2,
            )
            self._room = None
            return
        finally:
            for tensor, before in saved:
                _put_back(tensor, before)
        self._graphs = {id(part): graph for part, graph in zip(parts, graphs, strict=True)}


def _to_host(tensor: Tensor) -> Tensor:
    """A copy. Row by row where they lie apart: torch would put all of them together on the device first."""
    if not tensor.dim() or tensor.is_contiguous():
        return tensor.to("cpu", copy=True)
    return torch.stack([row.to("cpu", copy=True) for row in tensor])


def _put_back(tensor: Tensor, value: Tensor) -> None:
    """Copy a value back, row by row likewise."""
    if not tensor.dim() or tensor.is_contiguous():
        tensor.copy_(value)
        return
    for row, of_row in zip(tensor, value, strict=True):
        row.copy_(of_row)


def _within_memory(device: torch.device, work: Callable[[], None]) -> None:
    """Do ``work``; too little memory on the device is refused in words.

    The refusal is raised when the error is gone: its traceback would hold what was allocated when it showed.
    """
    try:
        work()
        return
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    raise BudgetError(
        f"a planned step needs scratch memory outside its slab, and {free} of {total} bytes were free when "
        "it was not enough; leave the device to this process, or plan for a smaller budget"
    )
