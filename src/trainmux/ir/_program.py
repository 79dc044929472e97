"""A planned step as a row of instructions on three lanes (µ-TWO §3.2 (6), Algorithm H corrected).

The host enqueues instructions in one order, the *issue order*. Each lane runs its own in that order; lanes
synchronise only at a ``Wait``, and at the end of a part, where all of them join.

Memory follows the issue order alone, not the clock. ``Compute``, ``Recompute`` and ``Prefetch`` take the
bytes of what they make when they are issued, ``Free`` gives bytes back, and both happen on the compute lane:
what is taken after a ``Free`` is written after it. A copy's own lane is kept away from bytes in use by waits.
So the peak of a program is known exactly without knowing how long anything takes.

Each swap needs: a wait of OUT for the compute lane (the tensor is complete), a wait of COMPUTE for the
offload before its ``Free``, a wait of IN for the offload (the host's copy is complete) and for the compute
lane (the bytes are no longer in use by who had them before), and a wait of COMPUTE for the prefetch before
the next use.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Lane(Enum):
    """The stream that an instruction runs on."""

    COMPUTE = "compute"
    OUT = "device to host"
    IN = "host to device"


@dataclass(frozen=True)
class Compute:
    """Run a node of a sub-array, as every step does once."""

    sub_array: int
    node: int


@dataclass(frozen=True)
class Recompute:
    """Run a node again. Of what it creates, ``keeps`` becomes resident; the rest is given back at its end."""

    sub_array: int
    node: int
    keeps: tuple[int, ...]


@dataclass(frozen=True)
class Offload:
    """Copy a resident tensor to its place on the host; it stays resident until it is freed."""

    sub_array: int
    tensor: int


@dataclass(frozen=True)
class Prefetch:
    """Take memory for a tensor and copy it back from the host; resident from then on, valid at its end."""

    sub_array: int
    tensor: int


@dataclass(frozen=True)
class Free:
    """Give the device bytes of a tensor back."""

    sub_array: int
    tensor: int


@dataclass(frozen=True)
class Wait:
    """Hold ``lane`` until the instruction at position ``on`` of the same part has ended, on its own lane."""

    lane: Lane
    on: int


Instruction = Compute | Recompute | Offload | Prefetch | Free | Wait


ALIGNMENT = 512
"""Offsets are multiples of this: what CUDA's own allocator promises, enough for every kernel."""


@dataclass(frozen=True)
class Tenancy:
    """The bytes of a tensor from the instruction that takes them to the one that gives them back.

    ``begin`` and ``end`` are positions in the part: bytes are in use from the beginning of instruction
    ``begin`` until ``end`` is issued, for an ``end`` that is a ``Free``, or has run, for an instruction's own
    workspace (``tensor`` is -1, ``begin == end``) and for outputs that a ``Recompute`` does not keep
    (``begin == end`` too). ``begin`` -1: there when the part begins. ``end`` = number of instructions: still
    there when it ends. A tensor that is there at the end of one part and at the beginning of the next lies
    at the same offset in both, the body following itself.
    """

    sub_array: int
    tensor: int
    begin: int
    end: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Part:
    """Instructions with the placement of every byte they use, static tensors included."""

    instructions: tuple[Instruction, ...]
    tenancies: tuple[Tenancy, ...]


@dataclass(frozen=True)
class Program:
    """A prologue, a body that is repeated, and an epilogue.

    One pass through the body is one step of every sub-array. With sub-arrays that run in turns prologue and
    epilogue are empty. In a ring the prologue is the first sub-array's forward pass, the body begins with
    its backward pass and ends with its next forward pass, and the epilogue is the backward pass that is left
    in flight, with its update.

    ``resident`` are the (sub-array, tensor) pairs that are on the device before the prologue and after the
    epilogue; every other static tensor is on the host then. ``slab_bytes`` is the end of the highest
    tenancy; ``host_bytes`` what host copies take.
    """

    prologue: Part
    body: Part
    epilogue: Part
    resident: tuple[tuple[int, int], ...]
    slab_bytes: int
    host_bytes: int
