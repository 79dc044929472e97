"""The facade: members, groups and slots over the stages above."""

from trainmux.fleet._fleet import Fleet
from trainmux.fleet._machine import CacheFacts, MachineFacts, Rates, inspect_machine
from trainmux.fleet._member import Member
from trainmux.fleet._plan import Plan
from trainmux.fleet._segment_runner import GroupPiece

__all__ = [
    "CacheFacts",
    "Fleet",
    "GroupPiece",
    "MachineFacts",
    "Member",
    "Plan",
    "Rates",
    "inspect_machine",
]
