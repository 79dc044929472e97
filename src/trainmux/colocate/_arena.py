"""A shared arena: two lanes that grow towards each other, and what is known of the jobs that share it."""

from __future__ import annotations

from collections.abc import Mapping

from trainmux.colocate._constants import ScroogeConstants
from trainmux.colocate._health import PairHealth
from trainmux.colocate._job import JobState
from trainmux.colocate._lane import Lane
from trainmux.colocate._layout import ArenaLayout

_REMEMBERED = 64
"""What jobs got counts for about so many iterations of the longest of them."""


class Arena:
    """``layout`` at work. What a ``former`` arena of the same jobs had learned of them is kept."""

    def __init__(
        self,
        layout: ArenaLayout,
        jobs: Mapping[str, JobState],
        constants: ScroogeConstants,
        now: float,
        former: Arena | None,
    ) -> None:
        self.layout = layout
        self._constants = constants
        self.base, self.top = Lane(now), Lane(now)
        self.base.jobs = [jobs[name] for name in layout.base]
        self.top.jobs = [jobs[name] for name in layout.top]
        # Equal jobs slow each other down equally, so their lifespans are known from the start (§7.1).
        is_ramped = len({job.demand.fingerprint for job in self.jobs}) > 1
        has_shares = len({job.demand.share for job in self.jobs}) > 1
        self.leeway = constants.leeway if is_ramped and len(self.jobs) == 2 and not has_shares else 1.0
        self.health: PairHealth = (
            former.health if former is not None else PairHealth(constants, is_ramped=is_ramped)
        )
        self.learn()

    @property
    def capacity_bytes(self) -> int:
        return self.layout.capacity_bytes

    @property
    def jobs(self) -> list[JobState]:
        """Those at both ends."""
        return self.base.jobs + self.top.jobs

    @property
    def is_shared(self) -> bool:
        return bool(self.base.jobs and self.top.jobs)

    def sides(self) -> list[tuple[Arena, Lane, Lane]]:
        """Each lane with the one across."""
        return [(self, self.base, self.top), (self, self.top, self.base)]

    def resize(self, layout: ArenaLayout) -> None:
        """Take another capacity for the same places."""
        self.layout = layout
        self.base.epoch += 1
        self.top.epoch += 1
        self.health.turns.end()
        self.learn()

    def is_served_less(self, other: Lane, job: JobState) -> bool:
        """Whether the job that comes next at the ``other`` end was served less than ``job``, by more than
        patience and leeway."""
        peer = other.next_job()
        return peer is not None and self.leeway * peer.service + self.patience_seconds < job.service

    def is_turn_of_waiting(self, other: Lane, job: JobState) -> bool:
        """Whether a job at the ``other`` end waits for memory and was served less: it begins when the end of
        ``job`` is empty.

        Otherwise one iteration of ``job`` could follow upon another, and the one that waits be asked only
        amid their peaks.
        """
        if self.fits_all or other.asked_at is None or other.is_held:
            return False
        return self.is_served_less(other, job)

    def learn(self) -> None:
        """Work out anew what decisions need and what only changes when an iteration ends."""
        peaks = [
            max((job.trend.peak_bytes for job in lane.jobs), default=0) for lane in (self.base, self.top)
        ]
        self.fits_all = sum(peaks) <= self.capacity_bytes
        """Whether both ends can be at their peaks at once: nothing has to be predicted then."""
        self.soft_budget_bytes = self.health.soft_budget(self.capacity_bytes, max(peaks))
        jobs = self.jobs
        longest = max((job.iteration_solo_seconds for job in jobs), default=0.0)
        self.patience_seconds = self._constants.patience_iterations * longest
        if self.leeway > 1 and any(job.service > _REMEMBERED * longest for job in jobs):
            for job in jobs:
                job.service /= 2
