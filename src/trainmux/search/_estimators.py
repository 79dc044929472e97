"""A member as an estimator of scikit-learn's, and the training of many of them as one fleet."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from trainmux.errors import ConfigError, FleetError, TrainmuxError
from trainmux.fleet import Fleet, IndexBatches, Member, first_batch
from trainmux.search._seeds import seeded_member

Array = npt.NDArray[Any]

_ROWS_AT_ONCE = 4096
"""Rows that are predicted together."""
_SIZES = ("num_features", "num_classes", "num_outputs")
"""Parameters of ``make`` that the data decide."""
_OF_FLEETS = ("epochs", "batch_size", "shuffle", "device", "precision")
"""Settings in which estimators that train in one fleet are alike."""


class _FleetEstimator(BaseEstimator):  # type: ignore[misc]
    """The common base of classifiers and regressors."""

    def __init__(
        self,
        make: Callable[..., Member],
        *,
        loss: Callable[..., Any] | None = None,
        epochs: int = 10,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        device: str = "cpu",
        precision: str = "fp32",
        **settings: Any,
    ) -> None:
        self.make = make
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.device = device
        self.precision = precision
        unknown = sorted(set(settings) - set(_settings_of(make)))
        if unknown:
            raise ConfigError(
                f"expected settings of the estimator or of make, got {unknown[0]!r}; make takes "
                f"{', '.join(_settings_of(make)) or 'none'}"
            )
        for name, value in settings.items():
            setattr(self, name, value)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The estimator's settings, and those of ``make`` that have a default or were given."""
        found: dict[str, Any] = super().get_params(deep)
        for name, parameter in _settings_of(self.make).items():
            if name not in found and (name in vars(self) or parameter.default is not parameter.empty):
                found[name] = getattr(self, name, parameter.default)
        return found

    def fit(self, X: Any, y: Any) -> _FleetEstimator:  # noqa: N803
        """Train; within a `FleetSearchCV`, together with the others."""
        data = self._read(X, y)
        meeting = MEETING.get()
        if meeting is not None and meeting.is_open:
            meeting.enter(self, data)
            return self
        found = meeting.trained(self, data) if meeting is not None else None
        if found is None:
            found = Fit(self, data)
            train([found])
        if found.failure is not None:
            raise found.failure
        assert found.member is not None
        self.model_: nn.Module = found.member.model.eval()
        self.history_ = found.history
        return self

    def fit_of(self, X: Any, y: Any, rows: Array) -> Fit:  # noqa: N803
        """Training on some rows of data, which are not copied where nothing in them depends on the rows."""
        data = self._read(X, y)
        part = self._read(data.given[0][rows], data.given[1][rows])
        if part.num_outputs == data.num_outputs and np.array_equal(part.y, data.y[rows]):
            return Fit(self, data, torch.as_tensor(rows), part.key)
        return Fit(self, part)

    def made(self, data: Data) -> Member:
        """Make the member; named ones of its parameters get sizes of the data."""
        known = {
            **self.get_params(deep=False),
            **dict(zip(_SIZES, (data.X.shape[1], data.num_outputs, data.num_outputs), strict=True)),
        }
        wanted = {name: known[name] for name in _parameters_of(self.make) if name in known}
        member = seeded_member(lambda: self.make(**wanted), self.seed)
        member.loss = self.loss or member.loss or self._loss
        return member

    def _outputs(self, X: Any) -> Tensor:  # noqa: N803
        """The outputs of the trained model for rows, on the host."""
        check_is_fitted(self, "model_")
        checked = validate_data(self, X, reset=False, allow_nd=True)
        parameter = next(self.model_.parameters())
        inputs = torch.as_tensor(checked, dtype=_floating(self.model_))
        with torch.no_grad():
            parts = [self.model_(part.to(parameter.device)) for part in inputs.split(_ROWS_AT_ONCE)]
        return torch.cat(parts).cpu()

    def _read(self, X: Any, y: Any) -> Data:  # noqa: N803
        raise NotImplementedError

    _loss: Callable[..., Any]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of classifiers: of outputs that are one score for each class."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of regressors: the mean squared error."""
    return nn.functional.mse_loss(model(batch[0]).reshape(batch[1].shape), batch[1])


class FleetClassifier(ClassifierMixin, _FleetEstimator):  # type: ignore[misc]
    """A classifier that trains a member: ``FleetClassifier(make, epochs=20, lr=0.01)``.

    ``make(**settings)`` returns a `Member`. Its settings are settings of the estimator, which a search may
    try: those with a default, and those given here. It gets ``num_features`` and ``num_classes`` if it has
    parameters of that name. The model takes rows of ``X``, as floating numbers of its own type, and returns
    one score for each class; ``loss(model, (X, y))`` is the cross-entropy unless another is given here or by
    the member.

    After ``fit``: ``model_``, ``history_``, ``classes_``. Training that stops being finite raises
    ``FleetError``.
    """

    _loss = staticmethod(cross_entropy)

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """The softmax of the model's scores."""
        found: Array = self._outputs(X).softmax(-1).numpy()
        return found

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The class with the highest score."""
        best = self._outputs(X).argmax(-1).numpy()
        found: Array = self.classes_[best]
        return found

    def _read(self, X: Any, y: Any) -> Data:  # noqa: N803
        X, y = validate_data(self, X, y, allow_nd=True)  # noqa: N806
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        return Data((X, y), X, numbers, len(self.classes_))


class FleetRegressor(RegressorMixin, _FleetEstimator):  # type: ignore[misc]
    """A regressor that trains a member: ``FleetRegressor(make, epochs=20, lr=0.01)``.

    As `FleetClassifier`, but ``make`` gets ``num_outputs``, and the loss is the mean squared error.
    """

    _loss = staticmethod(squared_error)

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The outputs of the model, in the shape of the targets that it was trained on."""
        found = self._outputs(X)
        return np.asarray(found.reshape(len(found), *self._target_shape))

    def _read(self, X: Any, y: Any) -> Data:  # noqa: N803
        X, y = validate_data(self, X, y, allow_nd=True, multi_output=True, y_numeric=True)  # noqa: N806
        self._target_shape = y.shape[1:]
        return Data((X, y), X, y.astype(np.float64), y.shape[1] if y.ndim > 1 else 1)


@dataclass(eq=False)
class Data:
    """Rows as they were given, and as they are trained on."""

    given: tuple[Array, Array]
    X: Array
    y: Array
    num_outputs: int
    _key: bytes = b""

    @property
    def key(self) -> bytes:
        """Equal for the same rows."""
        if not self._key:
            digest = hashlib.sha256()
            for array in self.given:
                digest.update(f"{array.shape}{array.dtype}".encode())
                is_object = array.dtype == object
                digest.update(
                    repr(array.tolist()).encode() if is_object else np.ascontiguousarray(array).data
                )
            self._key = digest.digest()
        return self._key


@dataclass(eq=False)
class Fit:
    """One estimator's training on rows of its data (all of them without ``rows``), and what came of it."""

    estimator: _FleetEstimator
    data: Data
    rows: Tensor | None = None
    rows_key: bytes = b""
    member: Member | None = None
    history: tuple[Any, ...] = ()
    failure: Exception | None = None

    @property
    def key(self) -> bytes:
        """Equal for training on the same rows."""
        return self.rows_key or self.data.key


class Meeting:
    """Estimators that train together: fits are noted while it ``is_open``, and find their results after."""

    def __init__(self) -> None:
        self.is_open = True
        self.fits: list[Fit] = []
        self._data: dict[tuple[bytes, int], Data] = {}

    def enter(self, estimator: _FleetEstimator, data: Data) -> None:
        """Note what is to be trained; the same rows are kept once."""
        self.fits.append(Fit(estimator, self._data.setdefault((data.key, data.num_outputs), data)))

    def train(self) -> None:
        """Train all that was noted."""
        self.is_open = False
        train(self.fits)

    def trained(self, estimator: _FleetEstimator, data: Data) -> Fit | None:
        """The result of the same training, or ``None`` if it was not noted."""
        params = estimator.get_params(deep=False)
        for fit in self.fits:
            alike = type(fit.estimator) is type(estimator) and fit.key == data.key
            if alike and _same(fit.estimator.get_params(deep=False), params):
                return fit
        return None


MEETING: ContextVar[Meeting | None] = ContextVar("MEETING", default=None)
"""The one that fits of this context take part in."""


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return a is b or (type(a) is type(b) and not isinstance(a, np.ndarray) and bool(a == b))

    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def train(fits: Sequence[Fit]) -> None:
    """Train estimators that are alike in how they train as one fleet; each fit has then what came of it."""
    fleets: dict[Any, list[Fit]] = {}
    for fit in fits:
        try:
            fit.member = fit.estimator.made(fit.data)
        except Exception as error:
            fit.failure = error
            continue
        settings = tuple(getattr(fit.estimator, name) for name in _OF_FLEETS)
        kind = (settings, _floating(fit.member.model), fit.data.X.shape[1:], fit.data.y.shape[1:])
        fleets.setdefault(kind, []).append(fit)
    for together in fleets.values():
        try:
            _train_alike(together)
        except TrainmuxError as error:
            if len(together) == 1:
                together[0].failure = error
            else:
                _train_apart(together)


def _train_apart(fits: Sequence[Fit]) -> None:
    """Do fits one after another, as one of them cannot be trained."""
    for fit in fits:
        try:
            fit.member = fit.estimator.made(fit.data)
            _train_alike([fit])
        except TrainmuxError as error:
            fit.failure = error


def _train_alike(fits: Sequence[Fit]) -> None:
    """Train members as one fleet, by the settings that their estimators have in common."""
    own, members = fits[0].estimator, [fit.member for fit in fits if fit.member is not None]
    dtype = _floating(members[0].model)
    distinct = {fit.data.key: fit.data for fit in fits}
    begins: dict[bytes, int] = {}
    num_rows = 0
    for key, data in distinct.items():
        begins[key] = num_rows
        num_rows += len(data.X)
    inputs = torch.cat([torch.as_tensor(data.X, dtype=dtype) for data in distinct.values()])
    targets = torch.cat([_targets(data.y, dtype) for data in distinct.values()])
    views = [
        begins[fit.data.key] + (torch.arange(len(fit.data.X)) if fit.rows is None else fit.rows)
        for fit in fits
    ]
    loader = IndexBatches(
        (inputs, targets),
        views,
        batch_size=own.batch_size,
        shuffle=own.shuffle,
        seeds=[fit.estimator.seed for fit in fits],
        device=own.device,
    )
    for number, member in enumerate(members):
        member.name = f"fit-{number}"
    device, precision = own.device, own.precision
    fleet = Fleet(members, None, first_batch(loader), data="per_member", device=device, precision=precision)
    history = fleet.fit(loader, epochs=own.epochs, progress=False)
    stopped = fleet.stopped()
    for name, fit in zip(fleet.names, fits, strict=True):
        fit.history = tuple(history.get(name, ()))
        if name in stopped:
            fit.failure = FleetError(
                f"expected training to stay finite, got a member that is {stopped[name]}; take a smaller "
                "learning rate, or clip_norm"
            )


def _parameters_of(make: Callable[..., Member]) -> dict[str, inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        found = inspect.signature(make).parameters
    except TypeError:
        raise ConfigError(
            f"make: expected a function that returns a trainmux.Member, got {type(make).__name__}"
        ) from None
    return {name: parameter for name, parameter in found.items() if parameter.kind in named}


def _settings_of(make: Callable[..., Member]) -> dict[str, inspect.Parameter]:
    """Parameters of ``make`` that are not sizes of the data."""
    return {name: item for name, item in _parameters_of(make).items() if name not in _SIZES}


def _targets(y: Array, dtype: torch.dtype) -> Tensor:
    found = torch.as_tensor(y)
    return found.to(dtype) if found.is_floating_point() else found


def _floating(model: nn.Module) -> torch.dtype:
    return next((item.dtype for item in model.parameters() if item.is_floating_point()), torch.float32)
