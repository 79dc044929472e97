"""Train many PyTorch models at once, inside a memory budget you name."""

from trainmux import errors
from trainmux.colocate import Colocation, ColocationResult, Job, JobResult, JobStep, JobUsage, colocate
from trainmux.errors import (
    BatchError,
    BudgetError,
    CheckpointError,
    ConfigError,
    FleetError,
    FusionError,
    LossError,
    MemberChangedError,
    MemberError,
    OptimizerError,
    PlanError,
    TraceError,
    TrainmuxError,
    TrainmuxWarning,
)
from trainmux.fleet import (
    Callback,
    CSVLog,
    EarlyStopping,
    EpochRecord,
    Fleet,
    History,
    MachineFacts,
    Member,
    Plan,
    inspect_machine,
)
from trainmux.profiling import DEVICES, Device

__version__ = "0.1.0"

__all__ = [
    "DEVICES",
    "BatchError",
    "BudgetError",
    "CSVLog",
    "Callback",
    "CheckpointError",
    "Colocation",
    "ColocationResult",
    "ConfigError",
    "Device",
    "EarlyStopping",
    "EpochRecord",
    "Fleet",
    "FleetError",
    "FusionError",
    "History",
    "Job",
    "JobResult",
    "JobStep",
    "JobUsage",
    "LossError",
    "MachineFacts",
    "Member",
    "MemberChangedError",
    "MemberError",
    "OptimizerError",
    "Plan",
    "PlanError",
    "TraceError",
    "TrainmuxError",
    "TrainmuxWarning",
    "__version__",
    "colocate",
    "errors",
    "inspect_machine",
]
