"""Frozen types that every other room speaks: no torch execution, no CUDA."""

from trainmux.ir._files import (
    failure_reason,
    failure_remedy,
    file_format,
    load,
    replace_file,
    save,
    to_bytes,
    write_file,
)
from trainmux.ir._graph import (
    FreeNumber,
    FusionRecord,
    GraphInput,
    GraphOutput,
    GroupSummary,
    InputKind,
    MemoryUse,
    OutputKind,
    Phase,
)
from trainmux.ir._plan import Attempt, Multiplexing, PlanRecord, Recomputation, Schedule, SubArray, Swap
from trainmux.ir._profile import ByteClass, DeviceFacts, Profile, ProfiledNode, ProfiledTensor
from trainmux.ir._program import (
    ALIGNMENT,
    Compute,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Prefetch,
    Program,
    Recompute,
    Tenancy,
    Wait,
)
from trainmux.ir._timeline import MemoryPoint, Span, Timeline, lane_of
from trainmux.ir._verifier import Violation, ViolationKind, find_violations, verify
