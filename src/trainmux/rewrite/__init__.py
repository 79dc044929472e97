"""From a schedule to a program: nodes with explicit swaps, waits, frees and recomputes, and offsets."""

from trainmux.rewrite._explain import explain_program
from trainmux.rewrite._fewer_waits import fewer_waits
from trainmux.rewrite._issue import UNPLACED
from trainmux.rewrite._rewrite import Draft, draft, place, rewrite

__all__ = ["UNPLACED", "Draft", "draft", "explain_program", "fewer_waits", "place", "rewrite"]
