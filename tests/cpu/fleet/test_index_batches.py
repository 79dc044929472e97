"""Members on rows of their own of one data set: as if each had trained on its rows alone."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import bn_mlp, train_alone
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

FLOAT = torch.float64
GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(30, 3, generator=GENERATOR, dtype=FLOAT)
TARGETS = INPUTS.sum(1, keepdim=True).tanh()
DATA = TensorDataset(INPUTS, TARGETS)
VIEWS = [range(20), torch.arange(12, 30), [1, 2, 2, 3, 5, 5, 5, 29, 0, 9], torch.arange(30) < 20]
"""20 rows, 18, 10 with repetitions, and the first ones again, as a mask."""


def mse(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    error = model(batch[0]) - batch[1]
    return error.square().mean(), {"mae": error.abs().mean()}


def member(number: int, dropout: float = 0.0) -> tm.Member:
    model = bn_mlp(number, hidden=5, dropout=dropout, outputs=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (number + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    return tm.Member(model, optimizer, name=f"m{number}", scheduler=scheduler, seed=number)


def fleet_of(members: list[tm.Member], loader: tm.IndexBatches) -> tm.Fleet:
    return tm.Fleet(members, mse, next(iter(loader)), data="per_member")


def alone(number: int, batches: list[Tensor]) -> tuple[tm.Member, list[float]]:
    """The member and its losses in plain torch, given the rows of each batch."""
    found = member(number)
    return found, train_alone(found, [DATA[rows] for rows in batches], mse)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)


def test_members_train_on_their_own_rows_as_alone() -> None:
    """Views of several lengths, so that some steps are for some members only; history and schedules too."""
    loader = tm.IndexBatches(DATA, VIEWS, batch_size=8, seeds=[4, 5, 6, 7])
    fleet = fleet_of([member(i) for i in range(4)], loader)
    assert fleet.groups == (fleet.names,)
    history = fleet.fit(loader, epochs=3, progress=False)
    for i in range(4):
        batches = [rows for epoch in range(3) for rows in loader.order(i, epoch).split(8)]
        expected, losses = alone(i, batches)
        assert_same(expected.model, fleet.members[i].model)
        assert fleet.num_updates(f"m{i}") == len(batches)
        assert fleet.members[i].optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]
        last = losses[-len(batches) // 3 :]
        assert history[f"m{i}"][-1].loss == pytest.approx(sum(last) / len(last), rel=1e-9)


def test_each_pass_is_in_an_order_of_its_own_that_repeats() -> None:
    loader = tm.IndexBatches(DATA, VIEWS, batch_size=8, seeds=1)
    assert sorted(loader.order(1, 0).tolist()) == list(range(12, 30))
    assert loader.order(1, 0).tolist() != loader.order(1, 1).tolist()
    assert torch.equal(loader.order(0, 2), loader.order(3, 2))  # the same rows and the same seed
    plain = tm.IndexBatches(DATA, VIEWS, batch_size=8, shuffle=False)
    assert plain.order(1, 5).tolist() == list(range(12, 30))
    assert len(list(plain)) == len(plain) == 4  # 8, 8, and the ends: 4, 2, 2 of 20, 18 and 10
    short = tm.IndexBatches(DATA, VIEWS, batch_size=8, drop_last=True)
    assert len(list(short)) == len(short) == 2


def test_evaluation_counts_each_members_rows_once() -> None:
    loader = tm.IndexBatches(DATA, VIEWS, batch_size=8, shuffle=False)
    members = [member(i) for i in range(4)]
    got = fleet_of(members, loader).evaluate(loader)
    for i, one in enumerate(members):
        model = copy.deepcopy(one.model).eval()
        with torch.no_grad():
            loss, metrics = mse(model, DATA[loader.order(i, 0)])
        assert got[f"m{i}"]["loss"] == pytest.approx(loss.item(), rel=1e-10)
        assert got[f"m{i}"]["mae"] == pytest.approx(metrics["mae"].item(), rel=1e-10)


def test_those_who_take_no_part_stay_as_they_are() -> None:
    members = [member(i, dropout=0.5) for i in range(2)]
    batch = (INPUTS[:16].reshape(2, 8, 3), TARGETS[:16].reshape(2, 8, 1))
    fleet = tm.Fleet(members, mse, batch, data="per_member")
    single = tm.Fleet([member(1, dropout=0.5)], mse, (batch[0][1:], batch[1][1:]), data="per_member")
    before = copy.deepcopy(members[0].model)
    bad = batch[0].clone()
    bad[0] = torch.nan  # nobody learns from it
    losses = fleet.step(tm.PartialBatch((bad, batch[1]), (1,)))
    assert math.isnan(losses[0])
    assert losses[1:].tolist() == pytest.approx(single.step((batch[0][1:], batch[1][1:])).tolist(), rel=1e-12)
    fleet.sync()
    assert fleet.stopped() == {}
    assert_same(before, members[0].model)
    assert fleet.step(batch)[1].item() == pytest.approx(
        single.step((batch[0][1:], batch[1][1:])).item(), rel=1e-12
    )


def test_one_that_stops_being_finite_does_so_alone() -> None:
    data = TensorDataset(INPUTS.clone(), TARGETS)
    data.tensors[0][4] = torch.nan
    loader = tm.IndexBatches(data, [range(20), range(12, 30)], batch_size=8, shuffle=False)
    fleet = fleet_of([member(0), member(1)], loader)
    with pytest.warns(tm.TrainmuxWarning, match="1 of 2 members stopped training: 'm0'"):
        history = fleet.fit(loader, epochs=2, progress=False)
    assert list(fleet.stopped()) == ["m0"]
    expected, losses = alone(1, [rows for epoch in range(2) for rows in loader.order(1, epoch).split(8)])
    assert_same(expected.model, fleet.members[1].model)
    assert history["m1"][-1].loss == pytest.approx(sum(losses[3:]) / 3, rel=1e-9)


def test_a_fit_goes_on_in_the_same_order(tmp_path: Path) -> None:
    class Kill(tm.Callback):
        def on_step_end(self, state: Any) -> None:
            if state.step == 13:
                raise KeyboardInterrupt

    def run(checkpoint: Path, *callbacks: tm.Callback) -> tm.Fleet:
        loader = tm.IndexBatches(DATA, VIEWS, batch_size=8, seeds=9)
        fleet = fleet_of([member(i) for i in range(4)], loader)
        fleet.fit(loader, epochs=4, checkpoint=checkpoint, callbacks=callbacks, progress=False)
        return fleet

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", Kill())
    for one, other in zip(run(tmp_path / "a").members, run(tmp_path / "b").members, strict=True):
        assert_same(one.model, other.model)


def test_data_sets_come_in_many_forms() -> None:
    class Samples:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"x": INPUTS[number], "label": number % 2}

    (batch,) = tm.IndexBatches(Samples(), [[3, 4]], shuffle=False)
    assert torch.equal(batch["x"], INPUTS[[3, 4]][None])
    assert batch["label"].tolist() == [[1, 0]]
    (batch,) = tm.IndexBatches({"x": INPUTS.numpy()}, [[3, 4]], shuffle=False)
    assert torch.equal(batch["x"], INPUTS[[3, 4]][None])
    samples = [(INPUTS[number], number) for number in range(30)]
    (batch,) = tm.IndexBatches(samples, [[3, 4]], shuffle=False)
    assert torch.equal(batch[0], INPUTS[[3, 4]][None])
    assert batch[1].tolist() == [[3, 4]]
    (batch,) = tm.IndexBatches(INPUTS, [[3, 4]], shuffle=False)
    assert torch.equal(batch, INPUTS[[3, 4]][None])


@pytest.mark.parametrize(
    ("dataset", "views", "options", "message"),
    [
        (DATA, [], {}, "expected one for each member, got none"),
        (DATA, [[0], []], {}, "view 1: expected at least one row, got none"),
        (DATA, [[30]], {}, "view 0: expected rows from 0 to 29, got 30 to 30"),
        (DATA, [[-1]], {}, "expected rows from 0 to 29, got -1"),
        (DATA, [[0.5]], {}, "expected a list of row numbers, or a mask over 30 rows, got torch.float64"),
        (DATA, [torch.ones(29, dtype=torch.bool)], {}, "or a mask over 30 rows, got torch.bool"),
        (DATA, [["a"]], {}, "view 0: expected row numbers"),
        ((INPUTS, TARGETS[:4]), [[0]], {}, "parts with one row per sample, got"),
        (iter([1]), [[0]], {}, "or a data set with len"),
        (INPUTS[:0], [[0]], {}, "expected at least one row, got none"),
        (DATA, [[0]], {"drop_last": True}, "expected a view of at least batch_size=32 rows"),
        (DATA, [[0]], {"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
        (DATA, [[0], [1]], {"seeds": [1]}, "expected one for each of 2 views, got 1"),
    ],
)
def test_what_is_refused(dataset: Any, views: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((tm.BatchError, tm.ConfigError), match=message):
        tm.IndexBatches(dataset, views, **options)


def test_partial_batches_need_a_fleet_that_can_leave_members_out() -> None:
    batch = (INPUTS[:16].reshape(2, 8, 3), TARGETS[:16].reshape(2, 8, 1))
    part = tm.PartialBatch(batch, (1,))
    accumulating = tm.Fleet([member(0), member(1)], mse, batch, data="per_member", accumulate=2)
    with pytest.raises(tm.ConfigError, match=r"accumulate=1 for a PartialBatch, .* got accumulate=2"):
        accumulating.step(part)
    assert accumulating.num_steps == 0
    shared = tm.Fleet([member(0)], mse, (INPUTS[:8], TARGETS[:8]))
    with pytest.raises(
        tm.ConfigError, match="expected data='per_member' for a PartialBatch, got data='shared'"
    ):
        shared.step(tm.PartialBatch((INPUTS[:8], TARGETS[:8]), (0,)))
    fleet = tm.Fleet([member(0), member(1)], mse, batch, data="per_member")
    with pytest.raises(tm.BatchError, match="for some of 2 members, got positions \\(2,\\)"):
        fleet.step(tm.PartialBatch(batch, (2,)))
    with pytest.raises(
        tm.BatchError, match="expected at least one batch to evaluate each member on, got none for m0"
    ):
        fleet.evaluate([part])


def test_progress_shows_the_last_loss_of_those_who_took_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    loader = tm.IndexBatches(DATA, VIEWS, batch_size=8)
    fleet = fleet_of([member(i) for i in range(4)], loader)
    fleet.fit(loader, epochs=1, progress="plain", log_every=1)
    shown = capsys.readouterr()
    assert "loss" in shown.out + shown.err
    assert "nan" not in shown.out + shown.err
