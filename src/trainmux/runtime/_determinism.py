"""Choice of algorithms for a stretch of code, with torch's global switches put back afterwards.

Deterministic ones strictly so: where torch only warns, attention keeps to its faster backward, which adds in
any order. An operator that has no deterministic algorithm raises, before anything has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux.errors import ConfigError
from trainmux.runtime._process import process_lock

aten = torch.ops.aten

# cuBLAS repeats itself only with workspaces of its own; torch insists on this variable.
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def deterministic_algorithms(enabled: bool) -> AbstractContextManager[None]:
    """While active, torch picks the same algorithm every time and avoids atomics where it can.

    The switches are the process's. A thread that asks for this with ``enabled=False`` does not find them on:
    it waits for others that do, and they for it.
    """
    return _deterministic() if enabled else process_lock.steps


@contextmanager
def _deterministic() -> Iterator[None]:
    with process_lock.switched():
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
    with process_lock, _searched_convolutions(wanted):
        if not wanted:
            yield
            return
        with _SkipDepthwise():
            yield


def is_depthwise(weight: Tensor, groups: int) -> bool:
    """Whether each group of a convolution makes one channel of one."""
    return groups > 1 and tuple(weight.shape[:2]) == (groups, 1)


_WEIGHT_AND_GROUPS: dict[Callable[..., Any], tuple[int, int]] = {
    aten.convolution.default: (1, -1),
    aten.convolution_backward.default: (2, -2),
}
"""Positions of both among the arguments."""


class _SkipDepthwise(TorchDispatchMode):
    """Leave depthwise convolutions to cuDNN's own choice while others are searched for.

    On an H200 its choice was never slower than the search's, and a search took up to 5 seconds a shape.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        at = _WEIGHT_AND_GROUPS.get(func)
        if at is None or not is_depthwise(*(args[position] for position in at)):
            return func(*args, **(kwargs or {}))
        with _searched_convolutions(False):
            return func(*args, **(kwargs or {}))


@contextmanager
def _searched_convolutions(wanted: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
