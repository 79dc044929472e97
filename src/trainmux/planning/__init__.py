"""Profiles and a byte budget → a plan: partitions, policies, simulation, and the program that is proved."""

from trainmux.planning._body import Infeasible, Task
from trainmux.planning._fewer_waits import fewer_waits
from trainmux.planning._fixed import fit_program
from trainmux.planning._plan import TIME_LIMIT_SECONDS, BudgetCost, Planner, PlanProgress, checked_time_limit
from trainmux.planning._rewrite import rewrite
from trainmux.planning._slab import Slab, Tenant, pack, place_in_order
from trainmux.planning._timeline import lane_times, measured_timeline, timeline
from trainmux.planning.partition import NUM_ALWAYS, PartitionSearch, PlannedGroup, find_partitions
from trainmux.planning.policies._known import POLICY_NAMES, partitions_to_try, policy_named
