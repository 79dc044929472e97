"""Train many PyTorch models at once, inside a memory budget you name."""

from trainmux import errors
from trainmux.colocate import Colocation, ColocationResult, Job, JobResult, JobStep, JobUsage, colocate
from trainmux.fleet import Fleet, MachineFacts, Member, Plan, inspect_machine
from trainmux.profiling import DEVICES, Device
from trainmux.training import Callback, CSVLog, EarlyStopping, EpochRecord, History

__version__ = "0.1.0.dev0"

__all__ = [
    "DEVICES",
    "CSVLog",
    "Callback",
    "Colocation",
    "ColocationResult",
    "Device",
    "EarlyStopping",
    "EpochRecord",
    "Fleet",
    "History",
    "Job",
    "JobResult",
    "JobStep",
    "JobUsage",
    "MachineFacts",
    "Member",
    "Plan",
    "__version__",
    "colocate",
    "errors",
    "inspect_machine",
]
