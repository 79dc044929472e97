"""Hooks into a search: their base class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmux.fleet import EpochRecord
from trainmux.search._trial import Trial

if TYPE_CHECKING:
    from trainmux.search._results import Results


class SearchCallback:
    """Base of what listens to a search: every hook does nothing.

    Hooks are called in order from a thread of their own, beside training; a trial may be further by then than
    what the hook is about. An exception in a hook ends the search, after a sync.
    """

    def on_trial_start(self, trial: Trial) -> None:
        """When a trial has got a slot."""

    def on_trial_epoch(self, trial: Trial, record: EpochRecord) -> None:
        """After each epoch of a trial."""

    def on_trial_end(self, trial: Trial) -> None:
        """When a trial is finished; ``trial.state`` tells how."""

    def on_search_end(self, results: Results) -> None:
        """Once, when the search has ended as it should; not after an exception."""
