"""Typed errors. Each message says what was expected, what was got, and one remedy."""

from __future__ import annotations

import sys
import warnings


class TrainmuxError(Exception):
    """Base of every error that trainmux raises on purpose."""


class FleetError(TrainmuxError, RuntimeError):
    """The fleet cannot do this in the state it is in."""


class MemberError(TrainmuxError, ValueError):
    """A member, or the set of members, cannot be trained as given."""


class MemberChangedError(MemberError):
    """A member was changed while in the fleet, in a way that the fleet does not follow by itself."""


class OptimizerError(MemberError):
    """An optimizer is not supported, or its settings or state are not usable."""


class BatchError(TrainmuxError, ValueError):
    """A batch does not have the structure, dtype or shape that was promised by the example."""


class LossError(TrainmuxError, ValueError):
    """The loss function returned something that cannot be trained on."""


class ConfigError(TrainmuxError, ValueError):
    """A setting of the fleet (precision, device, data, ...) is unknown or contradicts another."""


class CheckpointError(TrainmuxError):
    """A checkpoint cannot be written, is damaged, or does not fit the fleet."""


class SearchError(TrainmuxError):
    """A search cannot go on: none of its trials can be trained, or its storage is out of reach."""


class TraceError(TrainmuxError):
    """A model or loss function cannot be traced into a graph.

    ``op`` names the operator that stopped the trace and ``location`` the line of user code
    (``file:line in function``) that called it; either may be ``None`` where it is not known.
    """

    def __init__(self, message: str, *, op: str | None = None, location: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        self.location = location


class FusionError(TrainmuxError):
    """An operator cannot be fused over the model axis.

    ``op`` names the operator and ``location`` the line of user code it came from.
    """

    def __init__(self, message: str, *, op: str | None = None, location: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        self.location = location


class BudgetError(TrainmuxError, ValueError):
    """A byte budget cannot be read, or no plan fits it.

    ``smallest_bytes`` is a budget that would work, ``None`` where that is not known.
    """

    def __init__(self, message: str, *, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class PlanError(TrainmuxError, ValueError):
    """A plan, profile or program is damaged, belongs to another fleet, would not run correctly, or cannot be
    written.
    """


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def named_line(error: BaseException) -> str:
    """The type of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error)}"


class TrainmuxWarning(UserWarning):
    """Something works, but not in the way one would expect: a fall-back, a frozen member."""


def warn_user(text: str) -> None:
    """Issue a ``TrainmuxWarning`` at the nearest caller outside this package."""
    level = 1
    frame = sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("trainmux."):
        frame = frame.f_back
        level += 1
    warnings.warn(text, TrainmuxWarning, stacklevel=level)
