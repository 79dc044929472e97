"""Jobs that cannot be traced run eagerly on a GPU beside others, in memory that is counted and bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from colocation_cases import cycled, smallest_budget
from held_memory import USUAL, MemoryWatch
from settled import settle
from torch import Tensor, nn
from wide_jobs import (
    BATCH_SIZE,
    MIB,
    REGION,
    WIDTH,
    assert_wide_as_alone,
    cuda,
    mean_square,
    run_beside,
    wide_batches,
    wide_job,
    wide_model,
)

import trainmux as tm
from trainmux.colocate import _eager
from trainmux.errors import BudgetError, TrainmuxWarning
from trainmux.runtime import MATRIX_LIBRARIES_BYTES

pytestmark = [
    pytest.mark.usefixtures("without_workspaces"),
    pytest.mark.filterwarnings("ignore:job 'eager' cannot be traced"),
]

NUM_LAYERS = 6
SEED = 3


def untraceable(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What it computes depends on a number in a tensor, and on random numbers of the device."""
    assert batch.is_cuda
    loss = mean_square(model, batch)
    noise = torch.rand((), device=batch.device)
    if float(loss.detach()) > 0:
        loss = loss * (1 + noise)
    return loss, {"noise": noise}


def make(seed: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wide_model(seed, NUM_LAYERS).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained_plainly(seed: int, batches: list[Tensor], steps: int) -> tuple[Tensor, nn.Module]:
    """By an ordinary loop, with the random numbers of `SEED`."""
    model, optimizer = make(seed, "cuda")
    torch.manual_seed(SEED)  # now: whoever makes a model has set the device's, too
    losses = []
    for batch in cycled(batches, steps):
        optimizer.zero_grad()
        loss, _ = untraceable(model, batch.cuda())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses), model


def eager_job(seed: int, steps: int, *, place: str = "cpu", **options: Any) -> tm.Job:
    model, optimizer = make(seed, place)
    given: dict[str, Any] = {"loader": wide_batches(seed), "device": "cuda", **options}
    return tm.Job("eager", model, optimizer, untraceable, steps=steps, **given)


def assert_same_weights(job: tm.Job, expected: nn.Module, place: str) -> None:
    assert job.model is not None
    for found, other in zip(job.model.parameters(), expected.parameters(), strict=True):
        assert found.device.type == place
        assert found.grad is None
        assert torch.equal(found.cpu(), other.cpu())
    assert job.optimizer is not None
    buffers = [entry["momentum_buffer"] for entry in job.optimizer.state.values()]
    assert len(buffers) == 2 * NUM_LAYERS
    assert {buffer.device.type for buffer in buffers} == {place}


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_an_eager_job_and_its_neighbour_are_as_alone(place: str) -> None:
    losses, model = trained_plainly(0, wide_batches(0), 6)
    job, other = eager_job(0, 6, place=place), wide_job("b", 1, 6)
    torch.manual_seed(SEED)
    with pytest.warns(TrainmuxWarning, match="'eager' cannot be traced and runs eagerly"):
        colocation = tm.colocate([job, other], "20GiB", region_bytes=REGION, poisons=True)
    before = torch.cuda.get_rng_state()
    result = colocation.run()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert [repr(row.error) for row in result.jobs.values() if row.error] == []
    assert result["eager"].is_eager
    assert torch.equal(result["eager"].losses[:, 0], losses)
    assert_same_weights(job, model, place)
    assert_wide_as_alone(result, other)


@pytest.mark.alone
def test_the_device_never_holds_more_than_the_budget() -> None:
    trained_plainly(0, wide_batches(0), 2)  # kernels of an eager step
    watch = MemoryWatch()
    colocation = tm.colocate(
        [eager_job(0, 12), wide_job("b", 1, 12)],
        "20GiB",
        tracking_bytes=4 * MIB,
        region_bytes=REGION,
        callbacks=[lambda event: watch.look(event.colocation)],
    )
    budget = smallest_budget(colocation)
    colocation.set_budget(budget)
    result = colocation.run()
    assert result.failed == ()
    assert max(watch.held) <= budget, watch.report()
    pools = [held.get("pool_bytes of eager", 0) for held in watch.seen]
    feature_maps = NUM_LAYERS * BATCH_SIZE * WIDTH * 4
    assert max(pools) >= feature_maps, watch.report()
    usual = [held.get(USUAL, 0) for held in watch.seen]
    # Its backward pass took nothing elsewhere.
    assert max(usual) <= 4 * MATRIX_LIBRARIES_BYTES, watch.report()


def test_a_step_beyond_what_was_seen_ends_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_eager, "_EXTRA_BYTES", 4 * MIB)
    batches = [*wide_batches(0)[:2], torch.cat([*wide_batches(0)] * 4)]
    losses, model = trained_plainly(0, batches, 2)
    job, other = eager_job(0, 9, loader=batches), wide_job("b", 1, 8)
    torch.manual_seed(SEED)
    result = tm.colocate([job, other], "20GiB", region_bytes=REGION, poisons=True).run()
    assert result.failed == ("eager",)
    assert isinstance(result["eager"].error, BudgetError)
    assert torch.equal(result["eager"].losses[:, 0], losses)
    assert_same_weights(job, model, "cpu")
    assert_wide_as_alone(result, other)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


@pytest.mark.alone
def test_memory_is_given_back_when_an_eager_job_goes() -> None:
    watch = MemoryWatch()
    for _ in range(3):
        run_beside([eager_job(0, 3)])
        settle()
        watch.look()
    assert watch.held[-1] <= watch.held[1] + 2 * MIB, watch.report(-1, since=1)


def test_a_rehearsal_keeps_to_the_budget() -> None:
    settle()
    torch.cuda.reset_peak_memory_stats(cuda())
    reserved = torch.cuda.memory_reserved(cuda())
    with pytest.raises(BudgetError, match="expected a step of it to fit"):
        tm.colocate([eager_job(0, 3)], 96 * MIB, region_bytes=REGION)
    assert torch.cuda.max_memory_reserved(cuda()) - reserved <= 96 * MIB
