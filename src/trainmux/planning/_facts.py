"""Facts about a step: its kernels and tensors, idle times of tensors, and what recomputing them takes.

A node's position in its profile is its ``rank``. *Access* means reading, creating or changing. Forward is
what carries ``Phase.FORWARD``; the update counts as part of the backward pass, as in the paper, where it
hangs on the gradients (µ-TWO Tables A and B).

A *gap* is the time between two uses of a tensor that follow one another. Feature maps have one that matters,
from ``last_fw_access`` to ``first_bw_access``. Static tensors have them too: optimizer state is idle from its
update to that of the next step, a parameter from its update to the next forward pass and from there to the
backward pass; with several sub-arrays these are long.

Recomputations (Algorithms D to F) are derived from all decisions at once, which may change in any direction:
a search needs that. A dropped tensor may be made again early, for others to read, and stay until its own use
(``RECOMPUTE_EARLY``): a row of layers that is dropped is then run again once instead of once per layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from itertools import accumulate
from typing import ParamSpec, TypeVar

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Phase, Profile

Key = tuple[int, int]
"""A tensor: its sub-array and its position in the sub-array's profile."""

SYNCS_PER_SWAP = 0.3
"""Cross-stream dependencies that a swap adds to a program, where several share one: 0.18 in one of ResNet-101
with 1,026 swaps, and nearly as much time lost where one wait serves several."""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def remembered(function: Callable[_Given, _Result], max_remembered: int = 64) -> Callable[_Given, _Result]:
    """A pure function of objects or sequences of them, called once for those that are still remembered."""
    known: OrderedDict[tuple[int, ...], tuple[object, _Result]] = OrderedDict()

    @wraps(function)
    def asked(*given: _Given.args, **none: _Given.kwargs) -> _Result:
        rows = [list(each) if isinstance(each, list | tuple) else [each] for each in given]
        objects = [each for row in rows for each in row]
        key = tuple(map(id, objects))
        if key not in known:
            known[key] = (objects, function(*given, **none))
            if len(known) > max_remembered:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key][1]

    return asked


@dataclass(frozen=True)
class TensorFacts:
    """A storage and the ranks that touch it, rising.

    ``lifetime`` is from the first to the last rank at which the bytes must be there, both included: all ranks
    for static tensors, and to the last rank for results.
    """

    tensor: int
    byte_class: ByteClass
    memory_size: int
    accesses: tuple[int, ...]
    changed_at: tuple[int, ...]
    lifetime: tuple[int, int]


class Facts:
    """A profile with the facts that follow from its order.

    ``num_forward`` ranks are the forward pass, the rest backward pass and update. ``start_seconds`` has one
    entry more than there are nodes: when each begins with nothing else running, and when the last one ends.
    ``created_bytes`` are those that each rank creates, ``made_by`` has the rank that creates each tensor, -1
    for what is there before the step. ``feature_maps`` are the tensors that can be swapped or recomputed,
    of that class and needed in both passes, each with its ``last_fw_access`` and ``first_bw_access``.

    Refused with `PlanError`: a forward node behind a backward one, a position that names no tensor, a
    tensor that is used before it exists, created twice, or neither static nor created.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.nodes = profile.nodes
        self.num_forward = num_forward(profile)
        self.start_seconds = tuple(accumulate((node.seconds for node in self.nodes), initial=0.0))
        self.made_by = [-1] * len(profile.tensors)
        accesses, changed = self._walk()
        self.tensors = tuple(map(self._tensor, range(len(profile.tensors)), accesses, changed))
        self.created_bytes = tuple(
            sum(profile.tensors[tensor].size_bytes for tensor in node.creates) for node in self.nodes
        )
        self.feature_maps: dict[int, tuple[int, int]] = {}
        for facts in self.tensors:
            forward = [rank for rank in facts.accesses if rank < self.num_forward]
            backward = facts.accesses[len(forward) :]
            if facts.byte_class is ByteClass.FEATURE_MAP and forward and backward:
                self.feature_maps[facts.tensor] = forward[-1], backward[0]

    def _walk(self) -> tuple[list[list[int]], list[list[int]]]:
        """Note who makes each tensor; returns the ranks that access each, and those that change it."""
        records = self.profile.tensors
        accesses: list[list[int]] = [[] for _ in records]
        changed: list[list[int]] = [[] for _ in records]
        existing = {tensor for tensor, record in enumerate(records) if record.byte_class.is_static}
        for rank, node in enumerate(self.nodes):
            missing = {*node.reads, *node.changes} - existing
            if missing:
                raise PlanError(
                    f"node {node.name!r} needs tensors {sorted(missing)} to exist, but nothing before it "
                    "creates them; order the nodes as the step runs them"
                )
            for tensor in node.creates:
                if tensor in existing or not 0 <= tensor < len(records):
                    raise PlanError(
                        f"node {node.name!r} must create one of {len(records)} tensors that does not exist "
                        f"yet, but got {tensor}; list one that is overwritten under changes"
                    )
                existing.add(tensor)
                self.made_by[tensor] = rank
            for tensor in node.changes:
                changed[tensor].append(rank)
            for tensor in {*node.reads, *node.creates, *node.changes}:
                accesses[tensor].append(rank)
        if len(existing) < len(records):
            raise PlanError(
                f"expected {len(records)} tensors that are static or created by a node, but only "
                f"{len(existing)} are; drop the others from the profile or correct their class"
            )
        return accesses, changed

    def _tensor(self, tensor: int, accesses: list[int], changed_at: list[int]) -> TensorFacts:
        record, last_rank = self.profile.tensors[tensor], len(self.nodes) - 1
        if record.byte_class.is_static:
            lifetime = (0, last_rank)
        else:
            is_result = record.byte_class is ByteClass.RESULT
            lifetime = (accesses[0], last_rank if is_result else accesses[-1])
        return TensorFacts(
            tensor,
            record.byte_class,
            record.size_bytes,
            tuple(accesses),
            tuple(changed_at),
            lifetime,
        )


facts_of = remembered(Facts)


def num_forward(profile: Profile) -> int:
    """The number of nodes of the forward pass; they are the first ones, or it is `PlanError`."""
    count = sum(node.phase is Phase.FORWARD for node in profile.nodes)
    for node in profile.nodes[count:]:
        if node.phase is Phase.FORWARD:
            raise PlanError(
                f"forward nodes must come before all others, but {node.name!r} is behind a "
                "backward or update node; order the profile's nodes by phase"
            )
    return count


_SWAPPABLE_STATIC = frozenset(
    {ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE, ByteClass.BUFFER, ByteClass.CONSTANT}
)


class Choice(IntEnum):
    """A decision about a tensor in a gap."""

    KEEP = 0
    SWAP = 1
    RECOMPUTE = 2
    """Dropped and made again just before its next use, nothing else kept of what that takes."""
    RECOMPUTE_EARLY = 3
    """Dropped, made again as soon as another recomputation reads it, and kept from then on."""


RECOMPUTED = (Choice.RECOMPUTE, Choice.RECOMPUTE_EARLY)


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

    @property
    def key(self) -> Key:
        return self.sub_array, self.tensor


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
        can_recompute = _recomputable(facts)
        for tensor, (last, first) in facts.feature_maps.items():
            size = facts.tensors[tensor].memory_size
            if size and first > last + 1:
                again = tensor in can_recompute
                gaps.append(Gap(sub_array, tensor, size, last, first, False, True, again))
    if with_static:
        for sub_array, facts in enumerate(all_facts):
            for record in facts.tensors:
                gaps += _static_gaps(sub_array, record, facts)
    return tuple(gaps)


@remembered
def _recomputable(facts: Facts) -> frozenset[int]:
    """The feature maps that can be made again while all others are there."""
    prices = RecomputePrices(facts, {})
    return frozenset(tensor for tensor in facts.feature_maps if prices.seconds(tensor) is not None)


def _static_gaps(sub_array: int, record: TensorFacts, facts: Facts) -> list[Gap]:
    if record.byte_class not in _SWAPPABLE_STATIC or not record.accesses or not record.memory_size:
        return []
    is_changed_last = bool(record.changed_at) and record.changed_at[-1] == record.accesses[-1]
    if facts.feature_maps and not is_changed_last:
        return []  # a recomputation may read it any time before the step's last node
    last, first = record.accesses[-1], record.accesses[0]
    if (first - last) % len(facts.nodes) == 1:
        return []
    size, copies_out = record.memory_size, bool(record.changed_at)
    return [Gap(sub_array, record.tensor, size, last, first, True, copies_out, False)]


class RecomputePrices:
    """The price of recomputing one feature map more, with those that are ``recomputed`` already.

    Prices stay known while tensors are added that they have nothing to do with.
    """

    def __init__(self, facts: Facts, recomputed: Mapping[int, Choice]) -> None:
        self._facts = facts
        self._recomputed = dict(recomputed)
        self._made_before = {tensor: facts.feature_maps[tensor][1] for tensor in recomputed}
        self._known: dict[int, tuple[float, set[int]] | None] = {}

    def seconds(self, tensor: int) -> float | None:
        """For one; ``None`` where it cannot be made again."""
        if tensor not in self._known:
            self._known[tensor] = self._price(tensor)
        known = self._known[tensor]
        return known[0] if known is not None else None

    def add(self, tensor: int, choice: Choice) -> None:
        """Recompute one more; those that read it cost more from now on."""
        self._recomputed[tensor] = choice
        self._made_before[tensor] = self._facts.feature_maps[tensor][1]
        for other, known in list(self._known.items()):
            if known is not None and tensor in known[1]:
                del self._known[other]

    def _price(self, tensor: int) -> tuple[float, set[int]] | None:
        # Making others early adds to what is made before.
        deriving = _Deriving(self._facts, self._recomputed, dict(self._made_before))
        found = deriving.ranks_for(tensor, self._facts.feature_maps[tensor][1])
        if found is None:
            return None
        return sum(self._facts.nodes[rank].seconds for rank in sorted(found[0])), found[1]


def added_prices(
    all_facts: Sequence[Facts], gaps: Iterable[Gap], choices: Iterable[Choice]
) -> list[RecomputePrices]:
    """Per sub-array, the price of recomputing one more than ``choices`` of all gaps recompute."""
    prices = [RecomputePrices(facts, {}) for facts in all_facts]
    for gap, choice in zip(gaps, choices, strict=True):
        if choice in RECOMPUTED:
            prices[gap.sub_array].add(gap.tensor, choice)
    return prices


def recompute_bytes(facts: Facts, tensor: int, nodes: Iterable[int]) -> int:
    """The most bytes needed at once while ``nodes`` run again to make ``tensor``, its own included.

    Outputs are dropped when no later one of the nodes reads them; sources are not counted.
    """
    ranks = sorted(nodes)
    records = facts.nodes
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
        live += facts.created_bytes[rank]
        peak = max(peak, live + records[rank].workspace_bytes)
        live -= dropped_after[rank]
    return peak


def derive(facts: Facts, recomputed: Mapping[int, Choice]) -> Derivation | None:
    """All recomputations of a sub-array's feature maps; ``None`` where one cannot be made again.

    Every other tensor counts as on the device as long as it is needed: one that is swapped is brought back
    for whoever reads it first.
    """
    deriving = _Deriving(facts, recomputed, {})
    first_bw_access = {tensor: facts.feature_maps[tensor][1] for tensor in recomputed}
    # In the order they run: sources that are made early have been made when others need them.
    for tensor in sorted(recomputed, key=lambda t: (first_bw_access[t], facts.made_by[t])):
        if tensor not in deriving.made_before and not deriving.make(tensor, first_bw_access[tensor]):
            return None
    first_reads: dict[int, int] = {}
    for each in deriving.recomputes:
        for read in each.reads:
            first_reads[read] = min(each.before, first_reads.get(read, each.before))
    return Derivation(tuple(deriving.recomputes), first_reads)


class _Deriving:
    """Recomputations one after another; ``made_before`` has the rank before which each tensor is made."""

    def __init__(self, facts: Facts, recomputed: Mapping[int, Choice], made_before: dict[int, int]) -> None:
        self._facts = facts
        self._recomputed = recomputed
        self.made_before = made_before
        self.recomputes: list[Derived] = []

    def ranks_for(self, tensor: int, anchor: int) -> tuple[set[int], set[int]] | None:
        """The ranks that make ``tensor`` just before rank ``anchor``, and what they read from outside."""
        nodes, made_by = self._facts.nodes, self._facts.made_by
        ranks: set[int] = set()
        reads: set[int] = set()
        waiting = [tensor]
        while waiting:
            made = waiting.pop()
            rank = made_by[made]
            if rank < 0 or self._is_changed(made, rank, anchor):
                return None
            if rank in ranks:
                continue
            node = nodes[rank]
            if not node.is_repeatable or node.changes:
                return None
            ranks.add(rank)
            for read in node.reads:
                if self._is_there(read, anchor):
                    if self._is_changed(read, rank, anchor):
                        return None
                    reads.add(read)
                else:
                    waiting.append(read)
        # What one of the ranks makes need not be read from outside as well.
        for rank in ranks:
            reads.difference_update(nodes[rank].creates)
        return ranks, reads

    def make(self, tensor: int, anchor: int) -> bool:
        """Note how ``tensor`` is made just before rank ``anchor``; ``False`` where it cannot be."""
        found = self.ranks_for(tensor, anchor)
        if found is None:
            return False
        facts = self._facts
        ranks = tuple(sorted(found[0]))
        self.recomputes.append(
            Derived(
                tensor,
                ranks,
                anchor,
                sum(facts.nodes[rank].seconds for rank in ranks),
                recompute_bytes(facts, tensor, ranks) - facts.tensors[tensor].memory_size,
                tuple(sorted(found[1])),
            )
        )
        self.made_before[tensor] = anchor
        return True

    def _is_there(self, tensor: int, anchor: int) -> bool:
        """Whether it is on the device just before ``anchor``, or can be brought or made there by then."""
        if anchor > self._facts.tensors[tensor].lifetime[1]:
            return False
        choice = self._recomputed.get(tensor)
        if choice is None or self.made_before.get(tensor, anchor + 1) <= anchor:
            return True
        return choice is Choice.RECOMPUTE_EARLY and self.make(tensor, anchor)

    def _is_changed(self, tensor: int, after: int, before: int) -> bool:
        return any(after < rank < before for rank in self._facts.tensors[tensor].changed_at)
