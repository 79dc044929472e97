"""Algorithm C: what swapping a feature map costs, found by scheduling it (µ-TWO §4.2.2, A.3).

The copy back must have ended at the deadline: the first backward access, or the first chosen recomputation
that reads the tensor. What hides it, in this order: recomputations before the deadline; forward nodes of the
other sub-array, put in front of the deadline; backward nodes before that. It may not begin where memory is
over the limit already, in the peak interval. What then cannot be hidden is a stall, the swap's overhead.

1a  the deadline lies in the peak interval: nothing hides the copy
1b  so it does, and another copy still runs: that one's remaining time is waited for too
2a  hidden by forward nodes alone
2b  hidden by backward nodes, or by both
3   hidden in part, up to the peak interval or to the beginning of the backward pass

Where this departs from the paper: overheads are never negative; a forward node that makes a position worse
that is, or comes, over the limit is taken back, and only that one; the end of either graph ends the search;
prompts are exact, not one node early; a copy waits for everything on its lane; the copy to the host and the
release are part of it: where memory demands the bytes before that copy has ended, the wait is overhead too.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from trainmux.planning.policies._mutwo_copies import CopyBack, Key, LaneIn
from trainmux.planning.policies._mutwo_pair import Pair


@dataclass(frozen=True)
class SwapTrial:
    """A swap as it stands in the pair's state: its case, its overhead, and what hides it, in words."""

    key: Key
    case: str
    overhead: float
    offload: int
    seconds_out: float
    reason: str


class _Search:
    """One run of Algorithm C."""

    def __init__(self, pair: Pair, key: Key) -> None:
        self.pair = pair
        self.key = key
        self.body = pair.body
        lineage = pair.lineages[key[0]]
        rank = lineage.deadline(key[1])
        self.deadline = self.body.number(key[0], rank)
        self.stage_index = int(self.body.stage_of[self.deadline])
        self.stage = self.body.stages[self.stage_index]
        self.lane: LaneIn = pair.lanes_in[self.stage_index]
        self.times = pair.lay_out(self.stage_index)
        self.needed = self.body.needed()
        self.allowed = pair.allowed(self.needed)
        self.allowed_without = self.allowed
        self.is_read_again = any(
            pair.first_bw_access((key[0], reader)) == self.deadline
            for reader in lineage.chosen_readers(key[1])
        )
        self.index = 0

    def run(self) -> SwapTrial | None:
        pair, key = self.pair, self.key
        offload, seconds_out = pair.last_fw_access(key), pair.swap_out_seconds(key)
        released = pair.lane_out.release_at(
            self.body, self.times, pair.over(self.needed), offload, self.deadline, seconds_out
        )
        if released is None:
            return None
        release, wait_out = released
        copy = CopyBack(
            key, pair.size(key), pair.swap_in_seconds(key), release, self.deadline, not self.is_read_again
        )
        if self.needed[self.body.place[self.deadline]] > pair.limit:
            case = self._without_overlap(copy)
        else:
            case = self._with_overlap(copy)
        if case is None:
            return None
        stall = self.lane.copies[self.index].stall_seconds
        reason = self._reason(case, stall, wait_out)
        return SwapTrial(key, case, stall + wait_out, offload, seconds_out, reason)

    def _without_overlap(self, copy: CopyBack) -> str | None:
        """Cases 1a and 1b: issue the copy at the deadline, behind what the lane is busy with then."""
        lane, turn = self.lane, float(self.times[self.body.place[self.deadline]])
        self.index = int((lane.starts < turn - self.pair.tolerance).sum()) if lane.copies else 0
        remaining = 0.0
        if self.index:
            previous = self.index - 1
            remaining = float(lane.starts[previous]) + lane.copies[previous].seconds - turn
        is_busy = remaining > self.pair.tolerance
        start = turn + remaining if is_busy else turn
        end = lane.due(self.body, self.times, copy)
        if self.index < len(lane.copies):
            end = min(end, float(lane.starts[self.index]))
        self._insert(copy)
        lane.stall(self.index, max(0.0, start + copy.seconds - end), self.body)
        self._lay_out()
        return ("1b" if is_busy else "1a") if self._is_safe() else None

    def _with_overlap(self, copy: CopyBack) -> str | None:
        """Cases 2a, 2b and 3."""
        if not self._put_on_lane(copy):
            return None
        self._add_forward_nodes(copy)
        start = float(self.lane.starts[self.index])
        earliest = self._behind_peak(copy)
        stall = float(self.times[earliest]) - start
        if stall > self.pair.tolerance:
            self.lane.stall(self.index, stall, self.body)
            self._lay_out()
            return "3" if self._is_safe() else None
        if self.lane.copies[self.index].stall_seconds > 0:
            return "3"
        return "2a" if self._num_forward_nodes() and self._is_hidden_by_forward_nodes() else "2b"

    def _put_on_lane(self, copy: CopyBack) -> bool:
        """Before all that is due later, after all that is due earlier: those move ahead if that is safe.

        If not, they stay, and the copy takes what time there is between them and those due later.
        """
        lane = self.lane
        self.index = lane.index_by_deadline(self.body, self.deadline)
        free_from = -1.0
        if self.index:
            free_from = float(lane.starts[self.index - 1]) + lane.copies[self.index - 1].seconds
        end = lane.due(self.body, self.times, copy)
        if self.index < len(lane.copies):
            end = min(end, float(lane.starts[self.index]))
        self._insert(copy)
        self._lay_out()
        if self._is_safe():
            return True
        lane.stall(self.index, max(0.0, free_from + copy.seconds - end), self.body)
        self._lay_out()
        return self._is_safe()

    def _insert(self, copy: CopyBack) -> None:
        """Put the copy on the lane; as long as it is not laid out, its tensor is away up to the deadline."""
        self.lane.insert(self.index, copy, self.body)
        self.allowed_without = self.pair.allowed(self.body.needed())

    def _add_forward_nodes(self, copy: CopyBack) -> None:
        """The multiplexer: forward nodes go in front of the deadline until they hide the copy.

        Where not as many are safe as that takes, so many go there that one more would not be: one, two more,
        four more, and when that is too many, bisection.
        """
        if not len(self.stage.movable):
            return
        cut = self.deadline - int(self.stage.fixed[0])
        starts, first = self.stage.movable_starts, self.stage.num_before(cut)
        num_safe, num_unsafe, step = 0, len(self.stage.movable) - first + 1, 1
        while num_safe + 1 < num_unsafe and not self._is_hidden_by_forward_nodes():
            num_tried = bisect_left(starts, starts[first + num_safe] + self._missing_seconds()) - first
            if not num_safe < num_tried < num_unsafe:
                num_tried = min(num_safe + step, (num_safe + num_unsafe) // 2)
                step *= 2
            if self._try_forward_nodes(cut, num_tried - num_safe):
                num_safe = num_tried
            else:
                num_unsafe = num_tried
        self.stage.want(cut, min(starts[first + num_safe] - starts[first], copy.seconds))

    def _try_forward_nodes(self, cut: int, count: int) -> bool:
        """Add forward nodes; take them back where that is not safe."""
        state, times = self.pair.state(), self.times
        starts, is_hidden = self.lane.starts, self.lane.is_hidden
        self.stage.add_forward_nodes(cut, count)
        self.body.arrange(self.stage)
        self._lay_out()
        if self._is_safe():
            return True
        self.pair.go_back(state)
        self.times, self.lane.starts, self.lane.is_hidden = times, starts, is_hidden
        return False

    def _is_hidden_by_forward_nodes(self) -> bool:
        """Whether the copy can start when the forward nodes in front of the deadline do, or later."""
        return self._missing_seconds() <= 0

    def _missing_seconds(self) -> float:
        """The time by which forward nodes in front of the deadline do not suffice."""
        place = int(self.body.place[self.deadline]) - self._num_forward_nodes()
        start = float(self.lane.starts[self.index])
        return float(self.times[place]) - start - self.pair.tolerance

    def _num_forward_nodes(self) -> int:
        """How many of the other sub-array's stand in front of the deadline."""
        if not len(self.stage.movable):
            return 0
        return self.stage.num_at(self.deadline - int(self.stage.fixed[0]))

    def _behind_peak(self, copy: CopyBack) -> int:
        """The first position from which on, to the deadline, memory allows for the tensor."""
        needed = self.body.needed()
        place = int(self.body.place[self.deadline])
        earliest = self.lane.earliest(self.body, self.index)
        prompt = int(self.body.place[self.lane.prompts[self.index]])
        needed[earliest:prompt] += copy.size_bytes
        over = self.pair.over(needed[earliest:place])
        return earliest + int(over[-1]) + 1 if len(over) else earliest

    def _lay_out(self) -> None:
        self.times = self.pair.lay_out(self.stage_index)

    def _is_safe(self) -> bool:
        """No node needs more than before unless within the limit, and no other copy is late.

        Nor may others take up, over the limit, what the swap sets free there.
        """
        is_hidden = self.lane.is_hidden.copy()
        is_hidden[self.index] = True
        body, needed = self.body, self.body.needed()
        if not is_hidden.all() or (needed > self.allowed[body.order]).any():
            return False
        prompt = int(body.place[self.lane.prompts[self.index]])
        needed[prompt : int(body.place[self.deadline])] -= self.lane.copies[self.index].size_bytes
        return not (needed > self.allowed_without[body.order]).any()

    def _reason(self, case: str, stall: float, wait_out: float) -> str:
        prompt = int(self.body.place[self.lane.prompts[self.index]])
        place = int(self.body.place[self.deadline])
        between = self.body.order[prompt:place]
        first, end = self.body.first[self.key[0]], self.body.first[self.key[0] + 1]
        num_own = int(((between >= first) & (between < end)).sum())
        num_others = len(between) - num_own
        forward = f"{_nodes(num_others, 'forward node')} of the other sub-array"
        by = f"{forward} and {_nodes(num_own, 'node')} of its own"
        hidden = {
            "1a": "due in the peak interval, nothing hides the copy back",
            "1b": "due in the peak interval while another copy runs, nothing hides the copy back",
            "2a": f"copy back hidden by {forward}",
            "2b": f"copy back hidden by {by}",
            "3": f"copy back hidden in part by {by}",
        }[case]
        stalls = [f"stall of {stall:.3g} s"] if stall > 0 else []
        stalls += [f"release waits {wait_out:.3g} s for the copy out"] if wait_out > 0 else []
        return "; ".join([f"case {case}: {hidden}", *stalls])


def _nodes(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def try_swap(pair: Pair, key: Key) -> SwapTrial | None:
    """Schedule a swap in the pair's state; ``None`` where it cannot be done. The state is left changed."""
    return _Search(pair, key).run()
