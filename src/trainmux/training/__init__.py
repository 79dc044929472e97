"""Fit loop, callbacks, histories and checkpoints; see docs/layout.md."""

from trainmux.training._callbacks import Callback, FitState
from trainmux.training._checkpoint import checkpoint_exists, read_checkpoint, write_checkpoint
from trainmux.training._csv_log import CSVLog
from trainmux.training._early_stopping import EarlyStopping
from trainmux.training._fit import fit
from trainmux.training._history import EpochRecord, History
from trainmux.training._protocol import Trainable
from trainmux.training._warn import warn_user

__all__ = [
    "CSVLog",
    "Callback",
    "EarlyStopping",
    "EpochRecord",
    "FitState",
    "History",
    "Trainable",
    "checkpoint_exists",
    "fit",
    "read_checkpoint",
    "warn_user",
    "write_checkpoint",
]
