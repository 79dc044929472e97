"""Small numbers from the host to the device with every step, without waiting for it.

All of them lie in one packed buffer on the device whose address never changes, so that a captured graph may
read it. The host fills the same layout and sends it in one copy. The copy runs later than the call returns:
what it reads must not be overwritten until then, or a step that the host is ahead of silently trains with
numbers that were meant for a later one. Therefore the host writes into a ring of pinned buffers, each with
an event that says when its copy is done.

On a CPU there is nothing to send: host and program share the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from trainmux.runtime import ALIGNMENT_BYTES
from trainmux.sizes import round_up

NUM_SLOTS = 8
"""Steps that the host may be ahead of the device before it has to wait."""

Fields = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Arrays by name: dtype and shape."""


def _packed_offsets(fields: Fields) -> tuple[dict[str, int], int]:
    """Aligned offset of each array in the packed buffer, and the buffer's size; in bytes."""
    offsets: dict[str, int] = {}
    size_bytes = 0
    for name, (dtype, shape) in fields.items():
        offsets[name] = size_bytes
        size_bytes += round_up(prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)
    return offsets, size_bytes


class HostFeed:
    """Named arrays that the host writes (``host``) and programs read (``device``) after a ``push``.

    ``host`` holds numpy views: they keep their values, so only what changed has to be written. ``device``
    holds the same tensors for ever. ``make_event`` takes the place of CUDA's events in tests.
    """

    def __init__(
        self,
        fields: Fields,
        device: torch.device,
        *,
        num_slots: int = NUM_SLOTS,
        make_event: Callable[[], torch.cuda.Event] | None = None,
    ) -> None:
        offsets, size_bytes = _packed_offsets(fields)
        is_cuda = device.type == "cuda"
        if is_cuda and make_event is None:
            make_event = torch.cuda.Event
        self._staged = torch.zeros(size_bytes, dtype=torch.uint8)
        self._sent = self._staged
        self._slots: tuple[Tensor, ...] = ()
        self._events: list[torch.cuda.Event] = []
        self._next = 0
        self._device = device if is_cuda else None
        if make_event is not None:
            self._sent = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            slab = torch.zeros((num_slots, size_bytes), dtype=torch.uint8, pin_memory=is_cuda)
            self._slots = slab.unbind()
            self._events = [make_event() for _ in range(num_slots)]
        self.host: dict[str, npt.NDArray[Any]] = {
            name: _part(self._staged, offsets[name], *field).numpy() for name, field in fields.items()
        }
        self.device: dict[str, Tensor] = {
            name: _part(self._sent, offsets[name], *field) for name, field in fields.items()
        }

    def push(self) -> None:
        """Send ``host`` behind the work of the current stream. Waits where all slots are still in flight."""
        if not self._slots:
            return
        slot, event = self._slots[self._next], self._events[self._next]
        if not event.query():
            event.synchronize()
        slot.copy_(self._staged)
        self._sent.copy_(slot, non_blocking=True)
        # Named, because the current device may be another one.
        event.record(None if self._device is None else torch.cuda.current_stream(self._device))
        self._next = (self._next + 1) % len(self._slots)


def _part(packed: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return packed[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
