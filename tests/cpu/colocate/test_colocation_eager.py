"""Jobs that cannot be traced run eagerly beside the others, and draw random numbers of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from colocation_cases import (
    assert_as_alone,
    cycled,
    model_job,
    mse,
    tiny_batches,
    tiny_job,
    tiny_model,
    tiny_optimizer,
)
from equivalence import train_alone
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import ConfigError, LossError, TrainmuxWarning


def untraceable(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What it computes depends on a number in a tensor."""
    loss = mse(model, batch)
    noise = torch.rand(())
    if float(loss.detach()) > 0:
        loss = loss * (1 + noise)
    return loss, {"noise": noise}


def test_an_eager_job_trains_as_it_would_alone() -> None:
    torch.manual_seed(3)
    model, batches = tiny_model(0), cycled(tiny_batches(0), 5)
    alone = train_alone(model, tiny_optimizer(model), untraceable, batches)
    torch.manual_seed(3)
    job, other = model_job("eager", 0, steps=5, loss=untraceable), tiny_job("b", 1, steps=5)
    with pytest.warns(TrainmuxWarning, match="'eager' cannot be traced and runs eagerly"):
        colocation = tm.colocate([job, other], "1GiB", poisons=True)
    before = torch.get_rng_state()
    result = colocation.run()
    assert torch.equal(torch.get_rng_state(), before)
    assert result["eager"].is_eager
    assert result["eager"].error is None
    losses = [alone.results[f"loss {number}"] for number in range(1, 6)]
    assert torch.equal(result["eager"].losses[:, 0], torch.stack(losses))
    assert set(result["eager"].metrics) == {"noise"}
    assert job.model is not None
    for found, expected in zip(job.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert_as_alone(result, other, 1, 5)
    assert result.peak_bytes <= result.budget_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_of_an_eager_job_are_of_the_precision_that_is_wanted(precision: str) -> None:
    def loss_of(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        is_half = model(batch[0]).dtype == torch.bfloat16
        return untraceable(model, batch)[0], {"is_half": torch.tensor(is_half)}

    with pytest.warns(TrainmuxWarning):
        colocation = tm.colocate([model_job("eager", 0, 1, loss=loss_of, precision=precision)], "1GiB")
    assert bool(colocation.run()["eager"].metrics["is_half"]) == (precision == "bf16")


def test_an_eager_job_needs_what_its_rehearsal_took() -> None:
    with pytest.warns(TrainmuxWarning):
        colocation = tm.colocate([model_job("eager", 0, steps=1, loss=untraceable)], "1GiB")
    job = colocation.results()["eager"]
    model = tiny_model(0)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    batch = sum(tensor.nbytes for tensor in tiny_batches(0)[0])
    hidden = 8 * 16 * 4
    # Weights, momenta, gradients and the hidden layer's values: all of it is its own.
    assert 3 * weights + batch <= job.local_bytes <= 5 * weights + 4 * batch + 8 * hidden
    assert job.peak_bytes == 0


def test_a_loss_that_raises_later_ends_its_job_alone() -> None:
    calls = []

    def breaking(model: nn.Module, batch: Any) -> Any:
        calls.append(None)
        if len(calls) > 6:
            raise ZeroDivisionError("in the loss")
        return untraceable(model, batch)

    job, other = model_job("eager", 0, steps=20, loss=breaking), tiny_job("b", 1, steps=6)
    with pytest.warns(TrainmuxWarning):
        colocation = tm.colocate([job, other], "1GiB", poisons=True)
    result = colocation.run()
    assert result.failed == ("eager",)
    assert isinstance(result["eager"].error, ZeroDivisionError)
    assert 0 < result["eager"].num_steps < 20
    assert_as_alone(result, other, 1, 6)


def rows(model: nn.Module, batch: Any) -> Tensor:
    """No scalar."""
    found: Tensor = model(batch[0])
    return found if float(found.detach().sum()) > 1e9 else found.squeeze(1)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"precision": "fp64"}, ConfigError), ({"accumulate": 2}, ConfigError), ({"loss": rows}, LossError)],
)
def test_eager_jobs_that_cannot_be_honoured_are_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        tm.colocate([model_job("eager", 0, **{"loss": untraceable, **options})], "1GiB")
