"""What makes two optimizers fusable: the records that describe an optimizer without its numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupStructure:
    """One param group of a torch optimizer, stripped of everything that may differ between members.

    ``kind`` names the update rule (AdamW is kind ``"Adam"`` with the flag ``decoupled``), ``flags`` are
    the switches that change which operations run, sorted by name, and ``params`` are indices into the
    member's list of parameters. ``maximize`` is no flag: it is a number, +1 or -1, like the learning rate.
    """

    kind: str
    flags: tuple[tuple[str, bool], ...]
    params: tuple[int, ...]


@dataclass(frozen=True)
class OptimizerStructure:
    """All param groups of one optimizer. Equal for members whose updates can run as one."""

    groups: tuple[GroupStructure, ...]
