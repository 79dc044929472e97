"""The policies by name, and what each is meant for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainmux.errors import ConfigError
from trainmux.ir import Multiplexing, Recomputation, Schedule, Swap
from trainmux.planning._body import Node, Policy, Task, part_of
from trainmux.planning.partition import (
    ALL_RULES,
    MAX_PARTITIONS,
    Partition,
    PartitionSearch,
    PlannedGroup,
    Rule,
    ends,
    find_partitions,
    paper_partitions,
)
from trainmux.planning.policies import capuchin, mutwo, none, recompute_only, swap_only
from trainmux.planning.policies.auto import Auto

_TURNS = (Multiplexing.TURNS,)
_RING = (Multiplexing.RING,)


_Baseline = Callable[[Task], Schedule]
"""A policy as it was published: one schedule for a task, or `Infeasible`."""


@dataclass(frozen=True)
class _OneSchedule:
    """A policy that knows one schedule. Sub-arrays that run in turns are scheduled one by one, if asked."""

    name: str
    baseline: _Baseline
    one_by_one: bool = True

    def schedules(self, task: Task) -> Iterator[Schedule]:
        in_turns = task.multiplexing is Multiplexing.TURNS and len(task.profiles) > 1
        yield _in_turns(self.baseline, task) if self.one_by_one and in_turns else self.baseline(task)


def _in_turns(baseline: _Baseline, task: Task) -> Schedule:
    """Each sub-array by itself, within what the static tensors of the others leave."""
    singles: dict[int, Schedule] = {}
    order: list[Node] = []
    swaps: list[Swap] = []
    recomputes: list[Recomputation] = []
    for sub_array, profile in enumerate(task.profiles):
        if id(profile) not in singles:
            singles[id(profile)] = baseline(part_of(task, [sub_array]))
        single = singles[id(profile)]
        order += [(sub_array, rank) for _, rank in single.order]
        swaps += [
            replace(
                swap,
                sub_array=sub_array,
                offload_after=(sub_array, swap.offload_after[1]),
                release_before=(sub_array, swap.release_before[1]),
                prefetch_prompt=(sub_array, swap.prefetch_prompt[1]),
            )
            for swap in single.swaps
        ]
        recomputes += [
            replace(each, sub_array=sub_array, before=(sub_array, each.before[1]))
            for each in single.recomputes
        ]
    return Schedule(Multiplexing.TURNS, tuple(order), tuple(swaps), tuple(recomputes))


@dataclass(frozen=True)
class KnownPolicy:
    """A policy with the rules that make its partitions.

    ``multiplexings`` says in which ways the sub-arrays of a partition are to share the device, none where
    the partition is not for it.
    """

    policy: Policy
    multiplexings: Callable[[Partition], tuple[Multiplexing, ...]]
    rules: tuple[Rule, ...] = ALL_RULES


def _pairs(partition: Partition) -> tuple[Multiplexing, ...]:
    """Pairs run as a ring; a fleet of one member has no partner and runs by itself."""
    return _TURNS if partition.num_sub_arrays == 1 else _RING


def _all(partition: Partition) -> tuple[Multiplexing, ...]:
    """Turns always; a ring where neighbours take about the same time: one hides the other's copies."""
    if partition.num_sub_arrays == 1:
        return _TURNS
    is_even = all(max(widths) - min(widths) <= 1 for widths in partition.widths)
    return (*_TURNS, *_RING) if is_even or partition.is_in_pairs else _TURNS


def policy_named(name: str, *, seed: int = 0, evaluations: int | None = None) -> KnownPolicy:
    """The policy of that name; an unknown one is refused with `ConfigError`.

    ``seed`` and ``evaluations`` are for ``auto``, which searches.
    """
    if name == "auto":
        return KnownPolicy(Auto(seed=seed, evaluations=evaluations), _all)
    if name not in _BASELINES:
        names = ", ".join(repr(each) for each in POLICY_NAMES)
        raise ConfigError(f"policy must be one of {names}, but got {name!r}; 'auto' is the best of all")
    return _BASELINES[name]


_BASELINES = {
    "mutwo": KnownPolicy(_OneSchedule("mutwo", mutwo.schedule), _pairs, (paper_partitions,)),
    # The partitions of pairs without multiplexing, for ablations.
    "mutwo_turns": KnownPolicy(
        _OneSchedule("mutwo_turns", partial(mutwo.schedule, policy="mutwo_turns")),
        lambda partition: _TURNS,
        (paper_partitions,),
    ),
    "capuchin": KnownPolicy(
        _OneSchedule("capuchin", capuchin.schedule),
        lambda partition: _TURNS if partition.is_complete_fusion else (),
        (ends,),
    ),
    "swap_only": KnownPolicy(_OneSchedule("swap_only", swap_only.schedule), lambda partition: _TURNS),
    "recompute_only": KnownPolicy(
        _OneSchedule("recompute_only", recompute_only.schedule), lambda partition: _TURNS
    ),
    "none": KnownPolicy(_OneSchedule("none", none.schedule, one_by_one=False), lambda partition: _TURNS),
}
POLICY_NAMES = ("auto", *_BASELINES)
"""Every policy, the default first."""


def partitions_to_try(
    policy: str, groups: Sequence[PlannedGroup], max_partitions: int = MAX_PARTITIONS
) -> PartitionSearch:
    """The partitions of groups that a policy is tried with.

    Where no group fuses well, members are not fused, unless the policy was published with fused ones.
    """
    known, sizes = policy_named(policy), [len(group.members) for group in groups]
    search = find_partitions(sizes, rules=known.rules, max_partitions=max_partitions)
    fuses = policy not in ("auto", "none") or any(group.fuses_well for group in groups)
    return replace(search, fuses=fuses)
