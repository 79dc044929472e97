"""Partitions of members into sub-arrays (µ-TWO §3.2 (1)), bounded and in a fixed order.

The paper lists four partitions of eight members and leaves the rule to the reader. Here it is: for each width
w from half of the members down to 1, fill with pairs of width w, then split what is left into one more pair.
Where the last pair would have a single member, one sub-array of the pair before takes it, so that w + 1 is
paired with w. Beyond the paper there are as many sub-arrays of equal width as one likes (for rings and for
turns; one of them is complete fusion, the most are width 1), and HFTA's way: as wide as fits, the rest apart.

Members come in groups, one per architecture; a sub-array never holds members of two groups. Every distinct
width has to be profiled, so the number of partitions is bounded: complete fusion and width 1 always, then
equal widths, halvings before thirds before fifths, then the paper's uneven ones, then HFTA's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from trainmux.errors import ConfigError

MAX_PARTITIONS = 16
NUM_ALWAYS = 2
"""Partitions tried in any case, the first ones: complete fusion and width 1, if the rules make them."""

Rule = Callable[[int], Sequence[tuple[int, ...]]]
"""The partitions of so many members, as widths of sub-arrays."""


@dataclass(frozen=True)
class PlannedGroup:
    """Members that can be fused with each other: one architecture, loss and batch shape."""

    name: str
    members: tuple[str, ...]
    fuses_well: bool = True
    """Whether fused members may be quicker than the same side by side."""


@dataclass(frozen=True)
class Partition:
    """The widths of each group's sub-arrays, widest first."""

    widths: tuple[tuple[int, ...], ...]

    @property
    def num_sub_arrays(self) -> int:
        return sum(len(widths) for widths in self.widths)

    @property
    def is_complete_fusion(self) -> bool:
        """Whether each group is one sub-array."""
        return all(len(widths) == 1 for widths in self.widths)

    @property
    def is_in_pairs(self) -> bool:
        """Whether the paper's rule makes the widths of every group (a group of one member stays alone)."""
        return all(widths in paper_partitions(sum(widths)) for widths in self.widths)

    def members(self, groups: Sequence[PlannedGroup]) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """For each sub-array, group by group, the number of its group and the names of its members."""
        sub_arrays = []
        for number, (group, widths) in enumerate(zip(groups, self.widths, strict=True)):
            begin = 0
            for width in widths:
                sub_arrays.append((number, group.members[begin : begin + width]))
                begin += width
        return tuple(sub_arrays)


@dataclass(frozen=True)
class PartitionSearch:
    """The partitions to try, in order, and how many more the rules would make."""

    partitions: tuple[Partition, ...]
    num_left_out: int
    fuses: bool = True
    """Whether members of a sub-array are fused, or else only run side by side: then width 1 is all there is
    to profile."""

    def profiled_widths(self, partition: Partition) -> list[tuple[int, int]]:
        """Each group's number and a width of it that must be profiled for a partition."""
        every = [(number, width) for number, widths in enumerate(partition.widths) for width in widths]
        return list(dict.fromkeys(key if self.fuses else (key[0], 1) for key in every))


def paper_partitions(num_members: int) -> tuple[tuple[int, ...], ...]:
    """The paper's partitions into pairs of sub-arrays, widest first; a single member stays alone.

    For eight: (4, 4), (3, 3, 1, 1), (2, 2, 2, 2) and eight times 1.
    """
    if num_members == 1:
        return ((1,),)
    found = []
    for width in range(num_members // 2, 0, -1):
        num_pairs, rest = divmod(num_members, 2 * width)
        widths = [width] * (2 * num_pairs)
        if rest == 1:
            widths[0] += 1
        elif rest:
            widths += [rest - rest // 2, rest // 2]
        found.append(tuple(widths))
    return tuple(found)


def equal_partitions(num_members: int) -> tuple[tuple[int, ...], ...]:
    """One to ``num_members`` sub-arrays whose widths differ by one at most."""
    found = []
    for num_sub_arrays in range(1, num_members + 1):
        width, num_wider = divmod(num_members, num_sub_arrays)
        found.append((width + 1,) * num_wider + (width,) * (num_sub_arrays - num_wider))
    return tuple(found)


def filled_partitions(num_members: int) -> tuple[tuple[int, ...], ...]:
    """As many sub-arrays of one width as there are members for, and one of the rest, for each width."""
    found = []
    for width in range(num_members, 0, -1):
        num_full, rest = divmod(num_members, width)
        found.append((width,) * num_full + ((rest,) if rest else ()))
    return tuple(found)


def ends(num_members: int) -> tuple[tuple[int, ...], ...]:
    """Complete fusion, and width 1."""
    return ((num_members,), (1,) * num_members)


ALL_RULES: tuple[Rule, ...] = (equal_partitions, paper_partitions, filled_partitions)


def find_partitions(
    group_sizes: Sequence[int], *, rules: Sequence[Rule] = ALL_RULES, max_partitions: int = MAX_PARTITIONS
) -> PartitionSearch:
    """The partitions that ``rules`` make of groups of the given sizes, at most so many, in a fixed order.

    With several groups those come first in which every group has about the same number of sub-arrays, then
    the other combinations, beginning with the best of each group. Refused with `ConfigError`: a bound
    below 2.
    """
    if max_partitions < NUM_ALWAYS:
        raise ConfigError(
            f"max_partitions must be at least {NUM_ALWAYS}, but got {max_partitions}; complete fusion and "
            "width 1 are always tried"
        )
    choices = [_choices(size, rules) for size in group_sizes]
    num_possible = prod(len(widths) for widths in choices)
    found: dict[Partition, None] = {}
    for partition in _in_order(choices):
        found.setdefault(partition)
        if len(found) == max_partitions:
            break
    return PartitionSearch(tuple(found), num_possible - len(found))


def _choices(num_members: int, rules: Sequence[Rule]) -> list[tuple[int, ...]]:
    """Every partition of one group: complete fusion and width 1, then rule by rule, the cheapest first."""
    rank_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rule_number, rule in enumerate(rules):
        for widths in rule(num_members):
            is_end = len(widths) in (1, num_members)
            rank_of.setdefault(widths, (not is_end, rule_number, *_cost(widths)))
    return sorted(rank_of, key=rank_of.__getitem__)


def _cost(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Few distinct widths before many, halvings before thirds before fifths, few sub-arrays before many."""
    odd_part = num_sub_arrays = len(widths)
    while odd_part % 2 == 0:
        odd_part //= 2
    return (len(set(widths)), odd_part, num_sub_arrays, *widths)


def _in_order(choices: Sequence[list[tuple[int, ...]]]) -> Iterator[Partition]:
    """Each combination of the groups' choices, some of them twice, the most promising first."""
    longest = max(choices, key=len)
    for wanted in longest:
        yield Partition(
            tuple(
                wanted
                if wanted in widths
                else min(widths, key=lambda candidate: abs(len(candidate) - len(wanted)))
                for widths in choices
            )
        )
    first = (0,) * len(choices)
    waiting = [(0, first)]
    seen = {first}
    while waiting:
        total, positions = heapq.heappop(waiting)
        yield Partition(tuple(widths[at] for widths, at in zip(choices, positions, strict=True)))
        for group, at in enumerate(positions):
            following = (*positions[:group], at + 1, *positions[group + 1 :])
            if at + 1 < len(choices[group]) and following not in seen:
                seen.add(following)
                heapq.heappush(waiting, (total + 1, following))
