"""Averages of each member's weights: exponential moving ones, and stochastic weight averaging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainmux.errors import ConfigError, MemberError
from trainmux.fleet._callbacks import Callback, Departures, FitState
from trainmux.fleet._config import whole_number

if TYPE_CHECKING:
    from trainmux.fleet._fleet import Fleet


class WeightAverage(Callback):
    """Base of both averages: what a member's weights were, on the device, in single precision or better.

    A member that is stopped, or that is not finite, keeps its average; that of one that leaves is forgotten
    at the next look, and one that goes on from another's state begins a new one. Buffers are not averaged:
    after averaging, running statistics of batch norms are those of the last step.
    """

    def __init__(self) -> None:
        self._averages: dict[str, dict[str, Tensor]] = {}
        self._counts: dict[str, int] = {}
        self._updates: dict[str, int] = {}
        self._departures = Departures()

    def weights(self, name: str) -> dict[str, Tensor]:
        """Copies of a member's averaged parameters, by name."""
        if name not in self._averages:
            raise MemberError(
                f"expected a member with an average, got {name!r}; there are {sorted(self._averages)}: "
                "fit with this callback first, to the first step or epoch that is averaged"
            )
        return {key: average.clone() for key, average in self._averages[name].items()}

    @contextmanager
    def swapped(self, fleet: Fleet) -> Iterator[None]:
        """While active, members train and are evaluated with their averages; then their weights are back.

        Not those of a member that left meanwhile, or went on from another's state.
        """
        departures = Departures()
        departures.since_last(fleet)
        kept: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            for name, averages in self._averages.items():
                if name in fleet.names:
                    current = fleet.parameters(name)
                    kept[name] = {key: current[key].clone() for key in averages}
                    for key, average in averages.items():
                        current[key].copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for name in kept.keys() - departures.since_last(fleet):
                    current = fleet.parameters(name)
                    for key, value in kept[name].items():
                        current[key].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self._averages, "counts": self._counts, "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages = {name: dict(average) for name, average in state["averages"].items()}
        self._counts, self._updates = dict(state["counts"]), dict(state["updates"])
        self._departures = Departures()

    def _weight(self, count: int) -> float:
        """The share by which the average moves towards the weights, when ``count`` are in it."""
        raise NotImplementedError

    @torch.no_grad()
    def _average(self, fleet: Fleet) -> None:
        for name in self._departures.since_last(fleet):
            for known in (self._averages, self._counts, self._updates):
                known.pop(name, None)
        for name in fleet.names:
            count, updates = self._counts.get(name, 0), fleet.num_updates(name)
            if updates == self._updates.get(name, 0):
                continue  # stopped, or between two updates
            is_new = updates < self._updates.get(name, 0)  # somebody else goes by this name now
            self._counts[name], self._updates[name] = (1 if is_new else count + 1), updates
            averages = self._averages.setdefault(name, {})
            trains = fleet.is_finite(name)
            for key, value in fleet.parameters(name).items():
                wide = value if value.dtype == torch.float64 else value.float()
                if count == 0 or is_new:
                    averages[key] = wide.clone()
                    continue
                average = averages[key].to(value.device)
                moved = torch.lerp(average, wide, self._weight(count))
                averages[key] = torch.where(trains, moved, average)


class EMA(WeightAverage):
    """Keeps an exponential moving average of each member's weights, moved after every update.

    The first update sets it; each later one keeps ``decay`` of it.
    """

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__()
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"decay must be in [0, 1], but got {decay!r}")
        self.decay = decay

    def on_step_end(self, state: FitState) -> None:
        self._average(state.fleet)

    def _weight(self, count: int) -> float:
        return 1.0 - self.decay


class SWA(WeightAverage):
    """Keeps the mean of each member's weights at the end of epochs, from epoch ``start`` on."""

    def __init__(self, start: int = 1) -> None:
        super().__init__()
        self.start = whole_number("start", start)

    def on_epoch_end(self, state: FitState) -> None:
        if state.epoch >= self.start:
            self._average(state.fleet)

    def _weight(self, count: int) -> float:
        return 1.0 / (count + 1)
