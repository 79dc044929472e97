"""The numbers that the paper leaves open, in one place (docs/decisions/0010-scrooge-constants.md)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainmux.errors import ConfigError


@dataclass(frozen=True)
class ScroogeConstants:
    """How the scrooge scheduler behaves where §5 and §6 give no value. Every number must be above 0."""

    time_step_share: float = 1 / 64
    """T, by which an iteration is shifted: this share of the waiting job's own iteration."""
    lead_share: float = 1 / 8
    """How much sooner than its memory is predicted to be free an iteration begins, as a share of itself,
    beside a peer that only gives memory back: it waits on its way then, at gates instead of at the start."""
    first_budget_share: float = 0.75
    """The part of the arena that predictions may fill when two jobs begin to share it."""
    ramp_steps: int = 4
    """Raises from the first budget to the whole arena, each after a round of iterations without a stall."""
    in_flight_limit: int = 2
    """Segments of one job that are enqueued and not complete as long as somebody may wait for its memory: one
    runs, one is ready behind it."""
    feedback_weight: float = 0.5
    """How much of a lifespan is the last iteration's; the rest is what was believed before it."""
    stall_share: float = 0.05
    """An iteration was mispredicted if gates held it up for more than this share of its solo time."""
    stalls_to_fall_back: int = 4
    """Mispredictions among the last ``stall_window`` iterations at which a pair goes over to turns."""
    stall_window: int = 8
    rounds_of_turns: int = 16
    """Rounds in which jobs take turns before sharing is tried again."""
    turns_growth: int = 4
    """By what the rounds grow each time that sharing fails again, up to ``max_rounds_of_turns``."""
    max_rounds_of_turns: int = 1024
    least_gain: float = 0.97
    """Solo seconds of work done per second; below it, sharing loses and the device goes over to turns."""
    rounds_to_lose: float = 0.25
    """How much less work than that may be done, in rounds of all jobs, before the device does so."""
    patience_iterations: float = 0.25
    """How far, in iterations of the longer job, a job may get ahead of its share where memory is short."""
    leeway: float = 1.5
    """How many times what its peer gets one of two different jobs may get, where nobody asked for shares:
    they do most together when neither waits for the sake of the other's share."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(
                    f"{field.name} must be above 0, but got {getattr(self, field.name)}; leave it out for "
                    f"{field.default}"
                )
        if max(self.first_budget_share, self.feedback_weight) > 1:
            raise ConfigError(
                "first_budget_share and feedback_weight must be at most 1, but got "
                f"{self.first_budget_share} and {self.feedback_weight}; 1 switches either off"
            )
        if self.leeway < 1:
            raise ConfigError(f"leeway must be at least 1, but got {self.leeway}; 1 is none at all")
