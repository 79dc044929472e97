"""The policies by name, and what each is meant for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainmux.errors import ConfigError
from trainmux.ir import Multiplexing
from trainmux.planning._policy import Policy
from trainmux.planning.partition import Partition
from trainmux.planning.policies.auto import Auto
from trainmux.planning.policies.capuchin import Capuchin
from trainmux.planning.policies.mutwo import MuTwo
from trainmux.planning.policies.none import NoOptimization
from trainmux.planning.policies.recompute_only import RecomputeOnly
from trainmux.planning.policies.swap_only import SwapOnly

_TURNS = (Multiplexing.TURNS,)
_RING = (Multiplexing.RING,)


@dataclass(frozen=True)
class KnownPolicy:
    """A policy with the partitions it is for.

    ``multiplexings`` says in which ways the sub-arrays of a partition are to share the device, none where
    the partition is not for it. ``has_decisions`` is false for a policy that only takes what fits as it is,
    ``is_hurried`` true for one whose copies may begin earlier than it says; others stay as they were
    published.
    """

    policy: Policy
    multiplexings: Callable[[Partition], tuple[Multiplexing, ...]]
    has_decisions: bool = True
    is_hurried: bool = False


def _turns(partition: Partition) -> tuple[Multiplexing, ...]:
    return _TURNS


def _complete_fusion(partition: Partition) -> tuple[Multiplexing, ...]:
    return _TURNS if partition.is_complete_fusion else ()


def _pairs(partition: Partition) -> tuple[Multiplexing, ...]:
    """Pairs run as a ring; a fleet of one member has no partner and runs by itself."""
    if not partition.is_in_pairs:
        return ()
    return _TURNS if partition.num_sub_arrays == 1 else _RING


def _all(partition: Partition) -> tuple[Multiplexing, ...]:
    """Turns always; a ring where neighbours take about the same time: one hides the other's copies."""
    if partition.num_sub_arrays == 1:
        return _TURNS
    is_even = all(max(widths) - min(widths) <= 1 for widths in partition.widths)
    return (*_TURNS, *_RING) if is_even or partition.is_in_pairs else _TURNS


def policy_named(name: str, *, seed: int = 0, evaluations: int | None = None) -> KnownPolicy:
    """The policy of that name; an unknown one is refused with `ConfigError`.

    ``seed`` and ``evaluations`` are for those that search.
    """
    known = {
        "none": KnownPolicy(NoOptimization(), _turns, has_decisions=False),
        "swap_only": KnownPolicy(SwapOnly(), _turns),
        "recompute_only": KnownPolicy(RecomputeOnly(), _turns),
        "capuchin": KnownPolicy(Capuchin(), _complete_fusion),
        "mutwo": KnownPolicy(MuTwo(), _pairs, is_hurried=True),
        "auto": KnownPolicy(Auto(seed=seed, evaluations=evaluations), _all, is_hurried=True),
    }
    if name not in known:
        names = ", ".join(repr(each) for each in known)
        raise ConfigError(f"policy must be one of {names}, but got {name!r}; 'auto' is the best of all")
    return known[name]


POLICY_NAMES = ("auto", "mutwo", "capuchin", "swap_only", "recompute_only", "none")
"""Every policy, the default first."""
