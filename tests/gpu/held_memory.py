"""What the device holds during a test, and by whom where that is too much."""

from __future__ import annotations

from wide_jobs import MIB, cuda

import trainmux as tm
from trainmux.colocate._memory_facts import MemoryFacts, look_at_memory


class MemoryWatch:
    """Looks at the device now, and whenever it is told to."""

    def __init__(self) -> None:
        self.before = look_at_memory(cuda())
        self.seen: list[MemoryFacts] = []

    def look(self, colocation: tm.Colocation | None = None) -> int:
        """What is held now beyond what was held at first."""
        self.seen.append(look_at_memory(cuda(), colocation))
        return self.held[-1]

    @property
    def held(self) -> list[int]:
        """The same for every look."""
        return [facts.used_bytes - self.before.used_bytes for facts in self.seen]

    def report(self, budget_bytes: int, number: int | None = None) -> str:
        """Who held what at a look, or at the one with most, against the beginning."""
        held = self.held
        if number is None:
            number = held.index(max(held))
        return (
            f"look {number + 1} of {len(held)}: {held[number] / MIB:.1f} MiB held, budget "
            f"{budget_bytes / MIB:.1f} MiB\n{self.seen[number].table(self.before)}"
        )

    def growth(self, first: int) -> str:
        """Who holds what at the last look against look ``first``, and how it came to that."""
        steps = ", ".join(f"{(held - self.held[0]) / MIB:.1f}" for held in self.held)
        return f"MiB beyond the first look: {steps}\n{self.seen[-1].table(self.seen[first])}"
