"""Jobs that cannot be traced, on a CUDA device of paper: a pool of their own, counted, with a hard bound."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from colocation_cases import (
    assert_as_alone,
    cycled,
    model_job,
    mse,
    smallest_budget,
    tiny_batches,
    tiny_job,
    tiny_model,
    tiny_optimizer,
)
from paper_cuda import PAGE, PaperAllocator, SystemDriver, install
from torch import Tensor, nn

import trainmux as tm
from trainmux.colocate import _eager
from trainmux.colocate._eager import EagerStep, _copy_others, _move, _moved
from trainmux.errors import BudgetError, ConfigError, TrainmuxWarning
from trainmux.runtime import MATRIX_LIBRARIES_BYTES

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's shared memory files"),
    pytest.mark.filterwarnings("ignore:job 'eager' cannot be traced"),
]

Loss = Callable[[nn.Module, Any], Any]


@pytest.fixture(autouse=True)
def paper(monkeypatch: pytest.MonkeyPatch) -> tuple[SystemDriver, PaperAllocator]:
    return install(monkeypatch)


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may have what its rehearsal took, and room for some results that are not told yet."""
    monkeypatch.setattr(_eager, "_EXTRA_BYTES", 64)
    monkeypatch.setattr(_eager, "_EXTRA_SHARE", 1 << 40)


def untraceable(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What it computes depends on a number in a tensor."""
    loss = mse(model, batch)
    noise = torch.rand(())
    if float(loss.detach()) > 0:
        loss = loss * (1 + noise)
    return loss, {"noise": noise}


def trained_plainly(seed: int, steps: int, loss_fn: Loss) -> tuple[Tensor, nn.Module]:
    """A tiny model trained by an ordinary loop, from the random state that there is now."""
    model = tiny_model(seed)
    optimizer, losses = tiny_optimizer(model), []
    for batch in cycled(tiny_batches(seed), steps):
        optimizer.zero_grad()
        loss, _ = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), model


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def eager_job(seed: int = 0, steps: int | None = 5, loss: Loss = untraceable, **options: Any) -> tm.Job:
    return model_job("eager", seed, steps=steps, loss=loss, **options)


def test_an_eager_job_and_its_neighbour_are_as_alone(paper: tuple[SystemDriver, PaperAllocator]) -> None:
    driver, allocator = paper
    torch.manual_seed(3)
    losses, model = trained_plainly(0, 5, untraceable)
    torch.manual_seed(3)
    job, other = eager_job(), tiny_job("b", 1, steps=5)
    with pytest.warns(TrainmuxWarning, match="'eager' cannot be traced and runs eagerly"):
        colocation = tm.colocate([job, other], "1GiB", poisons=True)
    assert allocator.reserved_bytes == 0  # nothing is left of the rehearsal
    before = torch.get_rng_state()
    result = colocation.run()
    assert torch.equal(torch.get_rng_state(), before)
    assert result["eager"].is_eager
    assert [repr(row.error) for row in result.jobs.values() if row.error] == []
    assert torch.equal(result["eager"].losses[:, 0], losses)
    assert set(result["eager"].metrics) == {"noise"}
    assert job.model is not None
    assert_same_weights(job.model, model)
    assert_as_alone(result, other, 1, 5)
    gc.collect()
    assert allocator.reserved_bytes == driver.held_bytes == 0
    assert allocator.fraction == 1.0


def test_what_an_eager_job_takes_counts(
    paper: tuple[SystemDriver, PaperAllocator], without_extra: None
) -> None:
    _, allocator = paper
    seen: list[tuple[int, int]] = []

    def look(event: tm.JobStep) -> None:
        job = event.colocation.results()["eager"]
        seen.append((allocator.reserved_bytes, job.local_bytes - MATRIX_LIBRARIES_BYTES - PAGE))

    colocation = tm.colocate([eager_job(callbacks=[look]), tiny_job("b", 1, steps=2)], "1GiB")
    rows = colocation.results()
    assert rows["eager"].peak_bytes == 0  # it has no part of the arena
    budget = smallest_budget(colocation)
    colocation.set_budget(budget)
    result = colocation.run()
    assert result.failed == ()
    assert len(seen) == 5
    assert all(0 < taken <= promised for taken, promised in seen)
    model = tiny_model(0)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    hidden = 8 * 16 * 4
    assert seen[-1][0] >= 2 * weights + hidden  # gradients, momenta and feature maps; weights were there
    assert result.peak_bytes <= budget


def test_a_step_beyond_what_was_seen_ends_its_job_alone(
    paper: tuple[SystemDriver, PaperAllocator], without_extra: None
) -> None:
    _, allocator = paper
    larger = tiny_batches(0, num_batches=1, size=512)
    torch.manual_seed(3)
    losses, model = trained_plainly(0, 2, untraceable)
    torch.manual_seed(3)
    job = eager_job(steps=9, loader=tiny_batches(0)[:2] + larger)
    others = [tiny_job("b", 1, steps=6), tiny_job("c", 2, steps=4)]
    result = tm.colocate([job, *others], "1GiB", poisons=True).run()
    assert result.failed == ("eager",)
    assert isinstance(result["eager"].error, BudgetError)
    assert "largest batch come first" in str(result["eager"].error)
    assert torch.equal(result["eager"].losses[:, 0], losses)
    assert job.model is not None
    assert_same_weights(job.model, model)
    assert_as_alone(result, others[0], 1, 6)
    assert_as_alone(result, others[1], 2, 4)
    gc.collect()
    assert allocator.reserved_bytes == 0
    assert allocator.fraction == 1.0


def test_a_loss_that_raises_later_ends_its_job_alone(paper: tuple[SystemDriver, PaperAllocator]) -> None:
    _, allocator = paper
    calls = []

    def breaking(model: nn.Module, batch: Any) -> Any:
        calls.append(None)
        if len(calls) > 6:
            raise ZeroDivisionError("in the loss")
        return untraceable(model, batch)

    job, other = eager_job(steps=20, loss=breaking), tiny_job("b", 1, steps=6)
    result = tm.colocate([job, other], "1GiB", poisons=True).run()
    assert result.failed == ("eager",)
    assert isinstance(result["eager"].error, ZeroDivisionError)
    assert result["eager"].num_steps > 0
    assert_as_alone(result, other, 1, 6)
    gc.collect()
    assert allocator.reserved_bytes == 0


def test_a_loss_that_raises_at_once_leaves_nothing_behind(
    paper: tuple[SystemDriver, PaperAllocator],
) -> None:
    def breaking(model: nn.Module, batch: Any) -> Any:
        loss, _ = untraceable(model, batch)
        loss.backward()
        raise ZeroDivisionError("in the loss")

    _, allocator = paper
    other = tiny_job("b", 1, steps=3)
    result = tm.colocate([eager_job(loss=breaking), other], "1GiB").run()
    assert isinstance(result["eager"].error, ZeroDivisionError)
    assert_as_alone(result, other, 1, 3)
    gc.collect()
    assert allocator.reserved_bytes == 0


def test_a_rehearsal_keeps_to_the_budget() -> None:
    with pytest.raises(BudgetError, match="'eager' cannot be traced: expected a step of it to fit"):
        tm.colocate([eager_job()], 512)


def test_a_rehearsal_beside_others_keeps_to_what_they_leave() -> None:
    """The job would fit if its neighbour made room, but nobody knows that before it was seen."""
    refused: list[BudgetError] = []

    def come(event: tm.JobStep) -> None:
        if event.step == 2:
            with pytest.raises(BudgetError) as error:
                event.colocation.add(eager_job())
            refused.append(error.value)

    other = tiny_job("b", 1, steps=4, callbacks=[come])
    colocation = tm.colocate([other], "1GiB")
    colocation.set_budget(smallest_budget(colocation))
    result = colocation.run()
    assert len(refused) == 1
    assert "hand it over before the others run" in str(refused[0])
    assert tuple(result.jobs) == ("b",)
    assert_as_alone(result, other, 1, 4)


def test_an_eager_job_comes_while_others_run(paper: tuple[SystemDriver, PaperAllocator]) -> None:
    _, allocator = paper
    torch.manual_seed(3)
    losses, model = trained_plainly(0, 3, untraceable)
    job = eager_job(steps=3)

    def come(event: tm.JobStep) -> None:
        if event.step == 2:
            torch.manual_seed(3)
            event.colocation.add(job)

    other = tiny_job("b", 1, steps=6, callbacks=[come])
    result = tm.colocate([other], "1GiB", poisons=True).run()
    assert result.failed == ()
    assert torch.equal(result["eager"].losses[:, 0], losses)
    assert job.model is not None
    assert_same_weights(job.model, model)
    assert_as_alone(result, other, 1, 6)
    gc.collect()
    assert allocator.reserved_bytes == 0


def test_a_job_that_asks_for_more_gets_a_larger_bound() -> None:
    with pytest.warns(TrainmuxWarning):
        colocation = tm.colocate([eager_job()], "1GiB")
    work = colocation._jobs["eager"]._works[0]
    assert work is not None
    before = work.need
    work.ask_for_more()
    assert work.need.local_bytes > before.local_bytes
    assert work.need.peak_bytes == 0


def test_other_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be traced"):
        tm.colocate([eager_job(precision="fp64")], "1GiB")


# ---- tensors that move ----------------------------------------------------------------------------------

META = torch.device("meta")


def test_state_moves_and_counts_stay_unless_they_are_wanted() -> None:
    step = EagerStep(model := tiny_model(0), torch.optim.Adam(model.parameters()), mse)
    step.run(tiny_batches(0)[0])
    before = [tensor.data_ptr() for tensor in step.tensors()]
    _move(step, torch.device("cpu"))
    assert [tensor.data_ptr() for tensor in step.tensors()] == before
    for entry in step.optimizer.state.values():
        state = {**entry, "history": [entry["exp_avg"]], "calls": 3}
        moved = _moved(state, META, moves_numbers=False)
        assert moved["exp_avg"].device == moved["history"][0].device == META
        assert moved["step"] is entry["step"]
        assert moved["calls"] == 3
        assert _moved(state, META, moves_numbers=True)["step"].device == META


def test_what_was_made_meanwhile_gets_storage_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(META)
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(4, 4, device=META), "steps": torch.ones(())}
    before = optimizer.state[weight]["momentum_buffer"]
    count = optimizer.state[weight]["steps"]
    buffer = model[1].running_mean
    _copy_others(EagerStep(model, optimizer, mse), frozenset())
    assert model[0].weight is weight
    assert optimizer.state[weight]["momentum_buffer"] is not before
    assert optimizer.state[weight]["steps"] is count
    assert model[1].running_mean is not buffer
