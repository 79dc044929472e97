"""LightningModules as members: they train as Lightning's Trainer trains them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainmux as tm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore::DeprecationWarning")

FLOAT = torch.float64
_GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(40, 3, generator=_GENERATOR, dtype=FLOAT)
TARGETS = INPUTS.sum(1, keepdim=True).tanh()


def batches(begin: int, end: int) -> Any:
    data = torch.utils.data.TensorDataset(INPUTS[begin:end], TARGETS[begin:end])
    return torch.utils.data.DataLoader(data, batch_size=8)


class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Logs in all ways, and has what ``optimizers`` makes of its parameters."""

    def __init__(self, seed: int, lr: float, optimizers: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizers"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(FLOAT)
        self.optimizers_of = optimizers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"doubled": 2 * loss, "one": 1.0})
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        error = self(batch[0]) - batch[1]
        self.log("val_loss", error.square().mean())
        self.log("mae", error.abs().mean())

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self.parameters(), self.hparams.lr)


def adam(parameters: Any, lr: float) -> Any:
    return torch.optim.Adam(parameters, lr=lr)


def stepwise(parameters: Any, lr: float) -> Any:
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def in_lists(parameters: Any, lr: float) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def plateau(parameters: Any, lr: float) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.9)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


def trained_by_lightning(module: Any, epochs: int, **options: Any) -> Any:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, batches(0, 28), batches(28, 40))
    return trainer


@pytest.mark.parametrize("optimizers", [adam, stepwise, in_lists, plateau])
def test_modules_train_as_lightning_trains_them(optimizers: Any) -> None:
    modules = [Net(seed, lr, optimizers) for seed, lr in ((0, 0.01), (1, 0.03))]
    expected = [copy.deepcopy(module) for module in modules]
    trainers = [trained_by_lightning(module, 3, gradient_clip_val=0.5) for module in expected]
    members = [tm.lightning.member(one, f"m{i}", clip_norm=0.5) for i, one in enumerate(modules)]
    fleet = tm.Fleet(members, example_batch=next(iter(batches(0, 28))))
    assert len(fleet.groups) == 1
    history = fleet.fit(
        batches(0, 28),
        epochs=3,
        validation=batches(28, 40),
        metric_fn=tm.lightning.validation,
        progress=False,
    )
    for i, (module, other, trainer) in enumerate(zip(modules, expected, trainers, strict=True)):
        for name, value in other.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-9, atol=1e-11)
        last = history[f"m{i}"][-1]
        logged = trainer.callback_metrics
        assert last.metrics["val_loss"] == pytest.approx(logged["val_loss"].item(), rel=1e-6)
        assert last.metrics["val_mae"] == pytest.approx(logged["mae"].item(), rel=1e-6)
        assert last.metrics["doubled"] == pytest.approx(2 * last.loss)
        assert last.metrics["one"] == 1.0
        assert members[i].optimizer.param_groups[0]["lr"] == pytest.approx(
            trainer.optimizers[0].param_groups[0]["lr"]
        )


def test_modules_are_cross_validated_and_swept() -> None:
    def make() -> tm.Member:
        return tm.lightning.member(Net(0, 0.05, adam))

    found = tm.cross_validate(
        make, (INPUTS, TARGETS), cv=2, metric_fn=tm.lightning.validation, epochs=2, progress=False
    )
    assert found.metrics == ("loss", "mae")
    results = tm.sweep(
        (tm.lightning.member(Net(0, lr, adam)) for lr in (0.001, 0.1)),
        loader=batches(0, 28),
        validation=batches(28, 40),
        metric_fn=tm.lightning.validation,
        max_epochs=2,
    )
    assert results.best.name == "trial-1"


class Two(Net):
    def configure_optimizers(self) -> Any:
        return [adam(self.parameters(), 0.1), adam(self.parameters(), 0.1)]


class Frequent(Net):
    def configure_optimizers(self) -> Any:
        found = stepwise(self.parameters(), 0.1)
        found["lr_scheduler"]["frequency"] = 2
        return found


class Nothing(Net):
    def configure_optimizers(self) -> Any:
        return None


class Manual(Net):
    def __init__(self) -> None:
        super().__init__(0, 0.1, adam)
        self.automatic_optimization = False


class Hooked(Net):
    def on_after_backward(self) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear(1, 1), tm.MemberError, "expected a LightningModule, got Linear"),
        (lambda: Two(0, 0.1, adam), tm.OptimizerError, "expected one optimizer .* got 2"),
        (lambda: Frequent(0, 0.1, adam), tm.OptimizerError, "leave frequency out"),
        (lambda: Nothing(0, 0.1, adam), tm.OptimizerError, "expected an optimizer .* got NoneType"),
        (Manual, tm.OptimizerError, "expected automatic optimization"),
        (lambda: Hooked(0, 0.1, adam), tm.MemberError, "in the middle of a step, got on_after_backward"),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tm.lightning.member(make())


def test_hooks_that_are_not_called_are_named() -> None:
    class Told(Net):
        def on_train_epoch_end(self) -> None:
            pass

    with pytest.warns(tm.TrainmuxWarning, match="Told: on_train_epoch_end are not called in a fleet"):
        tm.lightning.member(Told(0, 0.1, adam))


def test_code_that_needs_a_trainer_is_told_so() -> None:
    class Needy(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] * self.trainer.world_size

    with pytest.raises(tm.TraceError, match="Needy is not attached to a `Trainer`"):
        tm.Fleet([tm.lightning.member(Needy(0, 0.1, adam))], example_batch=next(iter(batches(0, 28))))
