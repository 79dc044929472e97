"""A fused graph becomes a program; an engine runs it step by step."""

from trainmux.engine._capture_room import CaptureRoom, kernel_settings
from trainmux.engine._cuda_graphs import CudaGraphEngine
from trainmux.engine._into import handed_over, measured_scratch_bytes, run_into, scratch_bytes
from trainmux.engine._landing import NUM_LANDINGS, HostLeaf, Landing
from trainmux.engine._lanes import HostLanes, WatchedLanes
from trainmux.engine._planned import Memory, PlannedProgram
from trainmux.engine._planned_engine import PlannedEngine
from trainmux.engine._pools import limited_growth, pool_bytes, release_cached
from trainmux.engine._program import (
    ForwardProgram,
    StepProgram,
    build_forward,
    build_planned_forward,
    build_step,
)
from trainmux.engine._reference import ReferenceEngine
from trainmux.engine._ring import HostFeed
from trainmux.engine._sub_arrays import first_rows, in_sub_arrays
from trainmux.engine._transfer import Transfers
from trainmux.engine._updates import UpdateSettings
