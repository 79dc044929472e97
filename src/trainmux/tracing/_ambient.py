"""Torch's ambient switches, put aside: numbers do not depend on the block that a fleet is called in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from trainmux.tracing._torch_private import has_autocast, has_function_modes


def is_plain(dtype: torch.dtype) -> bool:
    """Whether no switch is set that could change numbers, and ``dtype`` is the default one."""
    return (
        torch.is_grad_enabled()
        and torch.get_default_dtype() is dtype
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and not has_function_modes()
        and not has_autocast()
    )


@contextmanager
def plain_torch(dtype: torch.dtype) -> Iterator[None]:
    """No autocast, anomaly mode, inference mode, ``no_grad`` or default device; ``dtype`` is the default one.

    What needs no change is left alone: anomaly mode and the default dtype are those of the whole process.
    """
    if is_plain(dtype):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                torch.set_autocast_enabled(kind, False)
                stack.callback(torch.set_autocast_enabled, kind, True)
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        before = torch.get_default_dtype()
        if before is not dtype:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        yield
