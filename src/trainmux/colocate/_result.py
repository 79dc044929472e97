"""Results of co-located jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class JobResult:
    """The result of one job.

    ``losses`` has a row per step and a column for each of ``members``, NaN where a member of a fleet was
    absent; ``metrics`` are those of the last step. ``seconds`` last from the job's admission to the end of
    its last step. ``num_mispredicted`` iterations were held up by memory that was not free as predicted;
    ``shift_seconds`` is how long iterations were held back on purpose. The job owned ``local_bytes`` and up
    to ``peak_bytes`` of the arena. An iteration had ``num_segments`` segments. ``error`` ended it early, if
    any.
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
    ``budget_bytes`` is the last budget in force. Jobs that could share the device were time-sliced for a
    while ``num_fall_backs`` times, because their memory was mispredicted.
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
    """A job at one moment: its local bytes, its bytes of the arena, steps done of those to do."""

    name: str
    local_bytes: int
    arena_bytes: int
    num_steps: int
    steps: int | None
    state: str
    """"waiting", "running", "done" or "failed"."""
