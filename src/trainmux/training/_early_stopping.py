"""Stops each member by itself once it no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainmux.errors import ConfigError
from trainmux.training._callbacks import Callback, FitState
from trainmux.training._history import Mode, check_mode


class EarlyStopping(Callback):
    """Stops a member after ``patience`` epochs in a row in which ``monitor`` did not improve.

    ``monitor`` is ``"loss"`` (the training loss), a training metric, or ``"val_<name>"`` of a validation
    metric. An improvement is a change by more than ``min_delta`` in the direction of ``mode``; NaN never is
    one. Refuses a patience below 1, a negative ``min_delta``, and, at the first epoch, an unknown monitor.
    """

    def __init__(self, monitor: str, patience: int, mode: Mode = "min", min_delta: float = 0.0) -> None:
        check_mode(mode)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"patience must be a whole number of epochs, at least 1, but got {patience!r}")
        if not min_delta >= 0 or math.isinf(min_delta):
            raise ConfigError(f"min_delta must be a finite number not below 0, but got {min_delta!r}")
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self._best: dict[str, float] = {}
        self._num_bad: dict[str, int] = {}

    def on_epoch_end(self, state: FitState) -> None:
        for name in state.active:
            record = state.history[name][-1] if name in state.history else None
            if record is None or record.epoch != state.epoch:
                continue  # joined after the epoch was recorded
            values = record.values()
            if self.monitor not in values:
                raise ConfigError(
                    f"EarlyStopping cannot monitor {self.monitor!r}: member {name!r} has {sorted(values)}. "
                    "Name one of these (validation metrics have 'val_' before their name)"
                )
            if self._improves(name, values[self.monitor]):
                self._best[name] = values[self.monitor]
                self._num_bad[name] = 0
            else:
                self._num_bad[name] = self._num_bad.get(name, 0) + 1
                if self._num_bad[name] >= self.patience:
                    state.stop_member(name)

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best), "num_bad": dict(self._num_bad)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = dict(state["best"])
        self._num_bad = dict(state["num_bad"])

    def _improves(self, name: str, value: float) -> bool:
        best = self._best.get(name, math.inf if self.mode == "min" else -math.inf)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta  # False for NaN, which also inf - inf is
