"""The reference engine: a program node by node through ATen, on any device; the oracle for faster engines."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trainmux.engine._order import Apply, Halves, KeptViews
from trainmux.engine._program import ForwardProgram, StepProgram
from trainmux.ir import MemoryUse
from trainmux.runtime import deterministic_algorithms


class ReferenceEngine:
    """Runs a program node by node."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self.memory: MemoryUse | None = None
        self.not_captured = ""
        self._views: KeptViews = WeakKeyDictionary[Halves, tuple[Sequence[Tensor], Sequence[Tensor]]]()

    def run(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> list[Tensor]:
        """One step; what it returns is new memory each time."""
        return self.begin(program, arguments)()

    def begin(self, program: StepProgram | ForwardProgram, arguments: Sequence[Tensor]) -> Apply:
        """Run what changes nothing that lasts; the result does the rest of the step.

        Programs are made for batches that are contiguous. A result that is a view of the batch, whose memory
        is not ours to keep, is copied.
        """
        given = list(arguments)
        batch = set()
        with torch.no_grad(), deterministic_algorithms(self._deterministic):
            for position in program.fed_positions:
                given[position] = given[position].contiguous()
                batch.add(given[position].untyped_storage().data_ptr())
            apply = program.begin(given, self._views)

        def end() -> list[Tensor]:
            with torch.no_grad(), deterministic_algorithms(self._deterministic):
                return [
                    output.clone() if output.untyped_storage().data_ptr() in batch else output
                    for output in apply()
                ]

        return end

    def forget(self, programs: Sequence[StepProgram | ForwardProgram]) -> None:
        """Let go of the arguments of programs."""
        self._views.clear()
