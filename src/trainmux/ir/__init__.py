"""Frozen types that every other room speaks: no torch execution, no CUDA."""

from trainmux.ir._graph import (
    FusionRecord,
    GraphInput,
    GraphOutput,
    GroupSummary,
    InputKind,
    MemoryUse,
    OutputKind,
    Phase,
)
from trainmux.ir._json import from_json, load, save, to_json
from trainmux.ir._lanes import lane_of
from trainmux.ir._plan import Attempt, Multiplexing, Plan, Recomputation, Schedule, SubArray, Swap
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
from trainmux.ir._timeline import MemoryPoint, Span, Timeline
from trainmux.ir._verify import find_violations, verify
from trainmux.ir._verify_report import Violation, ViolationKind

__all__ = [
    "ALIGNMENT",
    "Attempt",
    "ByteClass",
    "Compute",
    "DeviceFacts",
    "Free",
    "FusionRecord",
    "GraphInput",
    "GraphOutput",
    "GroupSummary",
    "InputKind",
    "Instruction",
    "Lane",
    "MemoryPoint",
    "MemoryUse",
    "Multiplexing",
    "Offload",
    "OutputKind",
    "Part",
    "Phase",
    "Plan",
    "Prefetch",
    "Profile",
    "ProfiledNode",
    "ProfiledTensor",
    "Program",
    "Recomputation",
    "Recompute",
    "Schedule",
    "Span",
    "SubArray",
    "Swap",
    "Tenancy",
    "Timeline",
    "Violation",
    "ViolationKind",
    "Wait",
    "find_violations",
    "from_json",
    "lane_of",
    "load",
    "save",
    "to_json",
    "verify",
]
