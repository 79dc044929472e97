"""How many segments of a job to keep in flight (§6.1): few, so that memory is not taken too early; enough to
keep the device busy. The paper finds the number by running a few iterations with each of several limits."""

from __future__ import annotations

from collections.abc import Mapping

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
