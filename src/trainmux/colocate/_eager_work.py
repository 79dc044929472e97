"""A job that cannot be traced: plain torch, one segment per iteration (§6.2).

What it needs is seen in a rehearsal, one step of a copy of its model and optimizer. Its feature maps are
those that the paper's rule finds where only allocations are known. It allocates for itself; the part of the
arena that it reserves while it runs is left alone by everybody else. On a CUDA device that is not enough:
see `_eager_cuda`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from trainmux.colocate._demand import JobDemand, demand_of_iteration
from trainmux.colocate._device import MemoryNeed
from trainmux.colocate._observe import observe_allocations
from trainmux.colocate._placement import ALIGNMENT_BYTES
from trainmux.colocate._tensors import Iteration, iteration_of_rows
from trainmux.colocate._work import StepOutcome
from trainmux.engine import Memory
from trainmux.errors import LossError
from trainmux.runtime import deterministic_algorithms
from trainmux.tracing import LossFunction


class EagerWork:
    """Plain training of one model. What a rehearsal raises is raised here.

    ``scheduler`` is stepped after every update. Random numbers are the caller's business: whoever runs an
    iteration gives torch's generator the job's own state.
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
        scheduler: Any = None,
        deterministic: bool = False,
        autocast: torch.dtype | None = None,
        region_bytes: int,
    ) -> None:
        self.member_names = (name,)
        self._model, self._optimizer, self._loss, self._scheduler = model, optimizer, loss, scheduler
        self._deterministic, self._autocast = deterministic, autocast
        self._batch: Any = None
        self._outcome: StepOutcome | None = None
        self._iteration = self._rehearse(example)
        self.use_regions(region_bytes)

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """One segment, as high as the feature maps are when the backward pass begins."""
        return demand_of_iteration(
            name,
            self._iteration,
            region_bytes=self._region_bytes,
            steps=steps,
            share=share,
            is_one_segment=True,
        )

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """It is one segment."""

    def use_regions(self, region_bytes: int) -> None:
        """It reserves whole regions."""
        self._region_bytes = region_bytes
        probe = self.demand("", steps=None, share=1.0)
        self.need = MemoryNeed(ALIGNMENT_BYTES, probe.local_bytes, probe.peak_bytes)

    def settle(self, memory: Memory) -> None:
        """Its tensors stay where they are."""

    def ask_for_more(self) -> None:
        """What it takes was seen."""

    def begin(self, batch: Any, *, is_ahead: bool = False) -> None:
        """Take a batch."""
        self._batch = batch

    def renew(self) -> None:
        """It reads its model when it runs."""

    def run(self, segment: int) -> None:
        """One step of training."""
        batch, self._batch = self._batch, None
        with deterministic_algorithms(self._deterministic):
            losses, metrics = train_eagerly(self._model, self._optimizer, self._loss, batch, self._autocast)
        self._outcome = StepOutcome(self.member_names, losses, metrics)
        if self._scheduler is not None:
            self._scheduler.step()

    def end(self) -> StepOutcome:
        """What the step gave."""
        assert self._outcome is not None
        return self._outcome

    def leave(self) -> None:
        """Its model and optimizer are the user's own all the time."""

    def _rehearse(self, example: Any) -> Iteration:
        model, optimizer = copy.deepcopy((self._model, self._optimizer))
        tensors = [*model.parameters(), *model.buffers(), *_states(optimizer), *_tensors(example)]
        distinct = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        resident = sum(tensor.untyped_storage().nbytes() for tensor in distinct.values())
        with (
            torch.random.fork_rng(devices=[]),
            deterministic_algorithms(self._deterministic),
            observe_allocations(tensors) as seen,
        ):
            train_eagerly(model, optimizer, self._loss, example, self._autocast)
        fingerprint = f"eager {id(self)}"
        return iteration_of_rows(fingerprint, seen.rows, seen.kernel_seconds, resident_bytes=resident)


def train_eagerly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFunction,
    batch: Any,
    autocast: torch.dtype | None,
) -> tuple[Tensor, Mapping[str, Any]]:
    """One step of plain training; its loss and metrics. ``autocast`` is the dtype of products, if given."""
    optimizer.zero_grad(set_to_none=True)
    with contextlib.nullcontext() if autocast is None else _autocast(model, autocast):
        returned: Any = loss_fn(model, batch)
    loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
        raise LossError(
            f"expected the loss function to return a scalar tensor, or one with a dict of metrics, got "
            f"{type(returned).__name__}; reduce it, for example with mean()"
        )
    loss.backward()
    optimizer.step()
    found = {key: value.detach() if isinstance(value, Tensor) else value for key, value in metrics.items()}
    return loss.detach().reshape(1), found


def _autocast(model: nn.Module, dtype: torch.dtype) -> torch.autocast:
    where = next((tensor.device.type for tensor in model.parameters()), "cpu")
    return torch.autocast(where, dtype=dtype)


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    entries = [value for entry in optimizer.state.values() for value in entry.values()]
    return [value for value in entries if isinstance(value, Tensor)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
