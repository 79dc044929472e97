"""Hooks into the fit loop, and what they get to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainmux.training._history import History
from trainmux.training._protocol import Trainable


@dataclass(frozen=True)
class FitState:
    """The fit at the moment of a hook.

    ``epoch`` is the current one, from 1; in ``on_fit_start`` and ``on_fit_end`` the number of finished ones,
    so 0 at a fresh start and more after a resume. ``step`` counts finished steps. ``losses`` is what the last
    step returned, in the order of ``fleet.names``, still on the device: to read it on the host at every step
    costs a wait at every step. ``history`` includes the current epoch in ``on_epoch_end``. ``stopped`` is as
    last seen, which is exact in ``on_epoch_end`` and may lag behind in ``on_step_end``.

    ``stop_member(name)`` ends one member's training; prefer it to ``fleet.stop``, since it also keeps later
    losses out of the member's mean. ``end_fit()`` ends the fit after this step or epoch.
    """

    fleet: Trainable
    epoch: int
    step: int
    num_epochs: int | None
    num_steps: int | None
    losses: torch.Tensor | None
    history: History
    stopped: Mapping[str, str]
    stop_member: Callable[[str], None]
    end_fit: Callable[[], None]

    @property
    def active(self) -> tuple[str, ...]:
        """The members that were not stopped when last seen."""
        return tuple(name for name in self.fleet.names if name not in self.stopped)


class Callback:
    """Base of all callbacks: every hook does nothing. An exception in a hook ends the fit, after a sync."""

    def on_fit_start(self, state: FitState) -> None:
        """Once, after a checkpoint was restored and before the first step."""

    def on_step_end(self, state: FitState) -> None:
        """After every step has been handed to the device."""

    def on_epoch_end(self, state: FitState) -> None:
        """After an epoch was validated and recorded, before its checkpoint is saved."""

    def on_fit_end(self, state: FitState) -> None:
        """Once, when training has ended as it should; not after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep of this callback, as plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned in the run that is resumed."""


def callback_states(callbacks: tuple[Callback, ...]) -> list[dict[str, Any]]:
    """What a checkpoint keeps of all callbacks: type and state, in order."""
    return [{"type": type(callback).__qualname__, "state": callback.state_dict()} for callback in callbacks]


def load_callback_states(callbacks: tuple[Callback, ...], states: list[dict[str, Any]]) -> None:
    """Give each callback its state: the n-th of a type gets the n-th that was saved for the type.

    So a resumed run may have other callbacks beside; those without a saved state start fresh.
    """
    waiting = list(states)
    for callback in callbacks:
        for index, saved in enumerate(waiting):
            if saved["type"] == type(callback).__qualname__:
                callback.load_state_dict(saved["state"])
                del waiting[index]
                break
