"""What the positions in a plan stand for, once its profiles are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import Plan, Profile, ProfiledNode, ProfiledTensor


@dataclass(frozen=True)
class PlanLookup:
    """Nodes and tensors by (sub-array, position); ``profiles`` are in the plan's order.

    Refused with `PlanError`: positions that the plan, a sub-array or its profile does not have.
    """

    plan: Plan
    profiles: tuple[Profile, ...]

    @classmethod
    def of(cls, plan: Plan, profiles: Sequence[Profile]) -> PlanLookup:
        """Finds the plan's profiles among ``profiles`` by their fingerprints: any order, one per fingerprint
        or one per sub-array. Refused with `PlanError`: a profile too few, or one of another plan."""
        given = {profile.fingerprint: profile for profile in profiles}
        if set(given) != set(plan.profiles):
            raise PlanError(
                f"the plan was made from profiles {sorted(set(plan.profiles))}, but got {sorted(given)}; "
                "pass the profiles it was made from"
            )
        for position, sub_array in enumerate(plan.partition):
            if not 0 <= sub_array.profile < len(plan.profiles):
                raise PlanError(
                    f"sub-array {position} must name one of {len(plan.profiles)} profiles, but names "
                    f"{sub_array.profile}; make the plan again"
                )
        return cls(plan, tuple(given[fingerprint] for fingerprint in plan.profiles))

    def profile(self, sub_array: int) -> Profile:
        if not 0 <= sub_array < len(self.plan.partition):
            raise PlanError(
                f"expected one of {len(self.plan.partition)} sub-arrays, but got {sub_array}; "
                "pass the program that belongs to the plan"
            )
        return self.profiles[self.plan.partition[sub_array].profile]

    def node(self, sub_array: int, rank: int) -> ProfiledNode:
        nodes = self.profile(sub_array).nodes
        if not 0 <= rank < len(nodes):
            raise PlanError(
                f"sub-array {sub_array} has {len(nodes)} nodes, but got rank {rank}; "
                "pass the program and the profiles that belong to the plan"
            )
        return nodes[rank]

    def tensor(self, sub_array: int, position: int) -> ProfiledTensor:
        tensors = self.profile(sub_array).tensors
        if not 0 <= position < len(tensors):
            raise PlanError(
                f"sub-array {sub_array} has {len(tensors)} tensors, but got position {position}; "
                "pass the program and the profiles that belong to the plan"
            )
        return tensors[position]
