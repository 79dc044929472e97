"""A study as pruners see it."""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState


class Glance:
    """A storage as pruners see it: all trials are read once for a round of decisions, not for each.

    A database takes long to read the trials that are running, of which a search has as many as slots. What
    pruners themselves write is seen at once; what other workers write, from the next round on.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._known: list[FrozenTrial] | None = None
        self._decided: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def begin(self, number: int) -> None:
        """Begin a decision; the second on the same trial is of a new round."""
        if number in self._decided:
            self._known = None
            self._decided = set()
        self._decided.add(number)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        if self._known is None:
            self._known = self._storage.get_all_trials(study_id, deepcopy=False)
        found = [trial for trial in self._known if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._storage.set_trial_system_attr(trial_id, key, value)
        for trial in self._known or ():
            if trial._trial_id == trial_id:
                trial.system_attrs[key] = value


def seen_by_pruners(study: optuna.Study, glance: Glance) -> optuna.Study:
    """The study on that storage."""
    seen = copy.copy(study)
    seen._storage = glance
    return seen
