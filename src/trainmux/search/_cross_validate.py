"""``tm.cross_validate``: all folds of all candidates in one fleet."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from trainmux.errors import ConfigError, MemberError
from trainmux.fleet import (
    STOPPED_ON_REQUEST,
    Callback,
    EpochRecord,
    Fleet,
    IndexBatches,
    Member,
    Mode,
    check_mode,
    first_batch,
    whole_data,
)
from trainmux.search._results import as_table
from trainmux.search._search import check_fleet_arguments
from trainmux.search._seeds import seed_numbers, seeded_member
from trainmux.search._splits import RowSplit, splits_of

if TYPE_CHECKING:
    import pandas

Make = Callable[[], Member]


def cross_validate(
    make: Make | Mapping[str, Make],
    dataset: Any,
    *,
    cv: Any = 5,
    y: Any = None,
    groups: Any = None,
    seeds: int | Sequence[int] = 1,
    loss: Callable[..., Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    predict: Callable[[nn.Module, Any], Tensor] | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    shuffle: bool = True,
    drop_last: bool = False,
    callbacks: Iterable[Callback] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: str | bool = "auto",
    budget: int | str | None = None,
    **fleet: Any,
) -> CrossValidation:
    """Train every fold as a member of one fleet, and return how each does on the rows held out of it.

    ``make`` takes nothing and returns a `Member`, or maps names to functions that do: candidates, all of
    which train at once. They are called once for each fold and seed, with torch's random numbers seeded;
    ``seeds`` has the seeds, or says how many, from 0. A seed decides what a member begins with, what it
    draws, and, with ``shuffle``, the order of its rows. Members are named by candidate, seed and fold.

    ``dataset`` lies on the device once, and is as for `IndexBatches`, as are ``batch_size`` and
    ``drop_last``. ``cv`` is a number of folds (of rows shuffled by 0), a splitter of scikit-learn's or
    `Bootstrap`, or pairs of rows to train on and rows held out. Splitters are given ``y`` and ``groups``;
    ``y`` is by default the last part of a data set of several, where it has one number per row.

    After each of the ``epochs`` every fold is evaluated on its own held-out rows with ``metric_fn`` (default:
    the loss), as with ``fit``: ``callbacks`` (`EarlyStopping`) and schedules may look at them.
    ``predict(model, batch)`` returns one row for each of the batch: with it, each candidate's predictions for
    rows held out are collected. A fold that stops being finite has NaN for scores, and the others go on.

    With a ``budget`` the fleet trains by a plan within it. ``checkpoint``, ``resume`` and ``progress`` are as
    for ``fit``. Further arguments (``device``, ``precision``, ``deterministic``, …) are those of `Fleet`.
    """
    check_fleet_arguments(fleet, refused=("accumulate",))
    data = whole_data(dataset)
    num_rows = data.tensors[0].shape[0]
    if y is None and len(data.tensors) > 1 and data.tensors[-1].dim() == 1:
        y = data.tensors[-1].cpu().numpy()
    numbers = seed_numbers("seeds", seeds)
    splits = splits_of(cv, num_rows, y, groups, 0)
    given = make if isinstance(make, Mapping) else {"": make}
    for name, one in given.items():
        if not callable(one):
            raise ConfigError(
                f"make: expected a function that returns a Member, or a dict of names to functions, got "
                f"{type(one).__name__}{f' for {name!r}' if name else ''}"
            )
    if not given:
        raise ConfigError(
            "make: expected at least one candidate, got none; pass a function or a dict of them"
        )
    folds = [
        _Fold(candidate, seed, number, _member(one, candidate, seed, number), split)
        for candidate, one in given.items()
        for seed in numbers
        for number, split in enumerate(splits)
    ]
    device = fleet.get("device", "cpu")
    train = IndexBatches(
        dataset,
        [fold.split.train for fold in folds],
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        seeds=[fold.seed for fold in folds],
        device=device,
    )
    held_out = [fold.split.test for fold in folds]
    test = IndexBatches(train.dataset, held_out, batch_size=batch_size, shuffle=False, device=device)
    whole = Fleet([fold.member for fold in folds], loss, first_batch(train), data="per_member", **fleet)
    if budget is not None:
        whole.plan(budget)
    history = whole.fit(
        train,
        epochs=epochs,
        validation=test,
        metric_fn=metric_fn,
        callbacks=callbacks,
        checkpoint=checkpoint,
        resume=resume,
        progress=progress,
    )
    scores, stopped = whole.evaluate(test, metric_fn), whole.stopped()
    results = [
        fold.result(scores[name], tuple(history.get(name, ())), stopped.get(name, STOPPED_ON_REQUEST))
        for name, fold in zip(whole.names, folds, strict=True)
    ]
    if predict is None:
        return CrossValidation(results)
    return CrossValidation(results, _predictions(folds, test, predict, batch_size))


@dataclass(frozen=True)
class FoldResult:
    """One fold of a candidate under one seed.

    It trained on ``train_rows``. ``scores`` are the metrics of its ``test_rows`` at the end: NaN where it
    stopped being finite, which ``error`` tells. ``records`` has its epochs, ``member`` its weights.
    """

    candidate: str
    seed: int
    fold: int
    member: Member = field(repr=False)
    train_rows: Tensor = field(repr=False)
    test_rows: Tensor = field(repr=False)
    scores: Mapping[str, float]
    records: tuple[EpochRecord, ...] = field(repr=False)
    error: str | None = None


class CrossValidation(Sequence[FoldResult]):
    """Folds of a cross-validation, candidate by candidate, seed by seed.

    ``predictions`` has what ``predict`` returned, by candidate, in the order of the data set's rows: for rows
    that are held out more than once the mean, for rows that never are NaN. Empty without ``predict``.
    """

    def __init__(self, folds: Sequence[FoldResult], predictions: Mapping[str, Tensor] | None = None) -> None:
        self._folds = tuple(folds)
        self.predictions: Mapping[str, Tensor] = dict(predictions or {})

    @overload
    def __getitem__(self, index: int) -> FoldResult: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[FoldResult, ...]: ...

    def __getitem__(self, index: int | slice) -> FoldResult | tuple[FoldResult, ...]:
        return self._folds[index]

    def __len__(self) -> int:
        return len(self._folds)

    def __repr__(self) -> str:
        lines = []
        for name in self.candidates:
            told = [f"{key} {self.mean(key, name):.4g} ± {self.std(key, name):.2g}" for key in self.metrics]
            lines.append(f"{name or 'all'}: {', '.join(told)}")
        return f"CrossValidation({len(self)} folds; {'; '.join(lines)})"

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the candidates; ``""`` where there was one without a name."""
        return tuple(dict.fromkeys(fold.candidate for fold in self))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that folds were evaluated with."""
        return tuple(dict.fromkeys(key for fold in self for key in fold.scores))

    def scores(self, metric: str = "loss", candidate: str | None = None) -> tuple[float, ...]:
        """The metric of each fold of a candidate, seed by seed; refuses an unknown metric or candidate."""
        if (candidate is None and len(self.candidates) > 1) or candidate not in (None, *self.candidates):
            raise ConfigError(f"candidate: expected one of {list(self.candidates)}, got {candidate!r}")
        if metric not in self.metrics:
            raise ConfigError(f"metric: expected one of {list(self.metrics)}, got {metric!r}")
        mine = (fold for fold in self if candidate in (None, fold.candidate))
        return tuple(fold.scores.get(metric, math.nan) for fold in mine)

    def mean(self, metric: str = "loss", candidate: str | None = None) -> float:
        """The mean of ``scores``; NaN where one is."""
        return float(np.mean(self.scores(metric, candidate)))

    def std(self, metric: str = "loss", candidate: str | None = None) -> float:
        """The standard deviation of ``scores``: the root of the mean squared distance from their mean."""
        return float(np.std(self.scores(metric, candidate)))

    def best(self, metric: str = "loss", mode: Mode = "min") -> str:
        """The candidate with the best mean; one with a NaN among its scores never is."""
        check_mode(mode)
        sign = 1.0 if mode == "min" else -1.0
        means = {candidate: sign * self.mean(metric, candidate) for candidate in self.candidates}
        known = {candidate: value for candidate, value in means.items() if not math.isnan(value)}
        if not known:
            raise ConfigError(
                f"expected a candidate with {metric!r} for all its folds, got NaN in each; see fold.error"
            )
        return min(known, key=known.__getitem__)

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dict per fold: candidate, seed, fold, numbers of rows, the scores, error."""
        return [
            {
                "candidate": fold.candidate,
                "seed": fold.seed,
                "fold": fold.fold,
                "train_rows": len(fold.train_rows),
                "test_rows": len(fold.test_rows),
                **fold.scores,
                "error": fold.error,
            }
            for fold in self
        ]

    def table(self) -> pandas.DataFrame:
        """``to_rows`` as a table; needs pandas."""
        return as_table(self.to_rows())


@dataclass(frozen=True)
class _Fold:
    """A fold that is to be trained."""

    candidate: str
    seed: int
    fold: int
    member: Member
    split: RowSplit

    def result(self, scores: Mapping[str, float], records: tuple[EpochRecord, ...], why: str) -> FoldResult:
        """The fold as it has ended; ``why`` says why it trains no more."""
        error = None if why == STOPPED_ON_REQUEST else why
        if error is not None:
            scores = dict.fromkeys(scores, math.nan)
        rows = self.split.train, self.split.test
        return FoldResult(self.candidate, self.seed, self.fold, self.member, *rows, scores, records, error)


def _member(make: Make, candidate: str, seed: int, fold: int) -> Member:
    member = seeded_member(make, seed)
    if member.example_batch is not None:
        raise MemberError(
            f"candidate {candidate!r}: expected a member that takes its fold of the data set, got one with "
            "an example_batch of its own; leave it out"
        )
    member.name = "/".join((*((candidate,) if candidate else ()), f"seed={seed}", f"fold={fold}"))
    return member


def _predictions(
    folds: Sequence[_Fold], data: IndexBatches, predict: Callable[[nn.Module, Any], Tensor], batch_size: int
) -> dict[str, Tensor]:
    """Predictions for rows held out, by candidate."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for fold in folds:
        model = copy.deepcopy(fold.member.model).to(data.device).eval()
        for rows in fold.split.test.split(batch_size):
            with torch.no_grad():
                found = predict(model, data.rows(rows))
            _check_predictions(found, len(rows))
            if fold.candidate not in sums:
                sums[fold.candidate] = torch.zeros(data.num_rows, *found.shape[1:], dtype=found.dtype)
                counts[fold.candidate] = torch.zeros(data.num_rows, dtype=found.dtype)
            sums[fold.candidate].index_add_(0, rows, found.cpu())
            counts[fold.candidate].index_add_(0, rows, torch.ones(len(rows), dtype=found.dtype))
    return {name: total / counts[name].reshape(-1, *(1,) * (total.dim() - 1)) for name, total in sums.items()}


def _check_predictions(found: Any, num_rows: int) -> None:
    is_tensor = isinstance(found, Tensor)
    if not is_tensor or found.shape[:1] != (num_rows,) or not found.is_floating_point():
        got = f"{found.dtype} of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
        raise ConfigError(
            f"predict: expected a floating tensor with a row for each of {num_rows} samples, got {got}"
        )
