"""Policies, one file each: what is swapped, what is recomputed, and in which order nodes run."""

from trainmux.scheduling.policies._known import POLICY_NAMES, KnownPolicy, policy_named
from trainmux.scheduling.policies.auto import Auto
from trainmux.scheduling.policies.capuchin import Capuchin
from trainmux.scheduling.policies.mutwo import MuTwo
from trainmux.scheduling.policies.none import NoOptimization
from trainmux.scheduling.policies.recompute_only import RecomputeOnly
from trainmux.scheduling.policies.swap_only import SwapOnly

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
