"""The cost of a dependency between the compute stream and a copy stream, measured in the step itself.

A kernel that waits for a copy costs a CUDA graph some microseconds even where the copy has long ended, and so
does one that a copy waits for: the device prepares kernels while others run, but not across such an edge.
Where kernels are long this is hidden, so it is measured with tiny copies added to the step.
"""

from __future__ import annotations

import torch

from trainmux.runtime import StreamOwner, borrow_stream

_MOST_COPIES = 32
_FEWEST_NODES = 8
"""Nodes between two copies, so that each has ended when it is waited for."""
_NUM_BYTES = 1024


def sync_points(num_nodes: int) -> tuple[range, range]:
    """Ranks of the nodes that a copy waits for, and of those after which compute waits for that copy.

    The latter are in the middle between two of the former. A step of a few nodes has none.
    """
    every = max(_FEWEST_NODES, -(-num_nodes // _MOST_COPIES))
    waits = range(every + every // 2 - 1, num_nodes - 1, every)
    return range(every - 1, every - 1 + every * len(waits), every), waits


class TinyCopies:
    """Copies of next to nothing in a step that is captured, called after each of its nodes.

    As a context, around that step: however it ends, the stream of the copies is joined.
    """

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self._copies, self._waits = sync_points(num_nodes)
        self.num_dependencies = len(self._copies) + len(self._waits)
        self._device = device
        self._owner = StreamOwner()
        self._side = borrow_stream(device, self._owner)
        self._there = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device)
        self._host = torch.zeros(_NUM_BYTES, dtype=torch.uint8, pin_memory=True)

    def __enter__(self) -> TinyCopies:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def __call__(self, rank: int) -> None:
        main = torch.cuda.current_stream(self._device)
        if rank in self._copies:
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                self._host.copy_(self._there, non_blocking=True)
        if rank in self._waits:
            main.wait_stream(self._side)
