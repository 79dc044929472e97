"""Deterministic algorithms for a stretch of code, with torch's global switches put back afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """While active, torch picks the same algorithm every time and avoids atomics where it can."""
    if not enabled:
        yield
        return
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cudnn
    was_cudnn = (cudnn.deterministic, cudnn.benchmark)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = True, False
        with warnings.catch_warnings():
            # cuBLAS asks for an environment variable; with one stream and one handle it repeats anyway.
            warnings.filterwarnings("ignore", message=".*CuBLAS.*")
            yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = was_cudnn
