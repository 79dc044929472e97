"""What an eager step allocates, seen from outside: storages as they come and go, operator by operator.

For a job of which there is no graph. Every operator counts as a kernel. A storage is allocated by the first
operator that returns it and last used by the one after which it is gone (`StorageWeakRef`, which torch
does not document).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux.colocate._tensors import ObservedAllocation


@dataclass
class Observation:
    """What was seen while something ran: what was allocated meanwhile, and how long each operator took."""

    rows: list[ObservedAllocation] = field(default_factory=list)
    kernel_seconds: list[float] = field(default_factory=list)


@contextmanager
def observe_allocations(known: Sequence[Tensor]) -> Iterator[Observation]:
    """Write down the storages that operators make in this block; those of ``known`` tensors are there before.

    The observation is filled when the block ends.
    """
    observation = Observation()
    watcher = _Watcher(known, observation)
    with watcher:
        yield observation
    watcher.finish()


class _Watcher(TorchDispatchMode):
    def __init__(self, known: Sequence[Tensor], observation: Observation) -> None:
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._kept = list(known)  # an address must not be given to another storage
        self._live: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._observation = observation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._let_go()
        started_at = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        rank = len(self._observation.kernel_seconds)
        self._observation.kernel_seconds.append(time.perf_counter() - started_at)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._seen and storage._cdata not in self._live:
                    self._live[storage._cdata] = (StorageWeakRef(storage), rank, storage.nbytes())
        return result

    def _let_go(self) -> None:
        """Take down the storages that have gone since the last operator."""
        last = len(self._observation.kernel_seconds) - 1
        for key in [key for key, (storage, _, _) in self._live.items() if storage.expired()]:
            self._row(key, last)

    def finish(self) -> None:
        """What is still there is used to the end."""
        last = len(self._observation.kernel_seconds) - 1
        for key in list(self._live):
            self._row(key, last)

    def _row(self, key: int, last: int) -> None:
        _, rank, size_bytes = self._live.pop(key)
        name = f"storage {len(self._observation.rows)}"
        self._observation.rows.append(ObservedAllocation(name, size_bytes, rank, max(rank, last)))
