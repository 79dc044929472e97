"""Tools of torch that read values or compile: fused members train as with them in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_cases import EXAMPLE, TOLERANCE, mlp, mse
from torch import Tensor, distributions, nn

import trainmux as tm

Loss = Callable[[nn.Module, Any], Tensor]


def assert_trains_like_torch(
    models: list[nn.Module], loss: Loss, batches: list[Any], plain_loss: Loss | None = None
) -> None:
    """A step for each batch, of a fleet and of plain torch on equal models."""
    plain = [copy.deepcopy(model) for model in models]
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    fleet = tm.Fleet(members, loss, batches[0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    for batch in batches:
        losses = fleet.step(batch)
        for position, (model, optimizer) in enumerate(zip(plain, optimizers, strict=True)):
            optimizer.zero_grad()
            expected = (plain_loss or loss)(model, batch)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(losses[position], expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    fleet.sync()
    for model, other in zip(models, plain, strict=True):
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def normal(model: nn.Module, batch: Any) -> Tensor:
    mean = model(batch[0])
    fitted = -distributions.Normal(mean, 1.3, validate_args=True).log_prob(batch[1]).mean()
    return fitted + distributions.kl_divergence(distributions.Normal(mean, mean.exp()), PRIOR).mean()


PRIOR = distributions.Normal(0.0, 1.0)


def categorical(model: nn.Module, batch: Any) -> Tensor:
    found = distributions.Categorical(logits=model(batch[0]))
    return -found.log_prob((batch[1][:, 0] > 0).long()).mean() - found.entropy().mean()


@pytest.mark.parametrize("loss", [normal, categorical])
def test_distributions_check_their_arguments_but_not_while_tracing(loss: Loss) -> None:
    assert_trains_like_torch([mlp(0), mlp(1)], loss, [EXAMPLE, EXAMPLE])
    with pytest.raises(ValueError, match="scale"):
        distributions.Normal(0.0, -1.0)


def test_a_compiled_function_in_a_loss_is_traced_as_it_was_written() -> None:
    compiled = torch.compile(F.mse_loss, backend="eager")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return compiled(model(batch[0]), batch[1])  # type: ignore[no-any-return]

    assert_trains_like_torch([mlp(0), mlp(1)], loss, [EXAMPLE, EXAMPLE], plain_loss=mse)


def test_compiled_models_train_as_what_they_were_made_of() -> None:
    models = [mlp(0), mlp(1)]
    plain = copy.deepcopy(models)
    compiled: list[Any] = [torch.compile(model, backend="eager") for model in models]
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in compiled]
    fleet = tm.Fleet(members, mse, EXAMPLE)
    for model, found in zip(plain, fleet.step(EXAMPLE), strict=True):
        torch.testing.assert_close(found, mse(model, EXAMPLE).detach(), rtol=TOLERANCE, atol=TOLERANCE)
    assert len(fleet.summary()) == 1


def test_anomalies_may_be_looked_for() -> None:
    with pytest.warns(UserWarning, match="Anomaly"):
        looking = torch.autograd.detect_anomaly()
    with looking:
        assert_trains_like_torch([mlp(0), mlp(1)], mse, [EXAMPLE, EXAMPLE])
        assert torch.is_anomaly_enabled()
