"""Frozen types that every other room speaks: no torch execution, no CUDA."""

from trainmux.ir._graph import (
    FusionRecord,
    GraphInput,
    GraphOutput,
    GroupSummary,
    InputKind,
    OutputKind,
    Phase,
)

__all__ = ["FusionRecord", "GraphInput", "GraphOutput", "GroupSummary", "InputKind", "OutputKind", "Phase"]
