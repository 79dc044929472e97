"""The bytes that a part of a program has in use after each of its instructions (µ-TWO Algorithm G corrected).

Nothing is estimated here: memory follows the issue order alone, so the tenancies say exactly what is in use
when, copies in flight, workspaces and what a recompute throws away included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, MemoryPoint, Part, Profile

_CLASSES = tuple(ByteClass)
_POSITION = {byte_class: position for position, byte_class in enumerate(_CLASSES)}


def memory(part: Part, profiles: Sequence[Profile]) -> tuple[MemoryPoint, ...]:
    """One point per instruction; classes without bytes are left out, the others stand in `ByteClass` order.

    ``profiles`` has one profile per sub-array. Refused with `PlanError`: a tenancy of a tensor that no
    profile knows, or outside of the part.
    """
    num_instructions = len(part.instructions)
    changes: list[list[tuple[int, int]]] = [[] for _ in range(num_instructions + 1)]
    own = [0] * num_instructions
    totals = [0] * len(_CLASSES)
    classes = [[_POSITION[tensor.byte_class] for tensor in profile.tensors] for profile in profiles]
    for sub_array, tensor, begin, end, size in _spans(part):
        if begin == end:
            own[begin] += size
            continue
        if not (0 <= sub_array < len(classes) and 0 <= tensor < len(classes[sub_array])):
            raise PlanError(
                f"a tenancy must belong to a tensor of a profile, but got tensor {tensor} of sub-array "
                f"{sub_array}; pass the profiles that the program was made for, one per sub-array"
            )
        byte_class = classes[sub_array][tensor]
        if begin == -1:
            totals[byte_class] += size
        else:
            changes[begin].append((byte_class, size))
        changes[end].append((byte_class, -size))
    points = []
    pairs = [
        (byte_class, total) if total else None for byte_class, total in zip(_CLASSES, totals, strict=True)
    ]
    by_class = tuple(pair for pair in pairs if pair is not None)
    for position in range(num_instructions):
        if changes[position]:
            for number, amount in changes[position]:
                total = totals[number] = totals[number] + amount
                pairs[number] = (_CLASSES[number], total) if total else None
            by_class = tuple([pair for pair in pairs if pair is not None])
        points.append(MemoryPoint(position, by_class, own[position]))
    return tuple(points)


def peak_live_bytes(part: Part) -> int:
    """The most bytes in use at once in a part; what its placement reserves cannot be less.

    Before the first instruction counts too, so a part without instructions has the bytes it stands on.
    """
    steps = [0] * (len(part.instructions) + 2)
    for _, _, begin, end, size in _spans(part):
        steps[begin + 1] += size
        steps[end + 2 if begin == end else end + 1] -= size
    return max(accumulate(steps))


def _spans(part: Part) -> list[tuple[int, int, int, int, int]]:
    """Sub-array, tensor, begin, end and size of each tenancy, its positions checked."""
    num_instructions = len(part.instructions)
    spans = []
    for tenancy in part.tenancies:
        begin, end = tenancy.begin, tenancy.end
        for_now = begin == end
        if not -1 <= begin <= end <= num_instructions or (for_now and not 0 <= begin < num_instructions):
            raise PlanError(
                f"a tenancy must begin at -1 or an instruction and end at a later one or at "
                f"{num_instructions}, the part's end, but got {begin} to {end} for tensor {tenancy.tensor} "
                f"of sub-array {tenancy.sub_array}; rewrite the schedule anew"
            )
        spans.append((tenancy.sub_array, tenancy.tensor, begin, end, tenancy.size_bytes))
    return spans
