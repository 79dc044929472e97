"""Copies of next to nothing beside a step: what compute takes longer where it meets a lane of copies.

A kernel that waits for a copy costs a CUDA graph some microseconds even where the copy has long ended, and so
does one that a copy waits for: the device prepares kernels while others run, but not across such an edge.
Where kernels are long it is made up for before it shows, so it is measured in the step itself.
"""

from __future__ import annotations

import torch

from trainmux.runtime import StreamOwner, borrow_stream

_MOST_COPIES = 32
_FEWEST_NODES = 8
"""Between two copies, so that each has ended when it is waited for."""
_NUM_BYTES = 1024


def meeting_places(num_nodes: int) -> tuple[range, range]:
    """Ranks of the nodes that a copy waits for, and of those behind which compute waits for that copy.

    The latter are in the middle between two of the former. Of a step of a few nodes there are none.
    """
    every = max(_FEWEST_NODES, -(-num_nodes // _MOST_COPIES))
    waits = range(every + every // 2 - 1, num_nodes - 1, every)
    return range(every - 1, every - 1 + every * len(waits), every), waits


def meeting_seconds(without: float, taken: float, number: int) -> float:
    """What each of so many meetings costs a step that takes ``without`` seconds without them."""
    return max(0.0, taken - without) / number if number else 0.0


class Meetings:
    """Called behind each node of a step that is captured: begins copies, and waits for them.

    As a context, around that step: however it ends, the lane of the copies ends with it.
    """

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self._copies, self._waits = meeting_places(num_nodes)
        self.number = len(self._copies) + len(self._waits)
        """Of nodes that a copy waits for, or that wait for one."""
        self._device = device
        self._owner = StreamOwner()
        self._side = borrow_stream(device, self._owner)
        self._there = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device)
        self._host = torch.zeros(_NUM_BYTES, dtype=torch.uint8, pin_memory=True)

    def __enter__(self) -> Meetings:
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
