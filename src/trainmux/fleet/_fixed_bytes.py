"""What a plan counts beside its slab and its nodes' scratch on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainmux.engine import NUM_LANDINGS
from trainmux.fleet._group import Group
from trainmux.runtime import workspaces_bytes
from trainmux.tracing import FlatBatch

FIXED_BYTES = 128 << 20
"""On a CUDA device, beside all tensors: the matrix libraries' workspaces for one stream (about 40 MiB), and
what the driver takes for the graphs and the code of kernels that a plan is the first to run: 2 to 14 MiB for
plans of two or three sub-arrays, 74 MiB for one with 3,400 nodes, 900 recomputations and 4,500 copies."""


def known_fixed_bytes(groups: Sequence[Group], examples: Sequence[FlatBatch]) -> int:
    """What is known of any device: also places where batches land, those on their way from the host, and one
    where a ring keeps the next one."""
    batches = sum(
        sum(tensor.nbytes for tensor in example.tensors) * (group.width if group.stacked_batch else 1)
        for group, example in zip(groups, examples, strict=True)
    )
    return FIXED_BYTES + (NUM_LANDINGS + 1) * batches


def fixed_bytes(groups: Sequence[Group], examples: Sequence[FlatBatch], device: torch.device) -> int:
    """The same for a device that is there, with workspaces of streams that were used before."""
    return known_fixed_bytes(groups, examples) + sum(workspaces_bytes(device)[1:])
