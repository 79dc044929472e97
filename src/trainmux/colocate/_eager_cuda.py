"""A job that cannot be traced, on a CUDA device: plain torch on a stream of its own, in a pool of its own.

Nobody knows which of its tensors outlive an iteration, so none of them may lie where another job writes. All
that it takes comes from a memory pool that nobody else uses, and counts as the job's own all the time: it
shares the device's time with the others, not the arena. A rehearsal, two steps of a copy, shows how much that
is; the allocator is held to it from then on.

Its Python runs in the dispatcher's thread. Where it waits for the device (``item()``, ``if tensor``), no
segment of another job is enqueued until it goes on; what is enqueued runs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._device import MemoryNeed
from trainmux.colocate._eager_work import train_eagerly
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.colocate._work import StepOutcome, forget_locals
from trainmux.engine import Memory
from trainmux.errors import BudgetError
from trainmux.runtime import (
    MATRIX_LIBRARIES_BYTES,
    borrow_stream,
    borrowed_stream,
    deterministic_algorithms,
    limited_growth,
    pool_bytes,
    return_stream,
    warm_matrix_libraries,
)
from trainmux.sizes import exact_bytes
from trainmux.tracing import LossFunction, flatten_batch

_NUM_REHEARSED = 2
"""Steps of a rehearsal: the first makes the optimizer's state, the second is as those that follow."""

_EXTRA_BYTES = 32 << 20
_EXTRA_SHARE = 16
"""Beside what was seen, and one part in so many of it: blocks may be split in another way later on."""

BesideOthers = Callable[[], AbstractContextManager[int]]
"""Inside nobody lays out memory or begins an iteration; gives the bytes that the budget leaves."""


class EagerCudaWork:
    """Plain training of one model on ``device``, wherever its tensors lie before; they are back there after.

    What a rehearsal raises is raised here. Refused with `BudgetError`: a step that needs more memory than
    ``beside_others`` leaves. ``scheduler`` is stepped after every update. Random numbers are the caller's
    business, as in `EagerWork`.
    """

    is_eager = True
    step_seconds = ()

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        example: Any,
        *,
        device: torch.device,
        scheduler: Any = None,
        deterministic: bool = False,
        autocast: torch.dtype | None = None,
        region_bytes: int,
        beside_others: BesideOthers,
    ) -> None:
        self.member_names = (name,)
        self._model, self._optimizer, self._loss, self._scheduler = model, optimizer, loss, scheduler
        self._device, self._deterministic, self._autocast = device, deterministic, autocast
        self._region_bytes = region_bytes
        self._home = next((parameter.device for parameter in model.parameters()), device)
        self._batch: Any = None
        self._outcome: StepOutcome | None = None
        self._pool: torch.cuda.MemPool | None = None
        self._stream: torch.cuda.Stream | None = None
        self._taken_bytes = 0
        """What the pool has reserved."""
        self._own: dict[int, int] = {}
        """The user's storages that lie on the device outside of the pool: sizes by address."""
        with beside_others() as spare_bytes:
            seen_bytes, self._seconds = self._rehearse(example, spare_bytes)
        self._most_bytes = seen_bytes + seen_bytes // _EXTRA_SHARE + _EXTRA_BYTES

    # ---- what it asks for ---------------------------------------------------------------------------

    @property
    def need(self) -> MemoryNeed:
        """Its pool and its stream's workspaces; the area, which has to have some bytes, is not used."""
        area = granularity_bytes(self._device)
        return MemoryNeed(area, area + MATRIX_LIBRARIES_BYTES + self._most_bytes, 0)

    @property
    def pool_bytes(self) -> int:
        """What its pool has of the device."""
        return self._taken_bytes

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """One segment that needs nothing of the arena."""
        return JobDemand(
            name=name,
            fingerprint=f"eager {id(self)}",
            region_bytes=self._region_bytes,
            local_bytes=self.need.local_bytes,
            segments=(Segment(1, 0, 0, max(self._seconds, 1e-9)),),
            steps=steps,
            share=share,
        )

    def ask_for_more(self) -> None:
        """Ask for as much again beside what was seen."""
        self._most_bytes += self._most_bytes // _EXTRA_SHARE + _EXTRA_BYTES

    # ---- running ------------------------------------------------------------------------------------

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """It is one segment."""

    def use_regions(self, region_bytes: int) -> None:
        """It has nothing of the arena."""
        self._region_bytes = region_bytes

    def settle(self, memory: Memory) -> None:
        """Take model and optimizer to the device, into a pool of the job's own, if they are elsewhere."""
        self._stream = borrow_stream(self._device, self, uses_matrices=True)
        with torch.cuda.stream(self._stream):
            warm_matrix_libraries(self._device)  # outside of the pool: workspaces are the stream's
        self._stream.synchronize()
        torch.cuda.empty_cache()
        self._own = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in _tensors_of(self._model, self._optimizer)
            if tensor.device == self._device
        }
        self._pool = torch.cuda.MemPool()
        with self._working():
            _move(self._model, self._optimizer, self._device)

    def begin(self, batch: Any, *, is_ahead: bool = False) -> None:
        """Take a batch."""
        self._batch = batch

    def renew(self) -> None:
        """It reads its model when it runs."""

    def run(self, segment: int) -> None:
        """Enqueue one step of training; refused with `BudgetError` where it needs more than was seen."""
        batch, self._batch = self._batch, None
        with self._working(), self._settings():
            losses, metrics = train_eagerly(
                self._model, self._optimizer, self._loss, _on_device(batch, self._device), self._autocast
            )
        self._outcome = StepOutcome(self.member_names, losses, metrics)
        if self._scheduler is not None:
            self._scheduler.step()

    def end(self) -> StepOutcome:
        """What the step gave."""
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        return outcome

    def leave(self) -> None:
        """Put model and optimizer back to where they were; gradients are let go of."""
        self._batch = self._outcome = None
        if self._pool is None:
            return
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._home == self._device:
            _copy_others(self._model, self._optimizer, frozenset(self._own))
        else:
            _move(self._model, self._optimizer, self._home)
        torch.cuda.current_stream(self._device).synchronize()
        self._pool = self._stream = None
        self._taken_bytes = 0
        return_stream(self._device, self)
        torch.cuda.empty_cache()

    # ---- inside -------------------------------------------------------------------------------------

    def _rehearse(self, example: Any, spare_bytes: int) -> tuple[int, float]:
        """What a pool reserves for steps of a copy, and the seconds of the last one."""
        try:
            with limited_growth(self._device, max(0, spare_bytes)):
                return self._rehearse_copy(example)
        except torch.OutOfMemoryError as error:
            forget_locals(error)
            raise BudgetError(
                f"job {self.member_names[0]!r} cannot be traced: expected a step of it to fit into the "
                f"{exact_bytes(spare_bytes)} that the budget leaves beside what is laid out, but it "
                "needs more; "
                "raise the budget, give it smaller batches, or hand it over before the others run"
            ) from error
        finally:
            torch.cuda.empty_cache()

    def _rehearse_copy(self, example: Any) -> tuple[int, float]:
        device, began_at = self._device, 0.0
        with (
            torch.random.fork_rng(devices=[device], device_type="cuda"),
            borrowed_stream(device) as stream,
            self._settings(),
        ):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                warm_matrix_libraries(device)
                pool = torch.cuda.MemPool()  # here: it is of the device that is current
                with torch.cuda.use_mem_pool(pool, device):
                    model, optimizer = copy.deepcopy((self._model, self._optimizer))
                    _move(model, optimizer, device)
                    for _ in range(_NUM_REHEARSED):
                        began_at = time.perf_counter()
                        batch = _on_device(example, device)
                        train_eagerly(model, optimizer, self._loss, batch, self._autocast)
                        stream.synchronize()
        seconds, seen_bytes = time.perf_counter() - began_at, pool_bytes(pool)
        del model, optimizer, batch
        return seen_bytes, seconds

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Torch's switches for a step. The backward pass stays in this thread: only that uses the pool."""
        with deterministic_algorithms(self._deterministic), torch.autograd.set_multithreading_enabled(False):
            yield

    @contextmanager
    def _working(self) -> Iterator[None]:
        """On the job's own stream, with memory of its own pool; the current stream goes on behind it.

        Refused with `BudgetError`: more memory than was promised.
        """
        pool, inside, outside = self._pool, self._stream, torch.cuda.current_stream(self._device)
        assert pool is not None
        assert inside is not None
        reserved = torch.cuda.memory_reserved(self._device)
        left_bytes = max(0, self._most_bytes - sum(self._own.values()) - self._taken_bytes)
        inside.wait_stream(outside)
        try:
            with (
                limited_growth(self._device, left_bytes),
                torch.cuda.stream(inside),
                torch.cuda.use_mem_pool(pool, self._device),
            ):
                yield
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"expected a job that runs eagerly to take at most {exact_bytes(self._most_bytes)}, what its "
                "first batch needed and some more, but it needs more, or the device has no more; let the "
                "largest batch come first"
            ) from error
        finally:
            outside.wait_stream(inside)
            if torch.cuda.memory_reserved(self._device) != reserved:  # a look at the pool takes longer
                self._taken_bytes = pool_bytes(pool)


def _on_device(batch: Any, device: torch.device) -> Any:
    flat = flatten_batch(batch)
    return flat.rebuild([tensor.to(device, non_blocking=True) for tensor in flat.tensors])


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, buffers and the optimizer's state."""
    leaves = pytree.tree_leaves(list(optimizer.state.values()))
    states = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [*model.parameters(), *model.buffers(), *states]


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Take a model and its optimizer's state to ``device``; parameters stay the same objects.

    Single numbers, such as a count of steps, stay on the host unless the optimizer wants them on the device.
    """
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
    for group in optimizer.param_groups:
        moves_numbers = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            if parameter.device != device:  # it is not the model's
                parameter.data = parameter.data.to(device)
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                optimizer.state[parameter] = _moved(state, device, moves_numbers=moves_numbers)


def _moved(state: Any, device: torch.device, *, moves_numbers: bool) -> Any:
    def move(value: Tensor) -> Tensor:
        return value.to(device) if value.dim() or moves_numbers else value

    return pytree.tree_map_only(Tensor, move, state)


def _copy_others(model: nn.Module, optimizer: torch.optim.Optimizer, own: frozenset[int]) -> None:
    """Give storage outside of the pool to what was made since the model came: it is the user's now."""

    def kept(value: Tensor) -> Tensor:
        is_own = value.untyped_storage().data_ptr() in own or value.device.type == "cpu"
        return value if is_own else value.detach().clone()

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = kept(buffer)
    for parameter in model.parameters():
        parameter.data = kept(parameter.data)
    for entry in optimizer.state.values():
        for key, value in entry.items():
            entry[key] = pytree.tree_map_only(Tensor, kept, value)
