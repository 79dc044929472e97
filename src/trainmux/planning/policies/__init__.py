"""Policies, one file each: what is swapped, what is recomputed, and in which order nodes run."""

from trainmux.planning.policies._known import POLICY_NAMES, KnownPolicy, policy_named
from trainmux.planning.policies.auto import Auto
from trainmux.planning.policies.capuchin import Capuchin
from trainmux.planning.policies.mutwo import MuTwo
from trainmux.planning.policies.none import NoOptimization
from trainmux.planning.policies.recompute_only import RecomputeOnly
from trainmux.planning.policies.swap_only import SwapOnly

__all__ = [
    "POLICY_NAMES",
    "Auto",
    "Capuchin",
    "KnownPolicy",
    "MuTwo",
    "NoOptimization",
    "RecomputeOnly",
    "SwapOnly",
    "policy_named",
]
