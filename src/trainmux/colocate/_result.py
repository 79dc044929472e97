"""What came of jobs that shared a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class JobResult:
    """How a job fared.

    ``losses`` has a row per step and a column for each of ``members``, NaN where a member of a fleet had left
    or was not there yet; ``metrics`` is what the last step gave. ``seconds``
    are from when the job was let in to the end of its last step. ``num_mispredicted`` iterations were held
    up by memory that was not free when it was expected to be; ``shift_seconds`` is how long iterations were
    held back on purpose. ``local_bytes`` were its own, up to ``peak_bytes`` came from the arena. An iteration
    was ``num_segments`` segments. ``error`` is what ended it early, ``None`` if nothing did.
    """

    name: str
    members: tuple[str, ...]
    num_steps: int
    losses: Tensor
    metrics: Mapping[str, Any]
    seconds: float
    num_mispredicted: int
    shift_seconds: float
    local_bytes: int
    peak_bytes: int
    num_segments: int
    is_eager: bool
    error: Exception | None

    @property
    def steps_per_second(self) -> float:
        """Its throughput, 0 where nothing ran."""
        return self.num_steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class ColocationResult:
    """All jobs by name, and the device's memory against the budget.

    ``peak_bytes`` is the most that was laid out at one time, ``used_bytes`` the most of it that was in use.
    ``budget_bytes`` is the budget that was in force last. Jobs that could share the device took turns
    instead for a while ``num_fall_backs`` times: they slowed each other down, or were not predicted well.
    """

    jobs: Mapping[str, JobResult]
    seconds: float
    budget_bytes: int
    peak_bytes: int
    used_bytes: int
    num_fall_backs: int = 0

    def __getitem__(self, name: str) -> JobResult:
        return self.jobs[name]

    @property
    def failed(self) -> tuple[str, ...]:
        """The jobs that ended with an error."""
        return tuple(name for name, job in self.jobs.items() if job.error is not None)


@dataclass(frozen=True)
class JobUsage:
    """A job at one moment: bytes of its own, bytes of the arena, steps done of those to do."""

    name: str
    local_bytes: int
    arena_bytes: int
    num_steps: int
    steps: int | None
    state: str
    """"waiting", "running", "done" or "failed"."""
