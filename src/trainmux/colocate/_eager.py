"""Jobs that cannot be traced: plain torch, one segment per iteration (§6.2).

A rehearsal on a copy of the model and optimizer shows how much memory an iteration needs.

Nobody knows which of its tensors outlive an iteration, so none of them may lie where another job writes.
Everything counts as local memory: the job shares the device's time, not the arena. On a CPU it allocates for
itself. On a CUDA device it has a memory pool of its own, limited to what the rehearsal needed. The job's
Python runs in the dispatcher's thread: where it waits for the device (``item()``, ``if tensor``), no segment
of another job is enqueued until it goes on.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._placement import ALIGNMENT_BYTES
from trainmux.colocate._protocols import JobWork, StepOutcome, forget_locals
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.engine import Memory, limited_growth, pool_bytes
from trainmux.errors import BudgetError, LossError
from trainmux.runtime import (
    MATRIX_LIBRARIES_BYTES,
    allocating_from,
    borrow_stream,
    borrowed_stream,
    deterministic_algorithms,
    return_stream,
    warm_matrix_libraries,
)
from trainmux.sizes import exact_bytes
from trainmux.tracing import LossFunction, flatten_batch

_NUM_REHEARSED = 2
"""Steps of a rehearsal: the first makes the optimizer's state, the second is typical."""

_EXTRA_BYTES = 32 << 20
_EXTRA_SHARE = 16
"""Allowed beyond the rehearsal, plus one part in this many: blocks may be split differently later."""

SpareMemory = Callable[[], AbstractContextManager[int]]
"""While the context is open nobody lays out memory or begins an iteration; gives the bytes left in the
budget."""


@dataclass(frozen=True)
class EagerStep:
    """Plain training of one model: one step of it is one iteration. ``autocast`` is the dtype of products."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    scheduler: Any = None
    deterministic: bool = False
    autocast: torch.dtype | None = None

    def run(self, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Train on a batch, without the learning rate's scheduler; returns the loss and metrics."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            returned: Any = self.loss(self.model, batch)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
            raise LossError(
                f"expected the loss function to return a scalar tensor, or one with a dict of metrics, got "
                f"{type(returned).__name__}; reduce it, for example with mean()"
            )
        loss.backward()
        self.optimizer.step()
        found = {
            key: value.detach() if isinstance(value, Tensor) else value for key, value in metrics.items()
        }
        return loss.detach().reshape(1), found

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        where = next((tensor.device.type for tensor in self.model.parameters()), "cpu")
        return torch.autocast(where, dtype=self.autocast)

    def copy(self) -> EagerStep:
        """A step of copies of the model and optimizer."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        return EagerStep(model, optimizer, self.loss, None, self.deterministic, self.autocast)

    def tensors(self) -> list[Tensor]:
        """Parameters, buffers and the optimizer's state."""
        states = _tensors(list(self.optimizer.state.values()))
        return [*self.model.parameters(), *self.model.buffers(), *states]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class EagerWork(JobWork):
    """Plain training of one model on the CPU. An error of the rehearsal is raised here.

    Random numbers are the caller's business: it sets torch's generator to the job's own state.
    """

    is_eager = True
    _area_bytes = ALIGNMENT_BYTES
    """The smallest area that a device lays out: it must not be empty, though it is not used."""
    _workspace_bytes = 0

    def __init__(self, name: str, step: EagerStep, example: Any, *, region_bytes: int) -> None:
        self._name = name
        self._step = step
        self._batch: Any = None
        self._outcome: StepOutcome | None = None
        self._region_bytes = region_bytes
        self._rehearse(example)

    @property
    def member_names(self) -> tuple[str, ...]:
        return (self._name,)

    def _rehearse(self, example: Any) -> None:
        """Count the bytes that a few steps of a copy need, and the seconds of the last one."""
        step = self._step.copy()
        with (
            torch.random.fork_rng(devices=[]),
            deterministic_algorithms(step.deterministic),
            _StorageCounter([*step.tensors(), *_tensors(example)]) as counter,
        ):
            for _ in range(_NUM_REHEARSED):
                began_at = time.perf_counter()
                step.run(example)
        self._most_bytes, self._seconds = counter.most_bytes, time.perf_counter() - began_at

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """One segment that needs nothing of the arena."""
        return JobDemand(
            name=name,
            fingerprint=f"eager {id(self)}",
            region_bytes=self._region_bytes,
            local_bytes=self._area_bytes + self._workspace_bytes + self._most_bytes,
            segments=(Segment(1, 0, 0, max(self._seconds, 1e-9)),),
            steps=steps,
            share=share,
            area_bytes=self._area_bytes,
        )

    def use_regions(self, region_bytes: int) -> None:
        self._region_bytes = region_bytes

    def begin(self, batch: Any, *, is_ahead: bool = False) -> None:
        self._batch = batch

    def run(self, segment: int) -> None:
        """Train one step."""
        batch, self._batch = self._batch, None
        with self._running():
            losses, metrics = self._step.run(self._on_device(batch))
        self._outcome = StepOutcome(self.member_names, losses, metrics)
        if self._step.scheduler is not None:
            self._step.scheduler.step()

    def end(self) -> StepOutcome:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        return outcome

    def leave(self) -> None:
        """Let go of the batch; model and optimizer are the user's own all the time."""
        self._batch = self._outcome = None

    def _running(self) -> AbstractContextManager[None]:
        return deterministic_algorithms(self._step.deterministic)

    def _on_device(self, batch: Any) -> Any:
        return batch


class EagerCudaWork(EagerWork):
    """Plain training of one model on a CUDA ``device``; its tensors return to where they were before.

    Refused with `BudgetError`: a step that needs more memory than ``spare_memory`` leaves.
    """

    _workspace_bytes = MATRIX_LIBRARIES_BYTES

    def __init__(
        self,
        name: str,
        step: EagerStep,
        example: Any,
        *,
        region_bytes: int,
        device: torch.device,
        spare_memory: SpareMemory,
    ) -> None:
        self._device = device
        self._area_bytes = granularity_bytes(device)
        self._spare_memory = spare_memory
        self._home = next((parameter.device for parameter in step.model.parameters()), device)
        self._pool: torch.cuda.MemPool | None = None
        self._stream: torch.cuda.Stream | None = None
        self._taken_bytes = 0
        """Bytes that the pool has reserved."""
        self._own: dict[int, int] = {}
        """The user's storages on the device outside of the pool: sizes by address."""
        super().__init__(name, step, example, region_bytes=region_bytes)

    @property
    def pool_bytes(self) -> int:
        """Device memory of its pool."""
        return self._taken_bytes

    def ask_for_more(self) -> None:
        """Ask for the allowance once more."""
        self._most_bytes += self._most_bytes // _EXTRA_SHARE + _EXTRA_BYTES

    # ---- running -----------------------------------------------------------------------------------

    def settle(self, memory: Memory) -> None:
        """Move model and optimizer into the job's own pool on the device, if they are elsewhere."""
        self._stream = borrow_stream(self._device, self, uses_matrices=True)
        with torch.cuda.stream(self._stream):
            warm_matrix_libraries(self._device)  # outside of the pool: workspaces belong to the stream
        self._stream.synchronize()
        torch.cuda.empty_cache()
        self._own = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in self._step.tensors()
            if tensor.device == self._device
        }
        self._pool = torch.cuda.MemPool()
        with self._in_pool():
            _move(self._step, self._device)

    def leave(self) -> None:
        """Move model and optimizer back to where they were; gradients are dropped."""
        super().leave()
        if self._pool is None:
            return
        for parameter in self._step.model.parameters():
            parameter.grad = None
        if self._home == self._device:
            _copy_others(self._step, frozenset(self._own))
        else:
            _move(self._step, self._home)
        torch.cuda.current_stream(self._device).synchronize()
        self._pool = self._stream = None
        self._taken_bytes = 0
        return_stream(self._device, self)
        torch.cuda.empty_cache()

    def _on_device(self, batch: Any) -> Any:
        flat = flatten_batch(batch)
        return flat.rebuild([tensor.to(self._device, non_blocking=True) for tensor in flat.tensors])

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._in_pool(), self._settings():
            yield

    # ---- internals ---------------------------------------------------------------------------------

    def _rehearse(self, example: Any) -> None:
        """Measure the pool of a few steps of a copy, and the seconds of the last one."""
        with self._spare_memory() as spare_bytes:
            try:
                with limited_growth(self._device, max(0, spare_bytes)):
                    seen_bytes, self._seconds = self._rehearse_copy(example)
            except torch.OutOfMemoryError as error:
                forget_locals(error)
                raise BudgetError(
                    f"job {self._name!r} cannot be traced: expected a step of it to fit into the "
                    f"{exact_bytes(spare_bytes)} that the budget leaves, but it needs more; raise the "
                    "budget, give it smaller batches, or hand it over before the others run"
                ) from error
            finally:
                torch.cuda.empty_cache()
        self._most_bytes = seen_bytes + seen_bytes // _EXTRA_SHARE + _EXTRA_BYTES

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
                pool = torch.cuda.MemPool()  # here: it belongs to the current device
                with allocating_from(pool, device):
                    step = self._step.copy()
                    _move(step, device)
                    for _ in range(_NUM_REHEARSED):
                        began_at = time.perf_counter()
                        batch = self._on_device(example)
                        step.run(batch)
                        stream.synchronize()
        seconds, seen_bytes = time.perf_counter() - began_at, pool_bytes(pool)
        del step, batch
        return seen_bytes, seconds

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Torch's switches for a step. The backward pass stays in this thread, the only one with the pool."""
        deterministic = self._step.deterministic
        with deterministic_algorithms(deterministic), torch.autograd.set_multithreading_enabled(False):
            yield

    @contextmanager
    def _in_pool(self) -> Iterator[None]:
        """Run on the job's own stream, with memory of its own pool; the current stream continues behind it.

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
                allocating_from(pool, self._device),
            ):
                yield
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"expected an eager job to take at most {exact_bytes(self._most_bytes)}, the need of its "
                "first batch and some more, but it needs more, or the device has no more; let the largest "
                "batch come first"
            ) from error
        finally:
            outside.wait_stream(inside)
            if torch.cuda.memory_reserved(self._device) != reserved:  # reading the pool takes longer
                self._taken_bytes = pool_bytes(pool)


def _move(step: EagerStep, device: torch.device) -> None:
    """Move a model and its optimizer's state to ``device``; parameters stay the same objects.

    Single numbers, such as a step count, stay on the host unless the optimizer wants them on the device.
    """
    model, optimizer = step.model, step.optimizer
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


def _copy_others(step: EagerStep, own: frozenset[int]) -> None:
    """Copy tensors that were made since the job began out of the pool: they are the user's now."""

    def kept(value: Tensor) -> Tensor:
        is_own = value.untyped_storage().data_ptr() in own or value.device.type == "cpu"
        return value if is_own else value.detach().clone()

    for module in step.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = kept(buffer)
    for parameter in step.model.parameters():
        parameter.data = kept(parameter.data)
    for entry in step.optimizer.state.values():
        for key, value in entry.items():
            entry[key] = pytree.tree_map_only(Tensor, kept, value)


class _StorageCounter(TorchDispatchMode):
    """Counts the bytes of storages that operators make while it is active, and those of ``known`` tensors.

    ``most_bytes`` is the most that was live at one time. A storage is gone when its weak reference says so
    (`StorageWeakRef`, which torch does not document).
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = list(known)  # kept alive: an address must not be given to another storage
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most_bytes = 0
        self._count(known)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._live = {key: row for key, row in self._live.items() if not row[0].expired()}
        result = func(*args, **(kwargs or {}))
        self._count(_tensors(result))
        return result

    def _count(self, tensors: Sequence[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self._live:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most_bytes = max(self.most_bytes, sum(size_bytes for _, size_bytes in self._live.values()))
