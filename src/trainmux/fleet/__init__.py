"""The facade: members, groups and slots over the stages above."""

from trainmux.fleet._averages import EMA, SWA
from trainmux.fleet._callbacks import Callback, CSVLog, EarlyStopping, FitState, csv_text, put_aside
from trainmux.fleet._checkpoint_files import checkpoint_exists
from trainmux.fleet._collate import BucketCollate
from trainmux.fleet._config import require_choice, whole_number
from trainmux.fleet._cursor import END_OF_PASS, BatchCursor, first_batch
from trainmux.fleet._fleet import Fleet
from trainmux.fleet._history import STOPPED_ON_REQUEST, EpochRecord, History, Mode, check_mode
from trainmux.fleet._index_batches import IndexBatches, PartialBatch, rows_of, whole_data
from trainmux.fleet._machine import CacheFacts, MachineFacts, Rates, inspect_machine
from trainmux.fleet._member import Member
from trainmux.fleet._plan import Plan
from trainmux.fleet._progress import (
    Row,
    left_text,
    memory_text,
    open_display,
    printable,
    progress_setting,
    rate_text,
    value_text,
)
from trainmux.fleet._segment_runner import GroupPiece
from trainmux.fleet._shared import copied, share_frozen, view_key
from trainmux.fleet._slots import Room
