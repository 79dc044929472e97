"""Records become text, pages and traces; reads ``ir`` only."""

from trainmux.reporting._fusion_text import format_fusion
from trainmux.reporting._plan_page import plan_page
from trainmux.reporting._plan_text import plan_text
from trainmux.reporting._trace import chrome_trace

__all__ = ["chrome_trace", "format_fusion", "plan_page", "plan_text"]
