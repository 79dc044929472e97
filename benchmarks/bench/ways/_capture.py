"""A function captured as a CUDA graph, in the manner of torch's own notes on CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NUM_WARMUPS = 3


def capture(function: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph, and what ``function`` returned in it, which every replay overwrites.

    ``function`` runs ``NUM_WARMUPS`` times before, on the stream that it is captured on, so that kernels
    are compiled and chosen, workspaces are there, and gradients belong to that stream.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARMUPS):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = function()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, result
