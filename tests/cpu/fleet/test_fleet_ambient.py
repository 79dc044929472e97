"""A fleet called inside autocast, anomaly mode, inference mode and the like: the same bits as outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from fleet_cases import (
    EXAMPLE,
    adam,
    assert_same_states,
    coded,
    mlp,
    mse,
    state_of,
    states_of,
    vectors,
)
from torch import Tensor

from trainmux import Fleet, Member


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Surroundings = tuple[Callable[[], AbstractContextManager[Any]], ...]

SURROUNDINGS: dict[str, tuple[Surroundings, bool]] = {
    # Contexts in which a fleet is used, and where it is made.
    "autocast and no_grad": ((lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad), True),
    "inference mode, anomaly mode and another device": (
        (torch.inference_mode, lambda: torch.autograd.set_detect_anomaly(True), lambda: torch.device("meta")),
        True,
    ),
    # For steps, and for a batch of another size, which is traced later, the dtype at the start holds.
    "another default dtype later": ((lambda: default_dtype(torch.float64),), False),
}


def shifted(model: Any, x: Tensor) -> Any:
    """Makes tensors as it goes: of the default device, and of the default dtype."""
    signs = (x[:, :2] > 0).long() * 0.1  # numbers that are not whole: of the default dtype
    return model.layer(x) * (1 + signs) + torch.ones(2) / 3


def member(i: int, dtype: torch.dtype = torch.float64) -> Member:
    return adam(coded(shifted, layer=mlp(i, dtype)), f"m{i}", 0.02 * (i + 1))


def switches() -> tuple[Any, ...]:
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    grad = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())
    return (*autocast, *grad, torch.get_default_dtype(), torch.get_default_device())


def trained(
    surroundings: Surroundings = (), made_inside: bool = True
) -> tuple[list[Tensor], Any, dict[str, Any]]:
    """In fp32, which autocast changes."""
    dtype = torch.float32
    members = [member(i, dtype) for i in range(3)]  # before: on the meta device a model has no values
    batches = [vectors(1, dtype=dtype), vectors(2, size=3, dtype=dtype)]
    with contextlib.ExitStack() as stack:
        fleet = None if made_inside else Fleet(members[:2], mse, batches[0])
        for context in surroundings:
            stack.enter_context(context())
        before = switches()
        fleet = fleet or Fleet(members[:2], mse, batches[0])
        losses = [fleet.step(batch) for batch in batches]
        fleet.add(members[2])
        losses.append(fleet.step(batches[0]))
        evaluated = fleet.evaluate(batches)
        losses.append(fleet.metrics["grad_norm"])
        fleet.sync()
        assert switches() == before
    return losses, evaluated, {str(each.name): state_of(each) for each in fleet.members}


@pytest.fixture(scope="module")
def outside() -> Any:
    return trained()


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_fleet_made_and_used_inside_gives_the_bits_of_one_outside(name: str, outside: Any) -> None:
    losses, evaluated, states = trained(*SURROUNDINGS[name])
    for got, expected in zip(losses, outside[0], strict=True):
        assert torch.equal(got, expected)
        assert not got.is_inference()
    assert evaluated == outside[1]
    assert_same_states(states, outside[2])


def test_a_loader_keeps_its_surroundings() -> None:
    """It is the user's code: only what the fleet does between two batches is shielded."""
    fleet = Fleet([member(0)], mse, EXAMPLE)
    seen = []

    def loader() -> Iterator[Any]:
        for seed in range(2):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
            yield vectors(seed)

    with torch.autocast("cpu", dtype=torch.bfloat16), default_dtype(torch.float64):
        fleet.evaluate(loader())
    assert seen == [(True, torch.float64)] * 2


def test_a_plan_made_and_used_inside_trains_as_one_outside() -> None:
    states = []
    for surroundings in ((), SURROUNDINGS["autocast and no_grad"][0]):
        batch = vectors(1, dtype=torch.float32)
        fleet = Fleet([member(i, torch.float32) for i in range(2)], mse, batch)
        with contextlib.ExitStack() as stack:
            for context in surroundings:
                stack.enter_context(context())
            fleet.use(fleet.plan(policy="none", device="a100-40gb"))
            fleet.step(batch)
            fleet.evaluate([batch])
            states.append(states_of(fleet))
    assert_same_states(states[1], states[0])
