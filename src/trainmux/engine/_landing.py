"""Copies of batches from host memory to the device while a step is running.

A batch is copied on a stream of its own and from pinned memory, so that neither the host nor the step before
it has to wait. Two buffers take turns: a step reads one while the other is filled for the next. Three waits
keep them apart:

* the host's, before it fills pinned memory that an earlier copy may still read;
* the copy's, before it fills a landing place that an earlier step may still read;
* the step's, before it reads a landing place that is still being filled.

Landing places are memory of the compute stream, which waits for every copy into them. They are freed and
taken again in its order, and need no ``record_stream``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from trainmux.runtime import borrow_stream
from trainmux.sizes import round_up

NUM_LANDINGS = 2
# As the allocator gives it: which kernel reads a tensor may depend on its address.
_ALIGNMENT_BYTES = 512
_MAX_LAYOUTS = 16


@dataclass(frozen=True)
class HostLeaf:
    """A tensor that is wanted on the device as ``dtype``: one part as it is, or all ``stacked``."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    stacked: bool = False

    def to(self, device: torch.device) -> Tensor:
        """Copy it by itself, in the order of the current stream."""
        moved = [part.to(device, self.dtype, non_blocking=True) for part in self.parts]
        return torch.stack(moved) if self.stacked else moved[0]


class CopyStream:
    """A side stream of ``device`` for copies. The compute stream is whichever is current in a call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = borrow_stream(device, self)  # a new one of torch's might be the compute stream

    def make_event(self) -> torch.cuda.Event:
        """An event that nothing was recorded in."""
        return torch.cuda.Event()

    def pinned(self, size_bytes: int) -> Tensor:
        """Host memory to copy from."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def landing(self, size_bytes: int) -> Tensor:
        """Memory of the compute stream; later copies wait for those who had it before."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def mark(self, event: torch.cuda.Event) -> None:
        """Record ``event`` in the compute stream."""
        event.record(torch.cuda.current_stream(self._device))

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: torch.cuda.Event, done: torch.cuda.Event
    ) -> None:
        """Copy sources into targets once ``after`` is reached, and record ``done``, which the compute stream
        waits for."""
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._stream)
        compute.wait_event(done)


@dataclass(frozen=True)
class _Shape:
    """Layout of a leaf on the device, and whether it is staged in our pinned memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    staged: bool

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def at(self, memory: Tensor, offset: int) -> Tensor:
        part = memory[offset : offset + self.size_bytes].view(self.dtype)
        return part.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class _LandingViews:
    """Views for leaves of given shapes: where each lands, where it is staged, and all that is staged."""

    landed: tuple[Tensor, ...]
    staged: tuple[Tensor | None, ...]
    packed: tuple[Tensor, Tensor] | None


@dataclass
class _Buffer:
    """Pinned memory and the landing place for one batch at a time."""

    released: torch.cuda.Event  # recorded when every step that reads the landing place is enqueued
    copied: torch.cuda.Event
    pinned: Tensor
    landing: Tensor
    layouts: dict[tuple[_Shape, ...], _LandingViews] = field(default_factory=dict)


class Landing:
    """Takes batches to ``device``. What ``land`` returns may be read by work that is enqueued before the
    next call; pinned tensors must keep their values until their copy is done, others may change at once."""

    def __init__(self, device: torch.device, copies: CopyStream | None = None) -> None:
        self._device = device
        self._copies = CopyStream(device) if copies is None else copies
        nothing = torch.empty(0, dtype=torch.uint8)
        self._buffers = [
            _Buffer(self._copies.make_event(), self._copies.make_event(), nothing, nothing)
            for _ in range(NUM_LANDINGS)
        ]
        self._last = 0

    def land(self, leaves: Sequence[HostLeaf]) -> list[Tensor]:
        """Each leaf on the device; those in ordinary host memory by way of a landing place."""
        shapes = [_shape_of(leaf) for leaf in leaves]
        landing = [leaf for leaf, shape in zip(leaves, shapes, strict=True) if shape is not None]
        landed = iter(self._land(landing, tuple(shape for shape in shapes if shape is not None)))
        return [
            leaf.to(self._device) if shape is None else next(landed)
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]

    def _land(self, leaves: Sequence[HostLeaf], shapes: tuple[_Shape, ...]) -> Sequence[Tensor]:
        if not leaves:
            return ()
        # Whoever was to read what landed last has been enqueued by now.
        self._copies.mark(self._buffers[self._last].released)
        self._last = (self._last + 1) % len(self._buffers)
        buffer = self._buffers[self._last]
        if not buffer.copied.query():
            buffer.copied.synchronize()
        layout = buffer.layouts.get(shapes)
        if layout is None:
            layout = self._lay_out(buffer, shapes)
        pairs = [] if layout.packed is None else [layout.packed]
        with torch.no_grad():
            for leaf, target, staged in zip(leaves, layout.landed, layout.staged, strict=True):
                if staged is None:
                    pairs.append((target, leaf.parts[0]))
                elif leaf.stacked:
                    for row, part in zip(staged, leaf.parts, strict=True):
                        row.copy_(part)
                else:
                    staged.copy_(leaf.parts[0])
            self._copies.copy(pairs, buffer.released, buffer.copied)
        return layout.landed

    def _lay_out(self, buffer: _Buffer, shapes: tuple[_Shape, ...]) -> _LandingViews:
        """Places for leaves, what is staged in front; gets larger buffers where they are too small."""
        offsets: dict[int, int] = {}
        size_bytes = num_staged_bytes = 0
        for position in sorted(range(len(shapes)), key=lambda position: not shapes[position].staged):
            offsets[position] = size_bytes
            size_bytes += round_up(shapes[position].size_bytes, _ALIGNMENT_BYTES)
            if shapes[position].staged:
                num_staged_bytes = size_bytes
        if len(buffer.pinned) < num_staged_bytes:
            buffer.pinned = self._copies.pinned(num_staged_bytes)
            buffer.layouts.clear()
        if len(buffer.landing) < size_bytes:
            buffer.landing = self._copies.landing(size_bytes)
            buffer.layouts.clear()
        if len(buffer.layouts) == _MAX_LAYOUTS:
            buffer.layouts.clear()
        layout = _LandingViews(
            tuple(shape.at(buffer.landing, offsets[i]) for i, shape in enumerate(shapes)),
            tuple(
                shape.at(buffer.pinned, offsets[i]) if shape.staged else None
                for i, shape in enumerate(shapes)
            ),
            (buffer.landing[:num_staged_bytes], buffer.pinned[:num_staged_bytes])
            if num_staged_bytes
            else None,
        )
        buffer.layouts[shapes] = layout
        return layout


def _shape_of(leaf: HostLeaf) -> _Shape | None:
    """Layout of a leaf; ``None`` for one that is on a device already or is no ordinary tensor."""
    first = leaf.parts[0]
    if not all(_is_ordinary(part) for part in leaf.parts):
        return None
    if leaf.stacked:
        shape = (len(leaf.parts), *first.shape)
        return _Shape(leaf.dtype, shape, torch.empty(shape, device="meta").stride(), staged=True)
    # As `to` has it: the order in memory stays, gaps and repetitions do not.
    strides = first.stride() if first.is_contiguous() else torch.empty_like(first, device="meta").stride()
    direct = first.dtype == leaf.dtype and first.stride() == strides and first.is_pinned()
    return _Shape(leaf.dtype, tuple(first.shape), strides, staged=not direct)


def _is_ordinary(part: Tensor) -> bool:
    return (
        type(part) in (Tensor, nn.Parameter)
        and part.device.type == "cpu"
        and part.layout is torch.strided
        and not part.is_quantized
        and not part.is_nested
    )
