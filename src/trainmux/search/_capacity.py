"""How many slots a memory budget holds."""

from __future__ import annotations

from trainmux.fleet import Fleet

SAMPLE = 4
"""So many members tell what each of them takes."""
_MOST_SLOTS = 500


def most_slots(one: Fleet, several: Fleet, budget: int | str) -> int:
    """How many members train within a budget, with nothing offloaded or recomputed: by two fleets of them.

    ``BudgetError`` where not even ``one`` does, whatever is done.
    """
    alone = one.plan(budget, "none")
    num_more = len(several.names) - 1
    if not num_more:
        return 1
    each = (several.plan(None, "none").peak_bytes - alone.peak_bytes) / num_more
    return min(1 + int((alone.budget_bytes - alone.peak_bytes) / max(each, 1)), _MOST_SLOTS)
