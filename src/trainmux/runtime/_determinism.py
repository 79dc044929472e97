"""Deterministic algorithms for a stretch of code, with torch's global switches put back afterwards.

Strictly so: where torch only warns, attention keeps to its faster backward, which adds in any order. An
operator that has no deterministic algorithm raises, before anything has changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trainmux.errors import ConfigError

# cuBLAS repeats itself only with workspaces of its own; torch insists on this variable.
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def deterministic_algorithms(enabled: bool) -> AbstractContextManager[None]:
    """While active, torch picks the same algorithm every time and avoids atomics where it can."""
    return _deterministic() if enabled else nullcontext()


@contextmanager
def _deterministic() -> Iterator[None]:
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(_WORKSPACE_VARIABLE)
    cudnn = torch.backends.cudnn
    was_cudnn = (cudnn.deterministic, cudnn.benchmark)
    try:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault(_WORKSPACE_VARIABLE, ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ConfigError(
            f"deterministic=True: expected operators that have a deterministic algorithm, got {error}"
        ) from error
    finally:
        if workspace is None:
            os.environ.pop(_WORKSPACE_VARIABLE, None)
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = was_cudnn


@contextmanager
def measured_convolutions(wanted: bool) -> Iterator[None]:
    """While active, cuDNN times its algorithms for each new shape and takes the fastest, or does not."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
