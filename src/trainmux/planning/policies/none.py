"""No memory optimization: what HFTA does (µ-TWO §5, baseline 1).

Nothing is swapped and nothing recomputed: a partition fits as it is, or it does not. That as many members as
fit are fused, and the rest runs in turns, comes from the partitions that are tried.
"""

from __future__ import annotations

from trainmux.ir import Schedule
from trainmux.planning._body import Task, infeasible, plain_body


def schedule(task: Task) -> Schedule:
    """The policy ``none``."""
    body = plain_body(task.profiles, task.multiplexing)
    excess = int(body.needed().max()) - task.limit_bytes
    if excess > 0:
        raise infeasible(task, "none", excess)
    return body.plain_schedule()
