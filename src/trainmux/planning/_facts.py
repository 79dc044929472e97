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

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from itertools import accumulate
from typing import ParamSpec, TypeVar

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Phase, Profile

Key = tuple[int, int]
"""A tensor: its sub-array and its position in the sub-array's profile."""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_MAX_REMEMBERED = 64


def remembered(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """A pure function of objects by position, called once for those that are still remembered."""
    known: OrderedDict[tuple[int, ...], tuple[object, _Result]] = OrderedDict()

    @wraps(function)
    def asked(*given: _Given.args, **none: _Given.kwargs) -> _Result:
        key = tuple(map(id, given))
        if key not in known:
            known[key] = (given, function(*given, **none))
            if len(known) > _MAX_REMEMBERED:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key][1]

    return asked


@dataclass(frozen=True)
class TensorFacts:
    """A storage and the ranks that touch it, rising.

    ``last_fw_access`` and ``first_bw_access`` are ``None`` where there is no such access. ``lifetime`` is
    from the first to the last rank at which the bytes must be there, both included: all ranks for static
    tensors, and to the last rank for results.
    """

    tensor: int
    byte_class: ByteClass
    memory_size: int
    accesses: tuple[int, ...]
    changed_at: tuple[int, ...]
    last_fw_access: int | None
    first_bw_access: int | None
    lifetime: tuple[int, int]


class Facts:
    """A profile with the facts that follow from its order.

    ``num_forward`` ranks are the forward pass, the rest backward pass and update. ``start_seconds`` has one
    entry more than there are nodes: when each begins with nothing else running, and when the last one ends.
    ``created_bytes`` are those that each rank creates, ``made_by`` has the rank that creates each tensor, -1
    for what is there before the step. ``feature_maps`` are the tensors that can be swapped or recomputed:
    of that class, created in the forward pass and needed in the backward pass.

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
        self.feature_maps = tuple(
            facts.tensor
            for facts in self.tensors
            if facts.byte_class is ByteClass.FEATURE_MAP
            and facts.last_fw_access is not None
            and facts.first_bw_access is not None
        )

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
        forward = [rank for rank in accesses if rank < self.num_forward]
        backward = [rank for rank in accesses if rank >= self.num_forward]
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
            forward[-1] if forward else None,
            backward[0] if backward else None,
            lifetime,
        )


facts_of = remembered(Facts)


def num_forward(profile: Profile) -> int:
    """How many nodes the forward pass has; they are the first ones, or it is `PlanError`."""
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
_MAX_KNOWN = 2000
"""Derivations that are remembered at a time."""
_NUM_LAST = 3
_MAX_MORE = 64
"""Tensors more than the last time for which a derivation is extended and not made anew."""


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
        for tensor in facts.feature_maps:
            record = facts.tensors[tensor]
            last, first = record.last_fw_access, record.first_bw_access
            assert last is not None
            assert first is not None
            if record.memory_size and first > last + 1:
                again = tensor in can_recompute
                gaps.append(Gap(sub_array, tensor, record.memory_size, last, first, False, True, again))
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


class Derivations:
    """Derivations that were asked for before, of sub-arrays that share facts together.

    One that has a few tensors more than one of the last is derived from that: only those recomputations that
    read one of them change.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, frozenset[tuple[int, Choice]]], Derivation | None] = {}
        self._last: dict[int, deque[tuple[dict[int, Choice], Derivation]]] = {}

    def of(self, facts: Facts, recomputed: Mapping[int, Choice]) -> Derivation | None:
        """The recomputations of a sub-array's feature maps; ``None`` where one cannot be made again.

        Every other tensor counts as on the device as long as it is needed: one that is swapped is brought
        back for whoever reads it first.
        """
        key = (id(facts), frozenset(recomputed.items()))
        if key not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            step = _step_of(facts)
            self._known[key] = self._from_last(step, recomputed) or _Deriving(step, recomputed).run()
        derivation = self._known[key]
        if derivation is not None:
            last = self._last.setdefault(id(facts), deque(maxlen=_NUM_LAST))
            last.appendleft((dict(recomputed), derivation))
        return derivation

    def _from_last(self, step: _Step, recomputed: Mapping[int, Choice]) -> Derivation | None:
        if Choice.RECOMPUTE_EARLY in recomputed.values():
            return None
        for before, derivation in self._last.get(id(step.facts), ()):
            if 0 <= len(recomputed) - len(before) <= _MAX_MORE and before.items() <= recomputed.items():
                return _Deriving(step, recomputed).run(derivation, recomputed.keys() - before.keys())
        return None


class RecomputePrices:
    """The price of recomputing one feature map more, beside those that are ``recomputed`` already.

    Prices stay known while tensors are added that they have nothing to do with. Those that have are worked
    out anew only when they are asked for: they rise, so the old one is `at_least` the price until then.
    """

    def __init__(self, facts: Facts, recomputed: Mapping[int, Choice]) -> None:
        self._step = _step_of(facts)
        self._recomputed = dict(recomputed)
        self._made_before = {tensor: self._step.first_bw[tensor] for tensor in recomputed}
        self._known: dict[int, tuple[float, set[int]] | None] = {}
        self._before: dict[int, float] = {}

    def seconds(self, tensor: int) -> float | None:
        """For one; ``None`` where it cannot be made again."""
        if tensor not in self._known:
            self._known[tensor] = self._price(tensor)
        known = self._known[tensor]
        return known[0] if known is not None else None

    def at_least(self, tensor: int) -> float | None:
        """A price that `seconds` is not below; ``None`` where it cannot be made again."""
        if tensor not in self._known and tensor in self._before:
            return self._before[tensor]
        return self.seconds(tensor)

    def is_known(self, tensor: int) -> bool:
        """Whether `at_least` is the price itself."""
        return tensor in self._known

    def add(self, tensor: int, choice: Choice) -> None:
        """Recompute one more; those that read it cost more from now on."""
        self._recomputed[tensor] = choice
        self._made_before[tensor] = self._step.first_bw[tensor]
        for other, known in list(self._known.items()):
            if known is not None and tensor in known[1]:
                self._before[other] = known[0]
                del self._known[other]

    def _price(self, tensor: int) -> tuple[float, set[int]] | None:
        deriving = _Deriving(self._step, self._recomputed)
        deriving.made_before = self._made_before
        if Choice.RECOMPUTE_EARLY in self._recomputed.values():
            deriving.made_before = dict(self._made_before)  # which making early adds to
        found = deriving.ranks_for(tensor, self._step.first_bw[tensor])
        if found is None:
            return None
        return sum(self._step.seconds[rank] for rank in sorted(found[0])), found[1]


def prices_beside(
    all_facts: Sequence[Facts], gaps: Iterable[Gap], choices: Iterable[Choice]
) -> list[RecomputePrices]:
    """Per sub-array, what recomputing one more costs beside what ``choices`` of all gaps recompute."""
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


class _Step:
    """Facts of a sub-array that deriving asks for, in flat lists by tensor and by rank."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.created_at = facts.made_by
        self.is_static = [record.byte_class.is_static for record in facts.tensors]
        self.last_needed = [record.lifetime[1] for record in facts.tensors]
        self.changed_at = [record.changed_at for record in facts.tensors]
        nodes = facts.nodes
        self.first_change = [changed[0] if changed else len(nodes) for changed in self.changed_at]
        self.first_bw = [record.first_bw_access or 0 for record in facts.tensors]  # feature maps have one
        self.reads = [node.reads for node in nodes]
        self.creates = [node.creates for node in nodes]
        self.may_repeat = [node.is_repeatable and not node.changes for node in nodes]
        self.seconds = [node.seconds for node in nodes]


_step_of = remembered(_Step)


class _Deriving:
    def __init__(self, step: _Step, recomputed: Mapping[int, Choice]) -> None:
        self.step = step
        self.recomputed = recomputed
        self.made_before: dict[int, int] = {}
        self.recomputes: list[Derived] = []

    def run(
        self, before: Derivation | None = None, more: AbstractSet[int] = frozenset()
    ) -> Derivation | None:
        """All of them, as they run: sources that are made early have been made when others need them.

        ``before`` is right but for the tensors ``more`` and those that read them.
        """
        known = {each.tensor: each for each in before.recomputes} if before is not None else {}
        first_uses, created_at = self.step.first_bw, self.step.created_at
        for tensor in sorted(self.recomputed, key=lambda t: (first_uses[t], created_at[t])):
            each = known.get(tensor)
            if each is not None and more.isdisjoint(each.reads):
                self.recomputes.append(each)
                self.made_before[tensor] = each.before
            elif tensor not in self.made_before and not self._make(tensor, first_uses[tensor]):
                return None
        first_reads: dict[int, int] = {}
        for each in self.recomputes:
            for read in each.reads:
                if each.before < first_reads.get(read, each.before + 1):
                    first_reads[read] = each.before
        return Derivation(tuple(self.recomputes), first_reads)

    def ranks_for(self, tensor: int, anchor: int) -> tuple[set[int], set[int]] | None:
        """The ranks that make ``tensor`` just before rank ``anchor``, and what they read from outside."""
        step, first_change = self.step, self.step.first_change
        ranks: set[int] = set()
        reads: set[int] = set()
        waiting = [tensor]
        while waiting:
            made = waiting.pop()
            rank = step.created_at[made]
            if rank < 0 or (first_change[made] < anchor and self._is_changed(made, rank, anchor)):
                return None
            if rank in ranks:
                continue
            if not step.may_repeat[rank]:
                return None
            ranks.add(rank)
            for read in step.reads[rank]:
                if step.is_static[read] or self._is_there(read, anchor):
                    if first_change[read] < anchor and self._is_changed(read, rank, anchor):
                        return None
                    reads.add(read)
                else:
                    waiting.append(read)
        # What one of the ranks makes need not be read from outside as well.
        for rank in ranks:
            reads.difference_update(step.creates[rank])
        return ranks, reads

    def _make(self, tensor: int, anchor: int) -> bool:
        """Note how ``tensor`` is made just before rank ``anchor``; ``False`` where it cannot be."""
        found = self.ranks_for(tensor, anchor)
        if found is None:
            return False
        facts = self.step.facts
        ranks = tuple(sorted(found[0]))
        self.recomputes.append(
            Derived(
                tensor,
                ranks,
                anchor,
                sum(self.step.seconds[rank] for rank in ranks),
                recompute_bytes(facts, tensor, ranks) - facts.tensors[tensor].memory_size,
                tuple(sorted(found[1])),
            )
        )
        self.made_before[tensor] = anchor
        return True

    def _is_there(self, tensor: int, anchor: int) -> bool:
        """Whether it is on the device just before ``anchor``, or can be brought or made there by then."""
        if anchor > self.step.last_needed[tensor]:
            return False
        choice = self.recomputed.get(tensor)
        if choice is None or self.made_before.get(tensor, anchor + 1) <= anchor:
            return True
        return choice is Choice.RECOMPUTE_EARLY and self._make(tensor, anchor)

    def _is_changed(self, tensor: int, after: int, before: int) -> bool:
        return any(after < rank < before for rank in self.step.changed_at[tensor])
