"""Inputs and outputs of a traced step, as plain data.

The graphs themselves are ``torch.fx`` graphs; these records say what each placeholder and each
output of such a graph means, so that no later stage has to guess from names or positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The part of a training step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class InputKind(Enum):
    """The content of a placeholder of a traced step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    SEED = "seed"
    COUNTER = "counter"
    TANGENT = "tangent"
    NUMBER = "number"
    """A number of a member's code, such as a dropout probability, in which members differ."""


class OutputKind(Enum):
    """The content of an output of a traced step."""

    LOSS = "loss"
    METRIC = "metric"
    BUFFER = "buffer"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class GraphInput:
    """One placeholder: its meaning, its name in the model or batch, and the member's shape."""

    kind: InputKind
    name: str
    shape: tuple[int, ...]
    dtype: str
    batched: bool = True


@dataclass(frozen=True)
class GraphOutput:
    """One output: its meaning and the name of the parameter, buffer or metric it belongs to."""

    kind: OutputKind
    name: str


@dataclass(frozen=True)
class FusionRecord:
    """The way one kind of operator was fused over the model axis, and how often.

    ``how`` is the name of the rule ("bmm", "fold model axis into batch", "vmap", "loop", "shared");
    ``fallback`` says why a slower way was taken and is empty where none was.
    """

    op: str
    how: str
    count: int
    locations: tuple[str, ...] = ()
    fallback: str = ""


@dataclass(frozen=True)
class FreeNumber:
    """A number of the members' code that is an input of the fused step: where it is read, and its values."""

    locations: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class MemoryUse:
    """Device bytes that torch's allocator holds for this process: as predicted before a step was captured,
    and as they were after it. ``predicted_bytes`` is ``None`` where nothing could be predicted."""

    predicted_bytes: int | None
    reserved_bytes: int


@dataclass(frozen=True)
class GroupSummary:
    """A group of members that trains as one: who is in it and how its operators were fused.

    ``notes`` say how its step runs: sub-arrays, compiled regions, the precision of products; ``memory`` is
    known once a step was captured, ``not_captured`` says why a step that should be was not. ``numbers`` are
    those of the members' code that may differ between them, and ``split_because`` says what keeps the members
    out of an earlier group.
    """

    members: tuple[str, ...]
    width: int
    optimizer: str
    num_nodes: int
    records: tuple[FusionRecord, ...]
    unfused_because: str = ""
    notes: tuple[str, ...] = ()
    memory: MemoryUse | None = None
    not_captured: str = ""
    numbers: tuple[FreeNumber, ...] = ()
    split_because: str = ""
