"""Profiles and a byte budget → a plan: partitions, policies, and the search that puts them together."""

from trainmux.scheduling._bound import bound_seconds
from trainmux.scheduling._fixed import fit_program
from trainmux.scheduling._plan import BudgetCost, Planner, PlanProgress
from trainmux.scheduling._policy import Infeasible, Policy, Task
from trainmux.scheduling.partition import Group, Partition, PartitionSearch, find_partitions
from trainmux.scheduling.policies import POLICY_NAMES, policy_named

__all__ = [
    "POLICY_NAMES",
    "BudgetCost",
    "Group",
    "Infeasible",
    "Partition",
    "PartitionSearch",
    "PlanProgress",
    "Planner",
    "Policy",
    "Task",
    "bound_seconds",
    "find_partitions",
    "fit_program",
    "policy_named",
]
