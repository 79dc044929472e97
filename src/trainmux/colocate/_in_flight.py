"""How many segments of a job to keep in flight (§6.1): few, so that memory is not taken too early; enough to
keep the device busy. The paper finds the number by running a few iterations with each of several limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmux.errors import ConfigError

CANDIDATE_LIMITS = (1, 2, 4, 8, 16)
_LOSS_ALLOWED = 0.01


def choose_in_flight_limit(seconds_by_limit: Mapping[int, float]) -> int:
    """The lowest limit whose iteration takes at most one percent longer than the best of them.

    ``seconds_by_limit`` are measured iteration times by limit. Refused with `ConfigError`: none, limits
    below 1 and times that are not above 0.
    """
    if not seconds_by_limit or min(seconds_by_limit) < 1 or not all(t > 0 for t in seconds_by_limit.values()):
        raise ConfigError(
            "expected iteration times above 0 for limits of at least 1 segment, but got "
            f"{dict(seconds_by_limit)}; measure the limits {', '.join(map(str, CANDIDATE_LIMITS))}"
        )
    fastest = min(seconds_by_limit.values())
    return min(limit for limit, taken in seconds_by_limit.items() if taken <= fastest * (1 + _LOSS_ALLOWED))


class InFlightSweep:
    """Finds a job's limit in the iterations in which it is profiled, from ``limit`` on.

    Where the device waits for the host between segments, more of them are kept in flight in the next
    iteration, up to the largest candidate. A job without such gaps keeps the first limit after one iteration.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.observed: tuple[float, ...] = ()
        """Seconds of the segments in an iteration with the limit that was found."""
        self._is_warm = False
        self._by_limit: dict[int, tuple[float, tuple[float, ...]]] = {}

    def iteration_ended(self, observed: Sequence[float], gap_seconds: float) -> bool:
        """Take down an iteration that ran alone; whether the limit is found.

        ``gap_seconds`` is how long nothing ran between its segments. The first of all iterations is slower
        than others will be, so it is not compared with them.
        """
        busy_seconds = sum(observed)
        has_gaps = gap_seconds > _LOSS_ALLOWED * busy_seconds
        if has_gaps and not self._is_warm:
            self._is_warm = True
            return False
        self._by_limit[self.limit] = (busy_seconds + gap_seconds, tuple(observed))
        if has_gaps and 2 * self.limit <= CANDIDATE_LIMITS[-1]:
            self.limit *= 2
            return False
        self.limit = choose_in_flight_limit({limit: row[0] for limit, row in self._by_limit.items()})
        self.observed = self._by_limit[self.limit][1]
        return True
