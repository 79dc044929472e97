"""A search of scikit-learn's that trains all candidates and folds as one fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import ParameterGrid, ParameterSampler, check_cv
from sklearn.model_selection._search import BaseSearchCV
from sklearn.utils import _safe_indexing

from trainmux.errors import ConfigError
from trainmux.search._estimators import MEETING, Meeting, _FleetEstimator


class FleetSearchCV(BaseSearchCV):  # type: ignore[misc]
    """A search over settings that trains all candidates and folds as one fleet.

    ``estimator`` is a `FleetClassifier` or `FleetRegressor`, or a pipeline (or another meta-estimator) that
    ends in one. ``params`` is as for ``GridSearchCV``, all of which is tried; with ``n_iter``, as for
    ``RandomizedSearchCV``, of which so many are drawn by ``random_state``. All else, and what a fitted search
    has (``cv_results_``, ``best_estimator_``, ``best_params_``, …), is as for those two. Scores are those
    that each estimator would get if it were fitted by itself.

    Candidates that differ in ``epochs``, ``batch_size`` or the shape of their data train in several fleets,
    one after another. ``fleet_time_`` is how long all of it took, in seconds: times in ``cv_results_`` are
    without it. Transformers in a pipeline are fitted twice. ``n_jobs`` is not there: nothing is trained side
    by side but in the fleet.
    """

    cv: Any

    def __init__(
        self,
        estimator: Any,
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        n_iter: int | None = None,
        scoring: Any = None,
        refit: bool | str | Callable[..., Any] = True,
        cv: Any = None,
        verbose: int = 0,
        error_score: float | str = np.nan,
        return_train_score: bool = False,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            estimator,
            scoring=scoring,
            refit=refit,
            cv=cv,
            verbose=verbose,
            error_score=error_score,
            return_train_score=return_train_score,
        )
        self.params = params
        self.n_iter = n_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, **params: Any) -> FleetSearchCV:  # noqa: N803
        """Train and score all candidates on all folds, then the best one on all rows."""
        cv = self.cv
        checked = check_cv(cv, y, classifier=is_classifier(self.estimator))
        self._given = X, y
        self.cv = list(checked.split(X, y, params.get("groups")))  # once: they may be random
        try:
            super().fit(X, y, **params)
        finally:
            self.cv = cv
            del self._given
        return self

    def _run_search(self, evaluate_candidates: Callable[[list[dict[str, Any]]], Any]) -> None:
        if self.n_iter is None:
            candidates = list(ParameterGrid(self.params))
        else:
            candidates = list(ParameterSampler(self.params, self.n_iter, random_state=self.random_state))
        start_s = time.monotonic()
        meeting = Meeting()
        token = MEETING.set(meeting)
        try:
            for settings in candidates:
                for train, _ in self.cv:
                    self._note(meeting, settings, train)
            meeting.train()
            self.fleet_time_ = time.monotonic() - start_s
            evaluate_candidates(candidates)
        finally:
            MEETING.reset(token)

    def _note(self, meeting: Meeting, settings: Mapping[str, Any], rows: Any) -> None:
        """Have the estimator that a candidate's fit on a fold comes to take part in the meeting."""
        X, y = self._given  # noqa: N806
        num_fits, estimator = len(meeting.fits), clone(self.estimator)
        try:
            estimator.set_params(**clone(dict(settings), safe=False))
            if isinstance(estimator, _FleetEstimator):
                meeting.fits.append(estimator.fit_of(X, y, rows))
            else:
                estimator.fit(_safe_indexing(X, rows), _safe_indexing(y, rows))
        except Exception:
            return  # raised again where the candidate is evaluated, and scored as `error_score` says
        if len(meeting.fits) == num_fits:
            raise ConfigError(
                "expected a FleetClassifier or FleetRegressor, or a pipeline that ends in one, got "
                f"{type(estimator).__name__}; take GridSearchCV for other estimators"
            )
