"""Many tensors between host and device at the link's full rate.

A copy between the device and ordinary host memory goes through a small buffer of the driver's and waits for
each piece. Here pieces go through two pinned buffers of our own: while the link fills or empties one, the
host's threads copy the other. All transfers of a process share them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainmux.sizes import round_up

BUFFER_BYTES = 64 << 20
_NUM_BUFFERS = 2
_ALIGNMENT = 64

Pair = tuple[Tensor, Tensor]

_BUFFERS: dict[int, list[Tensor]] = {}
_COPYING = threading.Lock()


class Transfers:
    """Copies (destination, source) pairs to and from one device; its buffers are made at first use."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._buffers = _BUFFERS.setdefault(buffer_bytes, [])

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy every source into its destination, in any order; done, for the host, when it returns."""
        outward, inward = [], []
        with torch.no_grad():
            for destination, source in pairs:
                if not self._is_staged(destination, source):
                    destination.copy_(source)
                elif source.device == self._device:
                    outward.append((destination, source))
                else:
                    inward.append((destination, source))
            if outward or inward:
                with _COPYING:
                    self._copy_outward(outward)
                    self._copy_inward(inward)

    def send(self, pairs: Sequence[Pair]) -> None:
        """Copy behind the work that the device has: sources may change at once, and nothing is waited for.

        What comes from the host takes pinned memory of its size until it has arrived, if it is in none.
        """

        def given(destination: Tensor, source: Tensor) -> Tensor:
            if source.device.type != "cpu" or (source.is_pinned() and source.dtype == destination.dtype):
                return source.detach()
            return torch.empty(source.shape, dtype=destination.dtype, pin_memory=True).copy_(source.detach())

        if not pairs:
            return
        on_gpu = pairs[0][0].device.type == "cuda"
        sources = [given(*pair) if on_gpu else pair[1].detach() for pair in pairs]
        # Torch gives pinned memory away again when the copy that reads it is done.
        with torch.no_grad():
            torch._foreach_copy_([destination for destination, _ in pairs], sources, non_blocking=on_gpu)

    def _is_staged(self, destination: Tensor, source: Tensor) -> bool:
        """Whether two tensors are the same row of bytes, one on the host and one on the device."""
        if self._device.type != "cuda" or {destination.device, source.device} != {
            self._device,
            torch.device("cpu"),
        }:
            return False
        return (
            destination.dtype == source.dtype
            and destination.shape == source.shape
            and destination.is_contiguous()
            and source.is_contiguous()
            and not destination.is_pinned()
            and not source.is_pinned()
        )

    def _copy_outward(self, pairs: Sequence[Pair]) -> None:
        waiting: tuple[torch.cuda.Event, list[tuple[Tensor, Tensor]]] | None = None
        for number, batch in enumerate(self._batches(pairs)):
            held = []
            for (destination, source), place in zip(batch, self._places(number, batch), strict=True):
                place.copy_(source, non_blocking=True)
                held.append((destination, place))
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            _empty(waiting)
            waiting = (event, held)
        _empty(waiting)

    def _copy_inward(self, pairs: Sequence[Pair]) -> None:
        events: list[torch.cuda.Event] = []
        for number, batch in enumerate(self._batches(pairs)):
            if number >= _NUM_BUFFERS:
                events[number - _NUM_BUFFERS].synchronize()
            for (destination, source), place in zip(batch, self._places(number, batch), strict=True):
                place.copy_(source)
                destination.copy_(place, non_blocking=True)
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(self._device))
        for event in events[-_NUM_BUFFERS:]:
            event.synchronize()

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        """Flat pieces of the pairs, as many together as one buffer holds."""
        batch: list[Pair] = []
        used = 0
        for destination, source in pairs:
            flat, given = destination.detach().view(-1), source.detach().view(-1)
            most = max(1, self._buffer_bytes // flat.element_size())
            for begin in range(0, flat.numel(), most):
                piece = (flat[begin : begin + most], given[begin : begin + most])
                size = round_up(piece[0].nbytes, _ALIGNMENT)
                if batch and used + size > self._buffer_bytes:
                    yield batch
                    batch, used = [], 0
                batch.append(piece)
                used += size
        if batch:
            yield batch

    def _places(self, number: int, batch: Sequence[Pair]) -> Iterator[Tensor]:
        """A part of the buffer for each piece of a batch."""
        while len(self._buffers) < _NUM_BUFFERS:
            # No byte more: torch takes the next power of two.
            size = max(round_up(self._buffer_bytes, _ALIGNMENT), _ALIGNMENT)
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        offset = 0
        for piece, _ in batch:
            part = self._buffers[number % _NUM_BUFFERS][offset : offset + piece.nbytes]
            yield part.view(piece.dtype)
            offset += round_up(piece.nbytes, _ALIGNMENT)


def _empty(waiting: tuple[torch.cuda.Event, list[tuple[Tensor, Tensor]]] | None) -> None:
    """When a buffer has arrived, copy it to where it belongs."""
    if waiting is None:
        return
    event, held = waiting
    event.synchronize()
    for destination, place in held:
        destination.copy_(place)
