"""What goes into a measuring process and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class BenchError(Exception):
    """A way cannot be measured here, for a reason that is known: it goes into the record as it is."""


@dataclass(frozen=True)
class Job:
    """One measurement: what to train, how, and for how long. Everything in it can be written as JSON.

    ``way`` is the label of a way, or of a variant (``trainmux:NAME``); ``fleet`` has the keyword
    arguments that trainmux hands to ``Fleet``. ``folder`` is a place of its own for files, gone after the
    measurement; with ``takes_turns`` the process waits in it before it times.
    """

    workload: str
    batch_size: int
    width: int
    way: str
    device: str
    num_blocks: int
    block_seconds: float
    folder: str
    fleet: Mapping[str, Any] = field(default_factory=dict)
    takes_turns: bool = False


@dataclass(frozen=True)
class Timing:
    """Milliseconds per member and step: what each block of steps took in the mean, and their summary.

    ``num_members`` is how many models one step advanced. Both times to the end of the first step leave out
    the import of torch and trainmux: ``build_s`` begins with finished models in host memory,
    ``start_to_first_step_s`` before models and batches are made and the device is first used.
    """

    median_ms: float
    min_ms: float
    max_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    block_ms: tuple[float, ...]
    steps_per_block: int
    num_members: int
    num_warmup_steps: int
    build_s: float
    start_to_first_step_s: float


@dataclass(frozen=True)
class Memory:
    """Device memory: the allocator's peaks, and what the whole device had less at the end than before."""

    max_reserved_bytes: int
    max_allocated_bytes: int
    device_delta_bytes: int


@dataclass(frozen=True)
class Measurement:
    """What a way gave: its times, its memory (``None`` on a CPU), and the losses that show it trained.

    Both losses are one per member on the same batch, the first and the last that the way trained on.
    """

    num_parameters: int
    timing: Timing
    memory: Memory | None
    first_losses: tuple[float, ...]
    last_losses: tuple[float, ...]
    notes: tuple[str, ...] = ()
