"""Independent jobs share one device and one memory arena (Zico): what decides, and what runs it on a CPU."""

from trainmux.colocate._actions import Action, Enqueue, Idle, Remap
from trainmux.colocate._colocate import colocate
from trainmux.colocate._colocation import Colocation
from trainmux.colocate._constants import ScroogeConstants
from trainmux.colocate._demand import (
    COARSE_TRACKING_BYTES,
    EVERY_KERNEL,
    FINE_TRACKING_BYTES,
    JobDemand,
    MicroBatchLane,
    Segment,
    cut_segments,
    demand_of_iteration,
)
from trainmux.colocate._in_flight import CANDIDATE_LIMITS, choose_in_flight_limit
from trainmux.colocate._job import JobReport
from trainmux.colocate._lane import SegmentRef
from trainmux.colocate._layout import (
    ArenaLayout,
    ChooseLayout,
    Layout,
    check_demands,
    layout_by_rule,
    layouts,
    smallest_budget,
)
from trainmux.colocate._placement import (
    PER_TENSOR,
    REGION_BYTES,
    SMALL_REGION_BYTES,
    Lifespan,
    Region,
    Stack,
    StackOrder,
    stack_feature_maps,
)
from trainmux.colocate._result import ColocationResult, JobResult, JobUsage
from trainmux.colocate._scheduler import ScroogeScheduler
from trainmux.colocate._simulated_gpu import Contention, Executed, Run, SimulatedGpu, choose_layout
from trainmux.colocate._stored import (
    LifespanFolder,
    StoredLifespans,
    lifespans_of,
)
from trainmux.colocate._tensors import (
    Allocation,
    Iteration,
    ObservedAllocation,
    TensorClass,
    backward_start,
    classify,
    iteration_of_profile,
    iteration_of_rows,
)
from trainmux.colocate._user_job import Job, JobCallback, JobStep

__all__ = [
    "CANDIDATE_LIMITS",
    "COARSE_TRACKING_BYTES",
    "EVERY_KERNEL",
    "FINE_TRACKING_BYTES",
    "PER_TENSOR",
    "REGION_BYTES",
    "SMALL_REGION_BYTES",
    "Action",
    "Allocation",
    "ArenaLayout",
    "ChooseLayout",
    "Colocation",
    "ColocationResult",
    "Contention",
    "Enqueue",
    "Executed",
    "Idle",
    "Iteration",
    "Job",
    "JobCallback",
    "JobDemand",
    "JobReport",
    "JobResult",
    "JobStep",
    "JobUsage",
    "Layout",
    "Lifespan",
    "LifespanFolder",
    "MicroBatchLane",
    "ObservedAllocation",
    "Region",
    "Remap",
    "Run",
    "ScroogeConstants",
    "ScroogeScheduler",
    "Segment",
    "SegmentRef",
    "SimulatedGpu",
    "Stack",
    "StackOrder",
    "StoredLifespans",
    "TensorClass",
    "backward_start",
    "check_demands",
    "choose_in_flight_limit",
    "choose_layout",
    "classify",
    "colocate",
    "cut_segments",
    "demand_of_iteration",
    "iteration_of_profile",
    "iteration_of_rows",
    "layout_by_rule",
    "layouts",
    "lifespans_of",
    "smallest_budget",
    "stack_feature_maps",
]
