"""The facade: members, groups and slots over the stages above."""

from trainmux.fleet._averages import EMA, SWA
from trainmux.fleet._callbacks import Callback, CSVLog, EarlyStopping, FitState
from trainmux.fleet._collate import BucketCollate
from trainmux.fleet._cursor import END_OF_PASS, BatchCursor
from trainmux.fleet._fleet import Fleet
from trainmux.fleet._history import EpochRecord, History
from trainmux.fleet._machine import CacheFacts, MachineFacts, Rates, inspect_machine
from trainmux.fleet._member import Member
from trainmux.fleet._plan import Plan
from trainmux.fleet._segment_runner import GroupPiece
from trainmux.fleet._shared import share_frozen

__all__ = [
    "EMA",
    "END_OF_PASS",
    "SWA",
    "BatchCursor",
    "BucketCollate",
    "CSVLog",
    "CacheFacts",
    "Callback",
    "EarlyStopping",
    "EpochRecord",
    "FitState",
    "Fleet",
    "GroupPiece",
    "History",
    "MachineFacts",
    "Member",
    "Plan",
    "Rates",
    "inspect_machine",
    "share_frozen",
]
