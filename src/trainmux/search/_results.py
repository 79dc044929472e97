"""The results of a search."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from trainmux.errors import ConfigError, SearchError
from trainmux.fleet import Mode
from trainmux.ir import write_file
from trainmux.search._trial import Trial, TrialState

if TYPE_CHECKING:
    import pandas


class Results(Sequence[Trial]):
    """The trials of a search, in the order of their numbers."""

    def __init__(self, trials: Sequence[Trial], metric: tuple[str, ...], mode: tuple[Mode, ...]) -> None:
        self._trials = sorted(trials, key=lambda trial: trial.number)
        self.metric = metric
        self.mode = mode

    @overload
    def __getitem__(self, index: int) -> Trial: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trial]: ...

    def __getitem__(self, index: int | slice) -> Trial | list[Trial]:
        return self._trials[index]

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    def __repr__(self) -> str:
        counts = {state: sum(trial.state is state for trial in self) for state in TrialState}
        text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        return f"Results({text or 'no trials'})"

    @property
    def best(self) -> Trial:
        """The complete trial with the best value; refuses a search with several metrics, or without one."""
        if len(self.metric) > 1:
            raise ConfigError(f"expected one metric, got {list(self.metric)}; take pareto_front() instead")
        ranked = self.ranked()
        if not ranked:
            raise ConfigError(f"expected a complete trial, got {self!r}; errors are in trial.error")
        return ranked[0]

    def ranked(self) -> list[Trial]:
        """The complete trials, best first by the first metric."""
        found = [trial for trial in self if trial.state is TrialState.COMPLETE and trial.values is not None]
        return sorted(found, key=lambda trial: score(trial, self.mode))

    def pareto_front(self) -> list[Trial]:
        """The complete trials that no other one beats in every metric."""
        ranked = self.ranked()
        points = [_signed(trial, self.mode) for trial in ranked]

        def is_beaten(point: tuple[float, ...]) -> bool:
            return any(
                other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points
            )

        return [trial for trial, point in zip(ranked, points, strict=True) if not is_beaten(point)]

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dict per trial: number, name, state, epochs, the values by metric, parameters, error."""
        return [
            {
                "number": trial.number,
                "name": trial.name,
                "state": str(trial.state),
                "epochs": trial.epoch,
                **dict(zip(self.metric, trial.values or (math.nan,) * len(self.metric), strict=True)),
                **{f"params_{key}": value for key, value in trial.params.items()},
                "seconds": trial.seconds,
                "error": trial.error,
            }
            for trial in self
        ]

    def table(self) -> pandas.DataFrame:
        """``to_rows`` as a table; needs pandas."""
        return as_table(self.to_rows())

    def report(self, path: str | os.PathLike[str], *, title: str = "Search") -> None:
        """Write one page that opens offline: curves, parameters and their importance, the table of trials.

        Needs Optuna and Plotly, of which the charts are; refuses a search without trials.
        """
        from trainmux.search._report import report

        write_file(path, report(self, title), error=SearchError)


def as_table(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Make a table of rows; refuses without pandas."""
    try:
        import pandas
    except ImportError:
        raise ConfigError(
            "expected pandas for a table, got none: pip install 'trainmux[search]', or take to_rows()"
        ) from None
    return pandas.DataFrame(rows)


def _signed(trial: Trial, mode: tuple[Mode, ...]) -> tuple[float, ...]:
    return tuple(
        value if way == "min" else -value for value, way in zip(trial.values or (), mode, strict=True)
    )


def score(trial: Trial, mode: tuple[Mode, ...]) -> float:
    """The first metric as a number of which less is better; infinite where there is none."""
    if trial.values is None or math.isnan(trial.values[0]):
        return math.inf
    return _signed(trial, mode)[0]
