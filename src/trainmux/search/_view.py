"""The view of a running search."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from trainmux.fleet import Mode, Row, left_text, memory_text, printable, rate_text, value_text
from trainmux.search._results import score
from trainmux.search._trial import Trial, TrialState

_FEWEST_DONE = 3
"""Complete trials that are shown, the best ones, however many are running."""
_MOST_CHANGES = 32
"""Of the number of epochs done: its rate is that of the last so many."""
_SHOWN = (TrialState.RUNNING, TrialState.WAITING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED)


class SearchView:
    """The trials of a search as they are now: read from another thread than the one that trains.

    ``num_trials`` tells how many trials the search will have, if that is known, ``device`` where it trains.
    """

    head = "trial"

    def __init__(
        self,
        trials: Sequence[Trial],
        metrics: tuple[str, ...],
        modes: tuple[Mode, ...],
        num_slots: Callable[[], int],
        num_trials: Callable[[], int | None],
        device: torch.device,
        timeout: float | None,
    ) -> None:
        self.value_name = metrics[0]
        self._trials = trials
        self._modes = modes
        self._num_slots, self._num_trials = num_slots, num_trials
        self._device = device
        self._timeout = timeout
        self._best: Trial | None = None
        self._start_s = time.monotonic()
        self._changes: deque[tuple[float, int]] = deque([(self._start_s, 0)], maxlen=_MOST_CHANGES)

    def headlines(self) -> list[str]:
        memory = memory_text(self._device)
        speed = self._speed() or ["no epoch finished yet"]
        return [self._counts(), ", ".join([*speed, *([memory] if memory else [])])]

    def line(self) -> str:
        parts = [self._counts(), *self._speed()]
        best = next(iter(self.ranked(1)), None)
        if best is not None and best.value is not None:
            parts.append(f"best {self.value_name} {value_text(best.value)} ({printable(best.name)})")
        return ", ".join(parts)

    def share_done(self) -> float | None:
        total = self._num_trials()
        if not total:
            return None
        # Of a running trial its epochs count.
        done = sum(
            1.0 if trial.state.is_finished else trial.epoch / max(trial.max_epochs, 1)
            for trial in list(self._trials)
        )
        return done / total

    def ranked(self, max_rows: int) -> list[Trial]:
        """The trials that run and the best that are complete: best first, those without a value last."""
        trials = list(self._trials)
        running = [trial for trial in trials if trial.state is TrialState.RUNNING]
        done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        done.sort(key=self._score)
        shown = [*done[: max(_FEWEST_DONE, max_rows - len(running))], *running]
        shown.sort(key=lambda trial: (trial.values is None, self._score(trial)))
        self._best = shown[0] if shown and shown[0].values is not None else None
        return shown

    def row(self, key: Trial) -> Row:
        curve = [record.loss for record in list(key.records)]
        is_done = key.state.is_finished
        place = f"{key.epoch}/{key.max_epochs}"
        look = "best" if key is self._best else "dim" if is_done else ""
        note = str(key.state) if is_done else ""
        return Row(printable(key.name), key.value, curve, place, note, look)

    def _counts(self) -> str:
        """``trial 137/500: 16 running in 16 slots, 102 complete, 17 pruned, 2 failed``."""
        trials, total = list(self._trials), self._num_trials()
        counts = Counter(trial.state for trial in trials)
        states = [f"{counts[state]} {state}" for state in _SHOWN if counts[state]]
        states = [f"{text} in {self._num_slots()} slots" if "running" in text else text for text in states]
        return (
            f"trial {len(trials)}" + (f"/{total}" if total else "") + f": {', '.join(states) or 'none yet'}"
        )

    def _speed(self) -> list[str]:
        """``1240 trials/h``, ``0:12:30 left``; what is not known is left out."""
        trials, total, now_s = list(self._trials), self._num_trials(), time.monotonic()
        num_epochs = sum(trial.epoch - trial.resumed_epoch for trial in trials)
        if num_epochs != self._changes[-1][1]:
            self._changes.append((now_s, num_epochs))
        # From the end of the first epoch on, as soon as there are more: before it, steps were being made.
        changes = list(self._changes)[1 if len(self._changes) > 2 else 0 :]
        (first_s, first), (last_s, last) = changes[0], changes[-1]
        parts, left_s = [], math.inf
        if last > first:
            # An epoch that takes longer than those before counts with the time it has taken so far.
            pause_s = (last_s - first_s) / (len(changes) - 1)
            epochs_per_s = (last - first) / (max(last_s, now_s - pause_s) - first_s)
            lengths = [trial.epoch for trial in trials if trial.state.is_finished and trial.epoch]
            lengths = lengths or [trial.max_epochs for trial in trials]
            each = max(sum(lengths) / len(lengths), 1.0)
            parts.append(rate_text(epochs_per_s / each * 3600, "trials/h"))
            if total:
                running = [trial for trial in trials if not trial.state.is_finished]
                to_do = (total - len(trials)) * each + sum(max(each - trial.epoch, 0) for trial in running)
                left_s = max(to_do, 0.0) / epochs_per_s
        if self._timeout is not None:
            left_s = min(left_s, max(self._start_s + self._timeout - now_s, 0.0))
        return [*parts, *([left_text(left_s)] if left_s < math.inf else [])]

    def _score(self, trial: Trial) -> float:
        return score(trial, self._modes)
