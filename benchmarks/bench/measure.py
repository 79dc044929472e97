"""One way, measured: built, warmed up, timed, and checked to have trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import nn

from .batches import make_batches
from .cases import find_case
from .job import BenchError, Job, Measurement, Memory
from .timing import summarize, time_blocks
from .turns import wait_for_turn
from .ways._base import Prepared, Setup, learning_rates

Prepare = Callable[[Setup], Prepared]


def measure_steps(
    prepare: Prepare, job: Job, num_models: int | None = None, builds_in_turn: bool = False
) -> Measurement:
    """Train ``num_models`` models (otherwise the job's width) in the way that ``prepare`` makes, and time it.

    Where the job takes turns, its own comes between the first step and the timing; with ``builds_in_turn``
    already before the device is used for anything but batches. Raises ``BenchError`` where a loss is not
    finite or the first member's does not change.
    """
    start = perf_counter()
    device = torch.device(job.device)
    torch.backends.cudnn.benchmark = True  # every shape is fixed, so that the search pays for each way
    free_bytes = free_memory(device)
    setup, batches = make_setup(job, num_models or job.width, device)
    num_parameters = count_parameters(setup.models[0])

    waits_before = job.takes_turns and builds_in_turn
    waiting = perf_counter()
    if waits_before:
        wait_for_turn(job.folder)
    begin = perf_counter()
    prepared = prepare(setup)
    first_losses = tuple(prepared.step(batches[0]).tolist())
    end = perf_counter()
    if job.takes_turns and not waits_before:
        wait_for_turn(job.folder)
    blocks = time_blocks(prepared.step, batches, device, job.num_blocks, job.block_seconds)
    last_losses = tuple(prepared.step(batches[0]).tolist())
    check_losses(first_losses, last_losses)
    return Measurement(
        num_parameters=num_parameters,
        timing=summarize(
            blocks,
            prepared.num_members,
            build_s=end - begin,
            start_to_first_step_s=end - start - (begin - waiting),
        ),
        memory=memory_since(free_bytes, device),
        first_losses=first_losses,
        last_losses=last_losses,
        notes=prepared.notes,
    )


def make_setup(job: Job, num_models: int, device: torch.device, first: int = 0) -> tuple[Setup, list[object]]:
    """``num_models`` models in host memory, from number ``first`` on, and the batches to train on."""
    torch.manual_seed(first)  # for draws such as dropout's; weights and batches have seeds of their own
    case = find_case(job.workload)
    batches = make_batches(case.batch, job.batch_size, device)
    rates = learning_rates(job.width)
    setup = Setup(
        models=case.models(num_models, first),
        learning_rates=[rates[index % job.width] for index in range(first, first + num_models)],
        loss=case.loss,
        example=batches[0],
        device=device,
        fleet=job.fleet,
    )
    return setup, batches


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_losses(first: Sequence[float], last: Sequence[float]) -> None:
    """Refuses losses that are not numbers, and a first member that seems not to have trained."""
    if not all(math.isfinite(loss) for loss in (*first, *last)):
        raise BenchError(f"a loss is not finite: first {list(first)}, last {list(last)}")
    if first[0] == last[0]:
        raise BenchError(
            f"the first member's loss on the same batch is {first[0]} before and after: it did not train"
        )


def free_memory(device: torch.device) -> int:
    """Free bytes of the whole device; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free_bytes: int = torch.cuda.mem_get_info(device)[0]
    return free_bytes


def memory_since(free_bytes: int, device: torch.device) -> Memory | None:
    """This process's peaks, and what is less free than ``free_bytes``; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    return Memory(
        max_reserved_bytes=torch.cuda.max_memory_reserved(device),
        max_allocated_bytes=torch.cuda.max_memory_allocated(device),
        device_delta_bytes=free_bytes - free_memory(device),
    )
