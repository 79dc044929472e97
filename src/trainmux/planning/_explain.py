"""A program as text: one instruction a line, by names, so that two programs can be read side by side.

Positions and offsets are left out on purpose: one instruction more would change every line behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainmux.errors import PlanError
from trainmux.ir import Compute, Free, Instruction, Offload, Part, Prefetch, Profile, Program, Recompute, Wait


def explain_program(program: Program, profiles: Sequence[Profile]) -> str:
    """The three parts of ``program``, with what is on the device between steps; one profile per sub-array.

    Nodes and tensors are ``sub-array/number name``. Refused with `PlanError`: a program that names what is
    not in the profiles.
    """
    try:
        return "\n".join(_lines(program, profiles)) + "\n"
    except IndexError:
        raise PlanError(
            f"a program must name sub-arrays, nodes and tensors of its profiles, but this one names others "
            f"than those of the {len(profiles)} profiles passed; pass those that it was made for"
        ) from None


def _lines(program: Program, profiles: Sequence[Profile]) -> Iterator[str]:
    yield f"slab {program.slab_bytes} bytes, host copies {program.host_bytes} bytes"
    yield f"on the device between steps: {len(program.resident)} tensors"
    for sub_array, tensor in program.resident:
        yield f"  {_tensor(sub_array, tensor, profiles)} {_size(sub_array, tensor, profiles)}"
    for name, part in (
        ("prologue", program.prologue),
        ("body", program.body),
        ("epilogue", program.epilogue),
    ):
        yield f"{name}: {len(part.instructions)} instructions"
        for instruction in part.instructions:
            yield "  " + _line(instruction, part, profiles)


def _line(instruction: Instruction, part: Part, profiles: Sequence[Profile]) -> str:
    what = _named(instruction, part, profiles)
    match instruction:
        case Compute(sub_array, node):
            return what + _takes(sub_array, profiles[sub_array].nodes[node].creates, node, profiles)
        case Recompute(sub_array, node, keeps):
            return what + _takes(sub_array, keeps, node, profiles)
        case Prefetch(sub_array, tensor):
            return f"{what} takes {_size(sub_array, tensor, profiles)}"
        case Free(sub_array, tensor):
            return f"{what} gives {_size(sub_array, tensor, profiles)}"
        case _:
            return what


def _named(instruction: Instruction, part: Part, profiles: Sequence[Profile]) -> str:
    """An instruction without its sizes; a wait with the instruction that it is for."""
    match instruction:
        case Compute(sub_array, node) | Recompute(sub_array, node, _):
            name = profiles[sub_array].nodes[node].name
            return f"{type(instruction).__name__.lower():<9} {sub_array}/{node} {name}"
        case Offload(sub_array, tensor) | Prefetch(sub_array, tensor) | Free(sub_array, tensor):
            return f"{type(instruction).__name__.lower():<9} {_tensor(sub_array, tensor, profiles)}"
        case Wait(lane, on):
            awaited = " ".join(_named(part.instructions[on], part, profiles).split())
            return f"{'wait':<9} {lane.value}, for {awaited}"


def _takes(sub_array: int, tensors: Sequence[int], node: int, profiles: Sequence[Profile]) -> str:
    taken = [
        f"{_tensor(sub_array, tensor, profiles)} {_size(sub_array, tensor, profiles)}" for tensor in tensors
    ]
    workspace = profiles[sub_array].nodes[node].workspace_bytes
    if workspace:
        taken.append(f"workspace {workspace} bytes")
    return f" takes {', '.join(taken)}" if taken else ""


def _tensor(sub_array: int, tensor: int, profiles: Sequence[Profile]) -> str:
    return f"{sub_array}/{tensor} {profiles[sub_array].tensors[tensor].name}"


def _size(sub_array: int, tensor: int, profiles: Sequence[Profile]) -> str:
    return f"{profiles[sub_array].tensors[tensor].size_bytes} bytes"
