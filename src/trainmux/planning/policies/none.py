"""No memory optimization: what HFTA does (µ-TWO §5, baseline 1).

Nothing is swapped and nothing recomputed: a partition fits as it is, or it does not. That as many members as
fit are fused, and the rest runs in turns, comes from the partitions that are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmux.ir import Schedule
from trainmux.planning._body import FixedBody, Task, infeasible, plain_order


@dataclass(frozen=True)
class NoOptimization:
    """The policy ``none``."""

    name: str = "none"

    def schedule(self, task: Task) -> Schedule:
        body = FixedBody(task, plain_order(task.profiles, task.multiplexing))
        peak = int(body.needed().max())
        if peak > task.limit_bytes:
            raise infeasible(task, self.name, peak - task.limit_bytes)
        return body.plain_schedule()
