"""Idle times of tensors, what can be done in them, and what recomputing some of them takes.

A *gap* is the time between two uses of a tensor that follow one another. Feature maps have one that matters,
from ``last_fw_access`` to ``first_bw_access``. Static tensors have them too: optimizer state is idle from its
update to that of the next step, a parameter from its update to the next forward pass and from there to the
backward pass; with several sub-arrays these are long.

`_recompute.Lineage` follows decisions as they fall, one after another. Here all decisions are given at once
and may be changed in any direction, which is what a search needs; and a dropped tensor may be made again
early, for others to read, and stay until its own use (``RECOMPUTE_EARLY``): a row of layers that is dropped
is then run again once instead of once per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from trainmux.ir import ByteClass, Schedule
from trainmux.scheduling._facts import Facts, TensorFacts
from trainmux.scheduling._recompute import recomp_memory

_SWAPPABLE_STATIC = frozenset(
    {ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE, ByteClass.BUFFER, ByteClass.CONSTANT}
)


class Choice(IntEnum):
    """What happens to a tensor in a gap."""

    KEEP = 0
    SWAP = 1
    RECOMPUTE = 2
    """Dropped and made again just before its next use, nothing else kept of what that takes."""
    RECOMPUTE_EARLY = 3
    """The same, but made as soon as another recomputation reads it, and kept from then on."""


RECOMPUTED = (Choice.RECOMPUTE, Choice.RECOMPUTE_EARLY)
_MAX_KNOWN = 2000
"""Derivations that are remembered at a time."""


@dataclass(frozen=True)
class Gap:
    """A tensor between the nodes of ranks ``last`` and ``first`` of its sub-array, which use it.

    ``copies_out`` is false where nothing changes the tensor in a whole step: the host's copy stays true.
    """

    sub_array: int
    tensor: int
    size_bytes: int
    last: int
    first: int
    is_static: bool
    copies_out: bool
    can_recompute: bool


@dataclass(frozen=True)
class Derived:
    """One recomputation: the ranks to run, rising, just before rank ``before``.

    ``beyond_bytes`` are needed meanwhile beyond the tensor itself, ``reads`` are tensors on the device that
    it needs.
    """

    tensor: int
    ranks: tuple[int, ...]
    before: int
    seconds: float
    beyond_bytes: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Derivation:
    """All recomputations of a sub-array, in the order they run.

    ``first_reads`` has, for each tensor that one of them reads, the first rank before which it is read.
    """

    recomputes: tuple[Derived, ...]
    first_reads: Mapping[int, int]


def find_gaps(all_facts: Sequence[Facts], *, with_static: bool) -> tuple[Gap, ...]:
    """The gaps of feature maps, sub-array by sub-array, and behind them those of static tensors."""
    gaps: list[Gap] = []
    for sub_array, facts in enumerate(all_facts):
        for tensor in facts.feature_maps:
            record = facts.tensors[tensor]
            assert record.last_fw_access is not None
            assert record.first_bw_access is not None
            if record.memory_size and record.first_bw_access > record.last_fw_access + 1:
                gaps.append(
                    Gap(
                        sub_array,
                        tensor,
                        record.memory_size,
                        record.last_fw_access,
                        record.first_bw_access,
                        is_static=False,
                        copies_out=True,
                        can_recompute=_can_recompute(facts, tensor),
                    )
                )
    if with_static:
        for sub_array, facts in enumerate(all_facts):
            for record in facts.tensors:
                gaps += _static_gaps(sub_array, record, len(facts.nodes))
    return tuple(gaps)


def _static_gaps(sub_array: int, record: TensorFacts, num_nodes: int) -> list[Gap]:
    if record.byte_class not in _SWAPPABLE_STATIC or not record.accesses or not record.memory_size:
        return []
    if not record.changed_at or record.changed_at[-1] != record.accesses[-1]:
        return []  # a recomputation may read it any time before the step's last node
    spans = [(record.accesses[-1], record.accesses[0])]
    return [
        Gap(
            sub_array,
            record.tensor,
            record.memory_size,
            last,
            first,
            is_static=True,
            copies_out=bool(record.changed_at),
            can_recompute=False,
        )
        for last, first in spans
        if (first - last) % num_nodes != 1
    ]


def choices_of(schedule: Schedule, gaps: Sequence[Gap]) -> list[Choice]:
    """What a schedule does in each gap."""
    swapped = {(swap.sub_array, swap.tensor, swap.offload_after[1]) for swap in schedule.swaps}
    recomputed = {(each.sub_array, each.tensor): each.before for each in schedule.recomputes}
    choices = []
    for gap in gaps:
        before = recomputed.get((gap.sub_array, gap.tensor))
        if (gap.sub_array, gap.tensor, gap.last) in swapped:
            choices.append(Choice.SWAP)
        elif before is None or gap.is_static:
            choices.append(Choice.KEEP)
        else:
            is_early = before != (gap.sub_array, gap.first)
            choices.append(Choice.RECOMPUTE_EARLY if is_early else Choice.RECOMPUTE)
    return choices


def derive(facts: Facts, recomputed: Mapping[int, Choice]) -> Derivation | None:
    """The recomputations of a sub-array's feature maps; ``None`` where one of them cannot be made again.

    Every other tensor counts as on the device as long as it is needed: one that is swapped is brought back
    for whoever reads it first.
    """
    return _Deriving(facts, recomputed).run()


class Derivations:
    """Derivations that were asked for before, of sub-arrays that share facts together."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, frozenset[tuple[int, Choice]]], Derivation | None] = {}
        self._facts: dict[int, Facts] = {}

    def of(self, facts: Facts, recomputed: Mapping[int, Choice]) -> Derivation | None:
        """The same as `derive`."""
        key = (id(facts), frozenset(recomputed.items()))
        if key not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._facts[id(facts)] = facts  # kept, so that no other facts get the same id
            self._known[key] = derive(facts, recomputed)
        return self._known[key]


def _can_recompute(facts: Facts, tensor: int) -> bool:
    """Whether a tensor can be made again while everything else is kept."""
    return derive(facts, {tensor: Choice.RECOMPUTE}) is not None


class RecomputePrices:
    """What recomputing one feature map more would take, beside those that are ``recomputed`` already."""

    def __init__(self, facts: Facts, recomputed: Mapping[int, Choice]) -> None:
        self._facts = facts
        self._deriving = _Deriving(facts, recomputed)
        self._made_before: dict[int, int] = {}
        for tensor in recomputed:
            first_use = facts.tensors[tensor].first_bw_access
            if first_use is not None:
                self._made_before[tensor] = first_use

    def seconds(self, tensor: int) -> float | None:
        """For one; ``None`` where it cannot be made again."""
        anchor = self._facts.tensors[tensor].first_bw_access
        self._deriving.made_before = dict(self._made_before)
        ranks = self._deriving.ranks_for(tensor, anchor) if anchor is not None else None
        if ranks is None:
            return None
        return sum(self._facts.nodes[rank].seconds for rank in ranks[0])


class _Deriving:
    def __init__(self, facts: Facts, recomputed: Mapping[int, Choice]) -> None:
        self.facts = facts
        self.recomputed = recomputed
        self.made_before: dict[int, int] = {}
        self.recomputes: list[Derived] = []
        self.first_reads: dict[int, int] = {}

    def run(self) -> Derivation | None:
        tensors = self.facts.tensors
        first_uses = {tensor: tensors[tensor].first_bw_access for tensor in self.recomputed}
        # In the order they run: sources that are made early have been made when others need them.
        for tensor in sorted(first_uses, key=lambda t: (first_uses[t] or 0, tensors[t].created_at or 0)):
            anchor = first_uses[tensor]
            if anchor is None or (tensor not in self.made_before and not self._make(tensor, anchor)):
                return None
        return Derivation(tuple(self.recomputes), self.first_reads)

    def ranks_for(self, tensor: int, anchor: int) -> tuple[set[int], set[int]] | None:
        """The ranks that make ``tensor`` just before rank ``anchor``, and what they read from outside."""
        facts, nodes = self.facts, self.facts.profile.nodes
        ranks: set[int] = set()
        reads: set[int] = set()
        waiting = [tensor]
        while waiting:
            made = waiting.pop()
            rank = facts.tensors[made].created_at
            if rank is None or self._is_changed(made, rank, anchor):
                return None
            if rank in ranks:
                continue
            node = nodes[rank]
            if not node.is_repeatable or node.changes:
                return None
            ranks.add(rank)
            for read in node.reads:
                if facts.tensors[read].byte_class.is_static or self._is_there(read, anchor):
                    if self._is_changed(read, rank, anchor):
                        return None
                    reads.add(read)
                else:
                    waiting.append(read)
        # What one of the ranks makes need not be read from outside as well.
        return ranks, reads.difference(*(nodes[rank].creates for rank in ranks))

    def _make(self, tensor: int, anchor: int) -> bool:
        """Note how ``tensor`` is made just before rank ``anchor``; ``False`` where it cannot be."""
        found = self.ranks_for(tensor, anchor)
        if found is None:
            return False
        ranks, reads = tuple(sorted(found[0])), tuple(sorted(found[1]))
        for read in reads:
            self.first_reads[read] = min(anchor, self.first_reads.get(read, anchor))
        self.recomputes.append(
            Derived(
                tensor,
                ranks,
                anchor,
                sum(self.facts.nodes[rank].seconds for rank in ranks),
                recomp_memory(self.facts, tensor, ranks) - self.facts.tensors[tensor].memory_size,
                reads,
            )
        )
        self.made_before[tensor] = anchor
        return True

    def _is_there(self, tensor: int, anchor: int) -> bool:
        """Whether it is on the device just before ``anchor``, or can be brought or made there by then."""
        if anchor > self.facts.tensors[tensor].lifetime[1]:
            return False
        choice = self.recomputed.get(tensor)
        if choice is None or self.made_before.get(tensor, anchor + 1) <= anchor:
            return True
        return choice is Choice.RECOMPUTE_EARLY and self._make(tensor, anchor)

    def _is_changed(self, tensor: int, after: int, before: int) -> bool:
        return any(after < rank < before for rank in self.facts.tensors[tensor].changed_at)
