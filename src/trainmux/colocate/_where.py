"""What depends on where jobs run: the device that runs them, the size of regions, a budget in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._device import ColocationDevice
from trainmux.colocate._host_device import HostDevice
from trainmux.colocate._placement import PER_TENSOR, region_bytes_for
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.errors import BudgetError
from trainmux.runtime import device_name, look_at_host
from trainmux.sizes import parse_budget


def default_region_bytes(where: torch.device) -> int:
    """The size of regions before anything is known of the jobs: the smallest."""
    return granularity_bytes(where) if where.type == "cuda" else PER_TENSOR


def region_bytes_on(where: torch.device, peaks: Sequence[int]) -> int:
    """The size of regions for jobs that need so much of an arena each."""
    if where.type != "cuda":
        return PER_TENSOR
    return region_bytes_for(peaks, granularity_bytes(where))


def make_device(where: torch.device, region_bytes: int, *, poisons: bool) -> ColocationDevice:
    """Where jobs' segments run; without a CUDA device, in the host's memory."""
    if where.type == "cuda" and torch.cuda.is_available():
        return CudaDevice(where, region_bytes=region_bytes, poisons=poisons)
    return HostDevice(poisons=poisons)


def name_of(where: torch.device) -> str:
    """What times that were measured there are times of."""
    return f"{device_name(where)}, torch {torch.__version__}"


def budget_in_bytes(budget: int | str | None, where: torch.device) -> int:
    """``None`` is all that is free on a CUDA device, and on a CPU all that the host has."""
    if where.type == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(where)
        return free if budget is None else parse_budget(budget, device_bytes=total)
    facts = look_at_host()
    known = [size for size in (facts.memory_bytes, facts.limit_bytes) if size is not None]
    if not known:
        raise BudgetError(
            "expected to learn the host's memory from the system, got nothing; name the budget in bytes"
        )
    return min(known) if budget is None else parse_budget(budget, device_bytes=min(known))
