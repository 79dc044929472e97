"""A group's members in sub-arrays: one program of their width, run for each of them in one step.

Where complete fusion does not pay (large convolutions), members are trained in narrower sub-arrays, several
of them at once on parallel branches of the captured graph. A member is a plain slice of stacked storage,
so a sub-array's arguments are views and its program is the same as its neighbour's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from trainmux.engine._order import Apply, Halves, KeptViews
from trainmux.engine._program import ForwardProgram, StepProgram
from trainmux.runtime import ALIGNMENT_BYTES

P = TypeVar("P", StepProgram, ForwardProgram)

_MEMBER_AXIS_OF = {"scalars": 1, "neutral": None, "limits": 1}


class SubArrays(nn.Module):
    """Calls ``program`` once for each sub-array; ``axes`` gives each argument's model axis, if it has one.

    On CUDA, sub-arrays take turns on ``num_branches`` streams. A branch begins when everything before
    the step's fork is done and the step goes on when all branches are: memory that a branch frees is
    taken again by the same branch alone, after such a fork, so no kernel can still be reading it.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        axes: Sequence[int | None],
        fed: Sequence[int],
        num_arrays: int,
        num_branches: int,
    ) -> None:
        super().__init__()
        self._fed = frozenset(fed)
        self._program = program
        self._axes = tuple(axes)
        self._num_arrays = num_arrays
        self._num_branches = min(num_branches, num_arrays)
        self._streams: list[torch.cuda.Stream] = []
        self._halves: Halves | None = None

    def forward(self, *arguments: Tensor) -> list[Tensor]:
        device = arguments[0].device
        if device.type != "cuda" or self._num_branches == 1:
            parts = [self._program(*self._slice(arguments, index)) for index in range(self._num_arrays)]
            return _joined(parts)
        while len(self._streams) < self._num_branches - 1:
            self._streams.append(torch.cuda.Stream(device))
        main = torch.cuda.current_stream(device)
        streams = [main, *self._streams]
        for stream in self._streams:
            stream.wait_stream(main)
        parts = []
        for index in range(self._num_arrays):
            with torch.cuda.stream(streams[index % len(streams)]):
                parts.append(self._program(*self._slice(arguments, index)))
        for stream in self._streams:
            main.wait_stream(stream)
        return _joined(parts)

    def begin(self, arguments: Sequence[Tensor], kept: KeptViews | None = None) -> Apply:
        """Run all sub-arrays, one after another, up to their first change of an argument."""
        if self._halves is None:
            assert isinstance(self._program, fx.GraphModule)
            self._halves = Halves(self._program)
        ends = [self._halves.begin(self._slice(arguments, index)) for index in range(self._num_arrays)]
        return lambda: _joined([end() for end in ends])

    def _slice(self, arguments: Sequence[Tensor], index: int) -> list[Tensor]:
        taken = []
        for position, (argument, axis) in enumerate(zip(arguments, self._axes, strict=True)):
            width = 0 if axis is None else argument.shape[axis] // self._num_arrays
            part = _rows(argument, axis, index * width, width)
            # Compiled kernels read batches 16 bytes at a time; storage is aligned for each member anyway.
            is_batch = axis is not None and position in self._fed
            taken.append(part.clone() if is_batch and part.data_ptr() % ALIGNMENT_BYTES else part)
        return taken


def _rows(argument: Tensor, axis: int | None, begin: int, width: int) -> Tensor:
    """Some members of an argument; all of one that members share."""
    if axis is None:
        return argument
    part = argument.narrow(axis, begin, width)
    return part if axis == 0 else part.contiguous()


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Results of all sub-arrays, one behind another along the model axis."""
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def first_rows(program: StepProgram, arguments: Sequence[Tensor], width: int) -> list[Tensor]:
    """The arguments of ``program``, which is for ``width`` members, out of those of a wider one."""
    axes = member_axes(program)
    return [_rows(argument, axis, 0, width) for argument, axis in zip(arguments, axes, strict=True)]


def in_sub_arrays(program: P, num_arrays: int, num_branches: int) -> P:
    """A program for ``num_arrays`` times as many members as ``program`` is for."""
    if num_arrays == 1:
        return program
    axes, fed = member_axes(program), program.fed_positions
    return replace(program, module=SubArrays(program.module, axes, fed, num_arrays, num_branches))


def member_axes(program: StepProgram | ForwardProgram) -> list[int | None]:
    """The model axis of each argument; ``None`` for what all members share."""
    states = len(program.state_keys()) + len(program.total_names())
    return [
        *(0 if item.batched else None for item in program.inputs),
        *[0] * states,
        *(_MEMBER_AXIS_OF.get(name, 0) for name in program.number_names()),
    ]
