"""`tm.sklearn`: estimators and a search that scikit-learn's own tools take for its own."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainmux as tm

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.compose import TransformedTargetRegressor  # noqa: E402
from sklearn.datasets import load_iris  # noqa: E402
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.exceptions import FitFailedWarning, NotFittedError  # noqa: E402
from sklearn.model_selection import (  # noqa: E402
    GridSearchCV,
    KFold,
    RandomizedSearchCV,
    StratifiedKFold,
    cross_val_score,
)
from sklearn.pipeline import Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

IRIS_X, IRIS_Y = load_iris(return_X_y=True)
X, Y = IRIS_X[::3], np.array(["a", "b", "c"])[IRIS_Y[::3]]
FOLDS = StratifiedKFold(3, shuffle=True, random_state=0)


def make(num_features: int, num_classes: int, lr: float = 0.05, hidden: int = 6) -> tm.Member:
    model = nn.Sequential(nn.Linear(num_features, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))
    model = model.double()
    return tm.Member(model, torch.optim.Adam(model.parameters(), lr=lr))


def line(num_features: int, num_outputs: int, lr: float = 0.1) -> tm.Member:
    model = nn.Linear(num_features, num_outputs).double()
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=lr))


def classifier(**options: Any) -> Any:
    return tm.sklearn.FleetClassifier(make, **{"epochs": 4, "batch_size": 8, **options})


def same_results(found: Any, expected: Any) -> None:
    """All that was measured, but for times."""
    one, other = found.cv_results_, expected.cv_results_
    assert one.keys() == other.keys()
    for key in one:
        if key.endswith("_time"):
            continue
        if key == "params":
            assert one[key] == other[key]
        elif key.startswith("param_"):
            assert one[key].tolist() == other[key].tolist()
        else:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-7, err_msg=key)
    assert found.best_params_ == expected.best_params_
    assert found.best_index_ == expected.best_index_


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of members of each fleet that is fitted."""
    found: list[int] = []
    fit = tm.Fleet.fit

    def counted(fleet: tm.Fleet, *args: Any, **kwargs: Any) -> Any:
        found.append(len(fleet.names))
        return fit(fleet, *args, **kwargs)

    monkeypatch.setattr(tm.Fleet, "fit", counted)
    return found


def test_a_classifier_is_like_any_of_scikit_learns() -> None:
    model = classifier(epochs=30, lr=0.1)
    assert model.get_params()["lr"] == 0.1
    assert model.get_params()["hidden"] == 6
    assert "lr=0.1" in repr(model)
    copy = clone(model).set_params(hidden=4)
    with pytest.raises(NotFittedError):
        copy.predict(X)
    assert copy.fit(X, Y) is copy
    assert copy.score(X, Y) > 0.9
    assert copy.classes_.tolist() == ["a", "b", "c"]
    assert copy.n_features_in_ == 4
    assert copy.model_[0].out_features == 4
    assert len(copy.history_) == 30
    np.testing.assert_allclose(copy.predict_proba(X).sum(1), 1.0)
    again = pickle.loads(pickle.dumps(copy))
    assert (again.predict(X) == copy.predict(X)).all()
    assert (clone(copy).fit(X, Y).predict_proba(X) == copy.predict_proba(X)).all()
    with pytest.raises(ValueError, match="X has 3 features, but FleetClassifier is expecting 4"):
        copy.predict(X[:, :3])
    assert cross_val_score(classifier(), X, Y, cv=2).shape == (2,)


def test_a_grid_is_one_fleet_with_the_results_of_one_by_one(steps: list[int]) -> None:
    grid = [{"lr": [0.01, 0.05]}, {"hidden": [4]}]
    scoring = {"accuracy": "accuracy", "loss": "neg_log_loss"}
    options: dict[str, Any] = {"scoring": scoring, "refit": "loss", "cv": FOLDS, "return_train_score": True}
    found = tm.sklearn.FleetSearchCV(classifier(), grid, **options).fit(X, Y)
    assert steps == [9, 1]
    expected = GridSearchCV(classifier(), grid, **options).fit(X, Y)
    same_results(found, expected)
    np.testing.assert_allclose(found.predict_proba(X), expected.predict_proba(X), rtol=1e-7)
    assert found.best_params_.items() <= found.best_estimator_.get_params().items()
    assert found.fleet_time_ > 0


def test_drawn_settings_and_random_folds(steps: list[int]) -> None:
    draw = {"lr": [0.01, 0.02, 0.05, 0.1]}
    folds = KFold(2, shuffle=True, random_state=np.random.RandomState(0))
    options: dict[str, Any] = {"n_iter": 3, "random_state": 1, "refit": False}
    found = tm.sklearn.FleetSearchCV(classifier(), draw, cv=folds, **options).fit(X, Y)
    assert steps == [6]
    folds = KFold(2, shuffle=True, random_state=np.random.RandomState(0))
    same_results(found, RandomizedSearchCV(classifier(), draw, cv=folds, **options).fit(X, Y))
    assert found.cv is not folds
    assert isinstance(found.cv, KFold)


def test_pipelines_inside_and_around(steps: list[int]) -> None:
    """Each fold is transformed by itself; candidates with other features are a fleet of their own."""
    pipeline = Pipeline([("scale", StandardScaler()), ("reduce", PCA(3)), ("net", classifier())])
    grid = {"net__lr": [0.1], "reduce__n_components": [2, 3]}
    found = tm.sklearn.FleetSearchCV(pipeline, grid, cv=FOLDS).fit(X, Y)
    assert steps == [3, 3, 1]
    expected = GridSearchCV(pipeline, grid, cv=FOLDS).fit(X, Y)
    same_results(found, expected)
    assert found.score(X, Y) == expected.score(X, Y)
    around = make_pipeline(StandardScaler(), tm.sklearn.FleetSearchCV(classifier(), {"lr": [0.1]}, cv=2))
    assert around.fit(X, Y).predict(X).shape == (50,)
    assert clone(around).get_params()["fleetsearchcv__estimator__epochs"] == 4


def test_regressors_and_what_wraps_them(steps: list[int]) -> None:
    targets = X @ np.array([1.0, -2.0, 0.5, 3.0]) + 5
    model = tm.sklearn.FleetRegressor(line, epochs=3)
    wrapped = TransformedTargetRegressor(model, transformer=StandardScaler())
    grid = {"regressor__lr": [0.001, 0.01]}
    options: dict[str, Any] = {"cv": 3, "scoring": "neg_mean_squared_error"}
    found = tm.sklearn.FleetSearchCV(wrapped, grid, **options).fit(X, targets)
    assert steps == [6, 1]
    same_results(found, GridSearchCV(wrapped, grid, **options).fit(X, targets))
    two = clone(model).fit(X, np.stack([targets, -targets], 1))
    assert two.predict(X).shape == (50, 2)
    assert clone(model).fit(X, targets).predict(X).shape == (50,)


def test_a_candidate_that_cannot_be_trained_fails_alone() -> None:
    grid = {"lr": [0.05, 1e308], "hidden": [6, -1]}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = tm.sklearn.FleetSearchCV(classifier(), grid, cv=FOLDS).fit(X, Y)
    told = {item.category: str(item.message) for item in said}
    assert "9 fits failed out of a total of 12" in told[FitFailedWarning]
    assert "3 of 6 members stopped training" in told[tm.TrainmuxWarning]
    assert np.isfinite(found.cv_results_["mean_test_score"]).sum() == 1
    assert found.best_params_ == {"lr": 0.05, "hidden": 6}
    with (
        pytest.warns(tm.TrainmuxWarning),
        pytest.raises(tm.FleetError, match="expected training to stay finite"),
    ):
        tm.sklearn.FleetSearchCV(classifier(), {"lr": [1e308]}, cv=2, error_score="raise").fit(X, Y)


def test_a_fold_without_one_of_the_classes(steps: list[int]) -> None:
    order = np.argsort(Y, kind="stable")
    grid = {"lr": [0.02, 0.1]}
    search = tm.sklearn.FleetSearchCV(classifier(), grid, cv=KFold(3), refit=False)
    found = search.fit(X[order], Y[order])
    assert steps == [6]
    assert np.isfinite(found.cv_results_["mean_test_score"]).all()


def test_what_is_refused() -> None:
    with pytest.raises(
        tm.ConfigError, match="settings of the estimator or of make, got 'depth'; make takes lr"
    ):
        classifier(depth=3)
    with pytest.raises(tm.ConfigError, match="make: expected a function"):
        tm.sklearn.FleetClassifier(3, depth=1)
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        tm.sklearn.FleetSearchCV(classifier(), {"depth": [1]}, cv=2, error_score="raise").fit(X, Y)
    with pytest.raises(tm.ConfigError, match="or a pipeline that ends in one, got PCA"):
        tm.sklearn.FleetSearchCV(PCA(), {"n_components": [1]}, cv=2).fit(X, Y)
    with pytest.raises(AttributeError, match="no attribute 'Fleet'"):
        tm.sklearn.Fleet  # noqa: B018
