"""A member's graph and a width become a fused graph."""

from trainmux.fusion import rules
from trainmux.fusion._fuse import FusedGraph, fuse
from trainmux.fusion.rules.convolution import STRATEGIES as CONVOLUTION_STRATEGIES

__all__ = ["CONVOLUTION_STRATEGIES", "FusedGraph", "fuse", "rules"]
