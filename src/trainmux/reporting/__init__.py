"""Records become text; reads ``ir`` only."""

from trainmux.reporting._fusion_text import format_fusion

__all__ = ["format_fusion"]
