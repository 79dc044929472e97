"""`tm.cross_validate`: each fold trains on its rows as it would alone, and is scored on those held out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet_cases import train_alone
from sklearn.model_selection import GroupKFold, RepeatedKFold, StratifiedKFold
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

FLOAT = torch.float64
GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(22, 3, generator=GENERATOR, dtype=FLOAT)
LABELS = (INPUTS.sum(1) > 0.4).long()
DATA = TensorDataset(INPUTS, LABELS)
SIZE = 6


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    scores = model(batch[0])
    wrong = (scores.argmax(1) != batch[1]).to(FLOAT).mean()
    return {"loss": nn.functional.cross_entropy(scores, batch[1]), "wrong": wrong}


def make(hidden: int = 4, lr: float = 0.05) -> tm.Member:
    model = nn.Sequential(
        nn.Linear(3, hidden, bias=False), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 2)
    )
    model = model.to(FLOAT)
    return tm.Member(model, torch.optim.Adam(model.parameters(), lr=lr))


def alone(fold: tm.FoldResult, epochs: int, lr: float = 0.05) -> nn.Module:
    """The fold in plain torch: its rows in the documented order, the last batch short."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold.seed)
        member = make(lr=lr)
    order = tm.IndexBatches(DATA, [fold.train_rows], seeds=fold.seed)
    rows = (rows for epoch in range(epochs) for rows in order.order(0, epoch).split(SIZE))
    train_alone(member, [DATA[each] for each in rows], cross_entropy)
    return member.model.eval()


def run(given: Any = make, **options: Any) -> tm.CrossValidation:
    defaults = {"loss": cross_entropy, "metric_fn": metrics, "batch_size": SIZE, "progress": False}
    return tm.cross_validate(given, DATA, **{**defaults, **options})


def assert_as_alone(found: tm.CrossValidation, epochs: int, lr: float = 0.05) -> None:
    for fold in found:
        expected = alone(fold, epochs, lr)
        for name, value in expected.state_dict().items():
            got = fold.member.model.state_dict()[name]
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            scores = {key: value.item() for key, value in metrics(expected, DATA[fold.test_rows]).items()}
        assert dict(fold.scores) == pytest.approx(scores, rel=1e-10)


def test_every_fold_trains_and_is_scored_as_alone() -> None:
    """Uneven folds, several seeds; out-of-fold predictions are those of the fold that held a row out."""
    found = run(cv=4, seeds=2, epochs=2, predict=lambda model, batch: model(batch[0]))
    assert [(fold.seed, fold.fold) for fold in found] == [(s, f) for s in range(2) for f in range(4)]
    assert sorted(len(fold.test_rows) for fold in found[:4]) == [5, 5, 6, 6]
    held_out = torch.cat([fold.test_rows for fold in found[:4]])
    assert sorted(held_out.tolist()) == list(range(22))
    assert all(not set(fold.train_rows.tolist()) & set(fold.test_rows.tolist()) for fold in found)
    assert_as_alone(found, epochs=2)
    assert [record.epoch for record in found[0].records] == [1, 2]
    assert found[0].records[-1].metrics["val_loss"] == pytest.approx(found[0].scores["loss"], rel=1e-12)
    expected = torch.zeros(22, 2, dtype=FLOAT)
    for fold in found:
        with torch.no_grad():
            expected[fold.test_rows] += fold.member.model.eval()(INPUTS[fold.test_rows]) / 2
    torch.testing.assert_close(found.predictions[""], expected, rtol=1e-12, atol=1e-14)
    wrong = [fold.scores["wrong"] for fold in found]
    assert found.scores("wrong") == tuple(wrong)
    assert (found.mean("wrong"), found.std("wrong")) == (np.mean(wrong), np.std(wrong))
    assert found.to_rows()[5] == {
        "candidate": "",
        "seed": 1,
        "fold": 1,
        "train_rows": 16,
        "test_rows": 6,
        **found[5].scores,
        "error": None,
    }
    assert "loss" in repr(found)


def test_candidates_train_in_one_fleet_and_the_best_is_named() -> None:
    candidates = {"slow": lambda: make(lr=1e-4), "quick": lambda: make(lr=0.05)}
    found = run(candidates, cv=2, epochs=4)
    assert found.candidates == ("slow", "quick")
    assert [fold.member.name for fold in found[2:]] == ["quick/seed=0/fold=0", "quick/seed=0/fold=1"]
    assert found.best("loss") == min(found.candidates, key=lambda name: found.mean("loss", name)) == "quick"
    assert_as_alone(tm.CrossValidation(found[2:]), epochs=4)
    assert_as_alone(tm.CrossValidation(found[:2]), epochs=4, lr=1e-4)
    mean = tm.ensemble(found[2:])(INPUTS)
    with torch.no_grad():
        alone = [fold.member.model.eval()(INPUTS) for fold in found[2:]]
    torch.testing.assert_close(mean, torch.stack(alone).mean(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("cv", "options"),
    [
        (StratifiedKFold(2), {}),
        (GroupKFold(2), {"groups": np.arange(22) % 5}),
        (RepeatedKFold(n_splits=2, n_repeats=1, random_state=0), {}),
        (tm.Bootstrap(2, seed=1), {}),
        ([(range(10), range(10, 22)), (range(6, 22), torch.arange(22) < 6)], {}),
    ],
)
def test_splits_are_those_of_the_splitter(cv: Any, options: dict[str, Any]) -> None:
    found = run(cv=cv, drop_last=True, predict=lambda model, batch: model(batch[0])[:, 1], **options)
    pairs = cv
    if not isinstance(cv, list):
        pairs = list(cv.split(INPUTS, LABELS, options.get("groups")))
    assert len(found) == len(pairs)
    for fold, (train, test) in zip(found, pairs, strict=True):
        rows = np.arange(22)
        assert fold.train_rows.tolist() == rows[np.asarray(train)].tolist()
        assert fold.test_rows.tolist() == rows[np.asarray(test)].tolist()
    held_out = {row for fold in found for row in fold.test_rows.tolist()}
    assert found.predictions[""].isnan().tolist() == [row not in held_out for row in range(22)]


def test_bags_are_drawn_with_replacement() -> None:
    bags = list(tm.Bootstrap(3, seed=2).split(range(40)))
    for bag, held_out in bags:
        assert len(bag) == 40
        assert len(set(bag)) < 40
        assert set(bag) | set(held_out) == set(range(40))
        assert not set(bag) & set(held_out)
    again = list(tm.Bootstrap(3, seed=2).split(range(40)))
    assert all((one[0] == other[0]).all() for one, other in zip(bags, again, strict=True))
    assert (bags[0][0] != bags[1][0]).any()


def test_a_fold_that_is_not_finite_fails_alone() -> None:
    inputs = INPUTS.clone()
    inputs[3] = torch.nan
    with pytest.warns(tm.TrainmuxWarning, match="members stopped training"):
        found = tm.cross_validate(
            make, (inputs, LABELS), cv=[(range(8), range(8, 12)), (range(8, 18), range(18, 22))],
            loss=cross_entropy, metric_fn=metrics, batch_size=4, epochs=2, progress=False,
        )  # fmt: skip
    assert [fold.error is None for fold in found] == [False, True]
    assert "not finite" in str(found[0].error)
    assert math.isnan(found[0].scores["loss"])
    assert math.isfinite(found[1].scores["loss"])
    assert math.isnan(found.mean("loss"))
    with pytest.raises(tm.ConfigError, match="candidate with 'loss' for all its folds, got NaN"):
        found.best("loss")


def test_early_stopping_looks_at_each_folds_own_rows() -> None:
    found = run(lambda: make(lr=0.5), cv=3, epochs=12, callbacks=[tm.EarlyStopping("val_loss", patience=1)])
    for fold in found:
        losses = [record.metrics["val_loss"] for record in fold.records]
        worse = [i for i in range(1, len(losses)) if losses[i] >= min(losses[:i])]
        assert worse == ([len(losses) - 1] if len(losses) < 12 else worse[:1])
        assert fold.error is None
        assert fold.scores["loss"] == pytest.approx(losses[-1], rel=1e-12)


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    class Kill(tm.Callback):
        def on_epoch_end(self, state: Any) -> None:
            if state.epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(cv=3, epochs=3, checkpoint=tmp_path, callbacks=[Kill()])
    assert_as_alone(run(cv=3, epochs=3, checkpoint=tmp_path), epochs=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cv": 1}, "cv: expected from 2 to 22 folds of 22 rows, got 1"),
        ({"cv": 23}, "cv: expected from 2 to 22 folds of 22 rows, got 23"),
        ({"cv": True}, "cv: expected from 2 to 22 folds"),
        ({"cv": 2.5}, "cv: expected a number of folds, an object with split"),
        ({"cv": []}, "cv: expected at least one fold, got none"),
        ({"cv": [range(3)]}, "or pairs of rows to train on and rows held out, got list"),
        (
            {"cv": [([0, 1], []), ([0], [1])]},
            "fold 0: expected rows to train on and rows held out, got 2 and 0",
        ),
        ({"cv": [([0, 99], [1])]}, "fold 0, training: expected rows from 0 to 21, got 0 to 99"),
        ({"seeds": 0}, "seeds: expected a whole number of at least 1, got 0"),
        ({"epochs": 0}, "epochs: expected a whole number of at least 1, got 0"),
        ({"accumulate": 2}, "arguments of a search or of Fleet, got 'accumulate'"),
        ({"given": {}}, "make: expected at least one candidate, got none"),
        ({"given": lambda: "no member"}, "to return a trainmux.Member, got str"),
        ({"given": [make]}, "make: expected a function that returns a Member, .* got list"),
        ({"given": {"a": 3}}, "make: expected a function .* got int for 'a'"),
        ({"device": "gpu"}, "device: expected 'cpu' or 'cuda.:index.', got 'gpu'"),
        ({"loss": None}, "expected a callable loss"),
        ({"predict": lambda model, batch: model(batch[0]).argmax(1)}, "predict: expected a floating tensor"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tm.TrainmuxError, match=message):
        run(**{"cv": 2, **options})


def test_results_refuse_names_they_do_not_have() -> None:
    found = run({"a": make, "b": make}, cv=2, drop_last=True)
    with pytest.raises(tm.ConfigError, match=r"metric: expected one of \['loss', 'wrong'\], got 'auc'"):
        found.mean("auc", "a")
    with pytest.raises(tm.ConfigError, match=r"candidate: expected one of \['a', 'b'\], got None"):
        found.mean("loss")
    with pytest.raises(tm.ConfigError, match="mode must be"):
        found.best("loss", "up")  # type: ignore[arg-type]
