"""Train many PyTorch models at once, inside a memory budget you name."""

from trainmux import errors
from trainmux.fleet import Fleet, Member, Plan
from trainmux.profiling import DEVICES, Device
from trainmux.training import Callback, CSVLog, EarlyStopping, EpochRecord, History

__version__ = "0.1.0.dev0"

__all__ = [
    "DEVICES",
    "CSVLog",
    "Callback",
    "Device",
    "EarlyStopping",
    "EpochRecord",
    "Fleet",
    "History",
    "Member",
    "Plan",
    "__version__",
    "errors",
]
