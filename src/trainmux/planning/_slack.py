"""Swaps with slack: copies that are slower than predicted hold nobody up, as far as there is memory for that.

A policy gives the bytes of an offloaded tensor back when its copy ought to have ended, and compute waits
there until it has; it takes them again when the copy back can just be in time. If copies are slower than
that, compute waits, though memory may be to spare. So once it is known what a schedule needs, bytes are given
back later and taken earlier, by as much as copies may be late. With copies as predicted that changes nothing,
or makes a schedule quicker that has to wait for copies back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trainmux.ir import Compute, Free, Lane, Offload, Part, Prefetch, Profile, Schedule, Swap, Wait
from trainmux.planning._memory import live_bytes
from trainmux.planning._timeline import lane_times


def with_slack(
    schedule: Schedule,
    body: Part,
    profiles: Sequence[Profile],
    limit_bytes: int,
    strain: float,
) -> Schedule:
    """The schedule with copies in time though they take ``strain`` times as long as predicted.

    As far as the bytes that are live, of the schedule's ``body`` and of what is there longer now, stay within
    the limit. Whether they can still be placed within it remains to be seen.
    """
    slack = _Slack(schedule, body, profiles, limit_bytes, strain)
    slack.fetch_earlier()
    slack.release_later()
    return replace(schedule, swaps=tuple(slack.swaps))


class _Slack:
    """Positions are those of nodes in the schedule's order, indices those of the body's instructions."""

    def __init__(
        self, schedule: Schedule, body: Part, profiles: Sequence[Profile], limit_bytes: int, strain: float
    ) -> None:
        self.swaps = list(schedule.swaps)
        self._order = schedule.order
        self._instructions = body.instructions
        self._profiles = profiles
        self._limit = limit_bytes
        self._strain = strain
        self._times = lane_times(body, profiles, counts_meetings=False)
        self._computes = [i for i, each in enumerate(body.instructions) if isinstance(each, Compute)]
        self._starts = [self._times.starts[index] for index in self._computes]
        self._positions = {node: position for position, node in enumerate(schedule.order)}
        self._live = np.asarray(live_bytes(body), dtype=np.int64)

    def release_later(self) -> None:
        """Give bytes back where the copies to the host have ended, at the latest where they are needed."""
        numbers = {self._key(swap, swap.offload_after): number for number, swap in enumerate(self.swaps)}
        freed = _first_frees(self._instructions)
        free_from = 0.0
        for index, each in enumerate(self._instructions):
            if not isinstance(each, Offload):
                continue
            after = bisect_left(self._computes, index) - 1  # it stands behind the node that it waits for
            tensor = self._profiles[each.sub_array].tensors[each.tensor]
            ready = self._times.ends[self._computes[after]]
            free_from = max(free_from, ready) + self._strain * tensor.swap_out_seconds
            number = numbers.get((each.sub_array, each.tensor, after))
            free = freed.get(index)
            if number is None or free is None:
                continue
            out, release, back = self._places(self.swaps[number])
            if release <= out:
                continue  # at the end of the body already
            wanted = min(bisect_left(self._starts, free_from), back if back > out else len(self._starts) - 1)
            if wanted <= release:
                continue
            over = self._over(free, self._computes[wanted], tensor.size_bytes)
            if len(over):
                wanted = bisect_left(self._computes, int(over[0]))
            if wanted > release:
                self._live[free : self._computes[wanted]] += tensor.size_bytes
                self.swaps[number] = replace(self.swaps[number], release_before=self._order[wanted])

    def fetch_earlier(self) -> None:
        """Take bytes where the copies back must begin to be in time, one behind the other."""
        numbers = {self._key(swap, swap.prefetch_prompt): number for number, swap in enumerate(self.swaps)}
        fetches = [i for i, each in enumerate(self._instructions) if isinstance(each, Prefetch)]
        latest = self._latest_starts(fetches)
        earliest = 0
        for index in fetches:
            each = self._instructions[index]
            assert isinstance(each, Prefetch)
            prompt = bisect_left(self._computes, index)
            number = numbers.get((each.sub_array, each.tensor, prompt))
            if number is None:
                continue
            size = self._profiles[each.sub_array].tensors[each.tensor].size_bytes
            out, release, back = self._places(self.swaps[number])
            lowest = max(earliest, release if out < release <= back else 0)
            wanted = max(lowest, bisect_right(self._starts, latest[index]) - 1)
            if wanted < back:
                over = self._over(self._begin_of(wanted), index, size)
                if len(over):
                    wanted = bisect_left(self._computes, int(over[-1])) + 1
            if wanted < back:
                self._live[self._begin_of(wanted) : index] += size
                swap = replace(self.swaps[number], prefetch_prompt=self._order[wanted])
                if release <= out:  # at the end of the body, whichever node before that it names
                    swap = replace(swap, release_before=self._order[min(release, wanted)])
                self.swaps[number] = swap
            earliest = min(wanted, back)

    def _latest_starts(self, fetches: Sequence[int]) -> dict[int, float]:
        """By index: when a copy back must begin at the latest, so that it and all behind it are in time."""
        due = dict.fromkeys(fetches, self._times.seconds)
        for index, each in enumerate(self._instructions):
            if isinstance(each, Wait) and each.lane is Lane.COMPUTE and each.on in due:
                due[each.on] = min(due[each.on], self._times.ends[index])
        found = {}
        start = self._times.seconds
        for index in reversed(fetches):
            each = self._instructions[index]
            assert isinstance(each, Prefetch)
            tensor = self._profiles[each.sub_array].tensors[each.tensor]
            start = min(start, due[index]) - self._strain * tensor.swap_in_seconds
            found[index] = start
        return found

    def _key(self, swap: Swap, node: tuple[int, int]) -> tuple[int, int, int]:
        return swap.sub_array, swap.tensor, self._positions[node]

    def _places(self, swap: Swap) -> tuple[int, int, int]:
        nodes = (swap.offload_after, swap.release_before, swap.prefetch_prompt)
        out, release, back = (self._positions[node] for node in nodes)
        return out, release, back

    def _begin_of(self, position: int) -> int:
        """The first index behind the node before."""
        return self._computes[position - 1] + 1 if position else 0

    def _over(self, begin: int, end: int, size_bytes: int) -> npt.NDArray[np.int64]:
        """The indices at which so many bytes more would pass the limit."""
        return begin + np.nonzero(self._live[begin:end] > self._limit - size_bytes)[0]


def _first_frees(instructions: Sequence[object]) -> dict[int, int]:
    """By the index of each offload: where its tensor's bytes are given back in the same part."""
    pending: dict[tuple[int, int], int] = {}
    found = {}
    for index, each in enumerate(instructions):
        if isinstance(each, Offload):
            pending[each.sub_array, each.tensor] = index
        elif isinstance(each, Free) and (each.sub_array, each.tensor) in pending:
            found[pending.pop((each.sub_array, each.tensor))] = index
    return found
