"""Population-based training: bad members go on from the state of good ones, with settings near theirs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainmux.errors import ConfigError
from trainmux.fleet import STOPPED_ON_REQUEST, Callback, FitState, Fleet, Mode, check_mode, whole_number

Perturb = Mapping[str, Sequence[float]] | Callable[[Any, random.Random], None]


@dataclass(frozen=True)
class Exploit:
    """A member that went on from another one's state after an epoch, with these settings of its optimizer."""

    epoch: int
    source: str
    target: str
    settings: Mapping[str, Any]


class PopulationBasedTraining(Callback):
    """Every ``every`` epochs, the worst ``share`` of the members go on from the best ones.

    Each of the worst takes over weights, optimizer state and optimizer settings of one of the best, drawn at
    random; its settings are then perturbed. Nothing is captured anew. ``perturb`` maps names of optimizer
    settings to factors, of which one is drawn (``{"lr": (0.8, 1.25)}``), or is a function of the member and
    a ``random.Random`` that changes the member itself, its code's numbers included. Schedules, names and
    seeds stay the members' own: a schedule that sets the learning rate undoes a perturbed one.

    ``monitor`` and ``mode`` are as for `EarlyStopping`. Members without a finite value are the worst, and
    train again. ``exploits`` says who went on from whom.
    """

    def __init__(
        self,
        monitor: str,
        perturb: Perturb,
        *,
        every: int = 1,
        share: float = 0.25,
        mode: Mode = "min",
        seed: int = 0,
    ) -> None:
        check_mode(mode)
        if not 0 < share <= 0.5:
            raise ConfigError(f"share must be above 0 and at most 0.5, but got {share!r}")
        if not callable(perturb) and not all(perturb.values()):
            raise ConfigError(f"expected at least one factor for each setting of perturb=, got {perturb!r}")
        self.monitor = monitor
        self.every = whole_number("every", every)
        self.share = share
        self.mode = mode
        self.exploits: list[Exploit] = []
        self._perturb = perturb
        self._random = random.Random(seed)

    def on_epoch_end(self, state: FitState) -> None:
        if state.epoch % self.every:
            return
        ranked = self._ranked(state)
        count = int(len(ranked) * self.share)
        for target in ranked[len(ranked) - count :]:
            self._exploit(state, self._random.choice(ranked[:count]), target)

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self._random.getstate()
        return {"random": [version, list(words), gauss], "exploits": [asdict(item) for item in self.exploits]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
        self.exploits = [Exploit(**item) for item in state["exploits"]]

    def _ranked(self, state: FitState) -> list[str]:
        """Members that take part, best first."""
        scores: dict[str, float] = {}
        for name in state.fleet.names:
            if state.stopped.get(name) == STOPPED_ON_REQUEST:
                continue
            last = state.history[name][-1] if name in state.history else None
            values = last.values() if last is not None and last.epoch == state.epoch else {}
            if name not in state.stopped and self.monitor not in values:
                raise ConfigError(
                    f"expected a metric to monitor, got {self.monitor!r}; member {name!r} has "
                    f"{sorted(values)}. Name one of these"
                )
            value = values.get(self.monitor, float("nan"))
            is_usable = name not in state.stopped and abs(value) < float("inf")
            scores[name] = (value if self.mode == "min" else -value) if is_usable else float("inf")
        return sorted(scores, key=scores.__getitem__)

    def _exploit(self, state: FitState, source: str, target: str) -> None:
        fleet: Fleet = state.fleet
        fleet.copy_member(source, target)
        members = dict(zip(fleet.names, fleet.members, strict=True))
        optimizer = members[target].optimizer
        for ours, theirs in zip(optimizer.param_groups, members[source].optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        if callable(self._perturb):
            self._perturb(members[target], self._random)
            fleet.refresh(target)
        else:
            for setting, factors in self._perturb.items():
                factor = self._random.choice(list(factors))
                for group in optimizer.param_groups:
                    if setting not in group:
                        raise ConfigError(f"expected a setting of the optimizer, got {setting!r}")
                    group[setting] *= factor
        names = self._perturb if isinstance(self._perturb, Mapping) else ("lr",)
        settings = {name: float(optimizer.param_groups[0][name]) for name in names}
        self.exploits.append(Exploit(state.epoch, source, target, settings))
