"""What it takes to make a dropped feature map again, kept up to date as decisions fall (µ-TWO A.4, A.5).

Each feature map has a lineage: the ranks to run again (``recomp_graph``) and the tensors these read that must
be on the device by then (``recomp_srcs``). Sources that are dropped are replaced by their own lineage:
Algorithm E does that in recomputations already chosen, Algorithm F in candidates that are left.

Where this departs from the paper:

- A tensor counts as a source only where it is on the device when the recomputation runs: a kept one until its
  last use, a swapped one from its deadline on, a recomputed one from its first backward use on. Algorithm E
  has no such test, and F tests the first backward use of swapped ones only.
- A lineage is grown at the moment at which it will run, not at the moment of the tensor it grows through, and
  a rank that is reached twice (a diamond) runs and counts once; the paper adds times.
- For a swapped tensor E and F lines 17-19 do not apply: recomputations chosen before go on reading it, and it
  comes back earlier (`Lineage.deadline`).
- ``total_recomp_time`` is ``recomp_time`` × (1 + recomputations that read it); F line 18 is one short.
- Never run again: a node that changes something in place or is not repeatable. Never read: what has been
  changed since, as a parameter after its update.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from trainmux.errors import PlanError
from trainmux.planning._facts import Facts


class Decision(Enum):
    """What happens to a feature map between its last forward and its first backward use."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass
class _Derivation:
    """A lineage as it stands: what to run and to read just before rank ``anchor``."""

    anchor: int
    recomp_srcs: set[int] = field(default_factory=set)
    recomp_graph: set[int] = field(default_factory=set)
    recomp_time: float = 0.0


_Growth = tuple[set[int], set[int]]
"""Ranks and sources that a lineage needs in addition."""
_NEVER = sys.maxsize


def _first_after(ranks: Sequence[int], rank: int) -> int:
    """The first of rising ``ranks`` that is larger than ``rank``."""
    index = bisect_right(ranks, rank)
    return ranks[index] if index < len(ranks) else _NEVER


def recomp_memory(facts: Facts, tensor: int, nodes: Iterable[int]) -> int:
    """The most bytes needed at once while ``nodes`` run again to make ``tensor``, its own included.

    Outputs are dropped when no later one of the nodes reads them; sources are not counted.
    """
    ranks = sorted(nodes)
    records = facts.profile.nodes
    last_read = {made: rank for rank in ranks for made in records[rank].creates}
    for rank in ranks:
        for read in records[rank].reads:
            if read in last_read:
                last_read[read] = rank
    dropped_after = dict.fromkeys(ranks, 0)
    for made, rank in last_read.items():
        if made != tensor:
            dropped_after[rank] += facts.tensors[made].memory_size
    live = peak = 0
    for rank in ranks:
        node = facts.nodes[rank]
        live += node.created_bytes
        if live + node.workspace_bytes > peak:
            peak = live + node.workspace_bytes
        live -= dropped_after[rank]
    return peak


class Lineage:
    """Lineages of all feature maps of one sub-array, and the decisions that have fallen.

    Ranks and tensors are those of the sub-array's profile. A feature map that cannot be made again at all
    has no lineage: `can_recompute` says so, and its ``recompute_ratio`` is 0.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.decisions: dict[int, Decision] = dict.fromkeys(facts.feature_maps, Decision.KEEP)
        self._last_use = [tensor.lifetime[1] for tensor in facts.tensors]
        # By tensor: from which rank of the backward pass on it is there, as far as decided.
        self._there_from = [0] * len(facts.tensors)
        # By tensor: the first rank that changes what was created, and by rank: that changes what was read.
        self._made_until = [
            _first_after(tensor.changed_at, -1 if tensor.created_at is None else tensor.created_at)
            for tensor in facts.tensors
        ]
        self._read_until = [
            min((_first_after(facts.tensors[read].changed_at, rank) for read in node.reads), default=_NEVER)
            for rank, node in enumerate(facts.profile.nodes)
        ]
        self._reads = [
            tuple(read for read in node.reads if not facts.tensors[read].byte_class.is_static)
            for node in facts.profile.nodes
        ]
        self._derivations: dict[int, _Derivation] = {}
        # For each tensor that is a source: who has it among its sources.
        self._readers: dict[int, set[int]] = {}
        for tensor in facts.feature_maps:
            derivation = _Derivation(self._first_bw(tensor))
            growth = self._grow(derivation, tensor)
            if growth is not None:
                self._derivations[tensor] = derivation
                self._apply(tensor, growth)

    def recomp_srcs(self, tensor: int) -> frozenset[int]:
        """What must be on the device to make it again, static tensors left out."""
        return frozenset(self._derivation(tensor).recomp_srcs)

    def recomp_graph(self, tensor: int) -> tuple[int, ...]:
        """The ranks to run again, rising."""
        return tuple(sorted(self._derivation(tensor).recomp_graph))

    def recomp_time(self, tensor: int) -> float:
        """Seconds of one recomputation from its present sources."""
        return self._derivation(tensor).recomp_time

    def recomp_memory(self, tensor: int) -> int:
        """The most bytes one recomputation needs at once, the tensor's own included."""
        return recomp_memory(self.facts, tensor, self._derivation(tensor).recomp_graph)

    def recomp_cnt(self, tensor: int) -> int:
        """How often it would be made: once for itself, and once in each recomputation that reads it."""
        first_bw = self._first_bw(tensor)
        return 1 + sum(self._derivations[reader].anchor < first_bw for reader in self.chosen_readers(tensor))

    def total_recomp_time(self, tensor: int) -> float:
        """Algorithm D: what recomputing it costs in a step."""
        return self.recomp_time(tensor) * self.recomp_cnt(tensor)

    def recompute_ratio(self, tensor: int) -> float:
        """Bytes given back per second of recomputation; 0 where there is no lineage, infinite for no time."""
        if tensor not in self._derivations:
            return 0.0
        total = self.total_recomp_time(tensor)
        return self.facts.tensors[tensor].memory_size / total if total > 0 else math.inf

    def chosen_readers(self, tensor: int) -> list[int]:
        """The recomputations chosen so far that have it among their sources."""
        readers = self._readers.get(tensor, ())
        return sorted(reader for reader in readers if self.decisions[reader] is Decision.RECOMPUTE)

    def deadline(self, tensor: int) -> int:
        """Before which rank it must be back: its first backward use, or a recomputation that reads it."""
        anchors = [self._derivations[reader].anchor for reader in self.chosen_readers(tensor)]
        return min([self._first_bw(tensor), *anchors])

    def can_recompute(self, tensor: int) -> bool:
        """Whether it has a lineage, and those chosen recomputations that read it can do without it."""
        return self.would_run(tensor) is not None

    def would_run(self, tensor: int) -> dict[int, frozenset[int]] | None:
        """What recomputing it would mean: the ranks to run for it, and for each recomputation that grows.

        ``None`` where it cannot be recomputed.
        """
        if tensor not in self._derivations or self.decisions.get(tensor) is not Decision.KEEP:
            return None
        graphs = {tensor: frozenset(self._derivations[tensor].recomp_graph)}
        for reader, growth in self._growth_of_readers(tensor).items():
            if growth is None:
                return None
            graphs[reader] = frozenset(growth[0] | self._derivations[reader].recomp_graph)
        return graphs

    def swap(self, tensor: int) -> frozenset[int]:
        """Decide to swap; returns the undecided feature maps whose lineage or ratio is another now."""
        self._decide(tensor, Decision.SWAP)
        self._there_from[tensor] = self.deadline(tensor)
        return frozenset(self._update_candidates(tensor))

    def recompute(self, tensor: int) -> frozenset[int]:
        """Decide to recompute; returns the undecided feature maps whose lineage or ratio is another now.

        Refused with `PlanError`: what `can_recompute` denies.
        """
        if not self.can_recompute(tensor):
            raise PlanError(
                f"a tensor to recompute needs a lineage, but {self._name(tensor)} has none now; swap it or "
                "ask can_recompute first"
            )
        growths = self._growth_of_readers(tensor)
        self._decide(tensor, Decision.RECOMPUTE)
        self._there_from[tensor] = self._first_bw(tensor)
        changed = set(self._derivations[tensor].recomp_srcs)
        changed |= self._update_recomps(tensor, growths)
        changed |= self._update_candidates(tensor)
        return frozenset(source for source in changed if self.decisions.get(source) is Decision.KEEP)

    def keep(self, tensors: Iterable[int]) -> None:
        """Take decisions back and derive the recomputations that are left anew; candidates are not updated.

        What they read stays where it is: a lineage can only become shorter by this.
        """
        for tensor in tensors:
            self.decisions[tensor] = Decision.KEEP
            self._there_from[tensor] = 0
        for tensor, decision in self.decisions.items():
            if decision is not Decision.RECOMPUTE:
                continue
            for source in list(self._derivations[tensor].recomp_srcs):
                self._drop_source(tensor, source)
            self._derivations[tensor] = _Derivation(self._first_bw(tensor))
            growth = self._grow(self._derivations[tensor], tensor)
            assert growth is not None
            self._apply(tensor, growth)

    def _update_recomps(self, tensor: int, growths: dict[int, _Growth | None]) -> set[int]:
        """Algorithm E; returns the tensors that have become sources of a chosen recomputation."""
        sources: set[int] = set()
        for reader, growth in growths.items():
            assert growth is not None
            self._drop_source(reader, tensor)
            self._apply(reader, growth)
            sources |= growth[1]
        return sources

    def _update_candidates(self, tensor: int) -> set[int]:
        """Algorithm F, lines 2-16; returns the candidates that had to find other sources."""
        changed: set[int] = set()
        for candidate in sorted(self._readers.get(tensor, ())):
            derivation = self._derivations[candidate]
            is_open = self.decisions[candidate] is Decision.KEEP
            if not is_open or self._there_from[tensor] <= derivation.anchor <= self._last_use[tensor]:
                continue
            changed.add(candidate)
            growth = self._grow(derivation, tensor)
            self._drop_source(candidate, tensor)
            if growth is not None:
                self._apply(candidate, growth)
                continue
            for source in list(derivation.recomp_srcs):
                self._drop_source(candidate, source)
            del self._derivations[candidate]
        return changed

    def _growth_of_readers(self, tensor: int) -> dict[int, _Growth | None]:
        """For each chosen recomputation that would miss the tensor: what it would need instead."""
        first_bw = self._first_bw(tensor)
        return {
            reader: self._grow(self._derivations[reader], tensor)
            for reader in self.chosen_readers(tensor)
            if self._derivations[reader].anchor < first_bw
        }

    def _grow(self, derivation: _Derivation, tensor: int) -> _Growth | None:
        """What a lineage needs in addition to make ``tensor``; ``None`` where that cannot be made.

        A rank can run again if its node is repeatable, changes nothing, and reads what has not been changed
        since; what it makes must not have been changed either.
        """
        nodes, tensors = self.facts.profile.nodes, self.facts.tensors
        there_from, last_use, anchor = self._there_from, self._last_use, derivation.anchor
        ranks: set[int] = set()
        sources: set[int] = set()
        wanted = [tensor]
        while wanted:
            made = wanted.pop()
            rank = tensors[made].created_at
            if rank is None or self._made_until[made] < anchor:
                return None
            if rank in ranks or rank in derivation.recomp_graph:
                continue
            if not nodes[rank].is_repeatable or nodes[rank].changes or self._read_until[rank] < anchor:
                return None
            ranks.add(rank)
            for read in self._reads[rank]:
                if read != tensor and there_from[read] <= anchor <= last_use[read]:
                    sources.add(read)
                else:
                    wanted.append(read)
        return ranks, sources

    def _apply(self, tensor: int, growth: _Growth) -> None:
        derivation = self._derivations[tensor]
        ranks, sources = growth
        derivation.recomp_graph |= ranks
        derivation.recomp_srcs |= sources
        derivation.recomp_time += sum(self.facts.nodes[rank].seconds for rank in sorted(ranks))
        for source in sources:
            self._readers.setdefault(source, set()).add(tensor)

    def _drop_source(self, tensor: int, source: int) -> None:
        self._derivations[tensor].recomp_srcs.discard(source)
        self._readers[source].discard(tensor)

    def _decide(self, tensor: int, decision: Decision) -> None:
        if self.decisions.get(tensor) is not Decision.KEEP:
            raise PlanError(
                f"only an undecided feature map can be decided on, but got {self._name(tensor)}; "
                "decide on each once"
            )
        self.decisions[tensor] = decision

    def _derivation(self, tensor: int) -> _Derivation:
        if tensor not in self._derivations:
            raise PlanError(
                f"a feature map with a lineage was expected, but {self._name(tensor)} has none; "
                "ask can_recompute first"
            )
        return self._derivations[tensor]

    def _first_bw(self, tensor: int) -> int:
        first_bw = self.facts.tensors[tensor].first_bw_access
        assert first_bw is not None
        return first_bw

    def _name(self, tensor: int) -> str:
        if 0 <= tensor < len(self.facts.tensors):
            return f"tensor {tensor} ({self.facts.profile.tensors[tensor].name!r})"
        return f"tensor {tensor}"
