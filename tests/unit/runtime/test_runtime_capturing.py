"""Captures that fail, on a stand-in for torch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainmux.runtime import capturing


@contextmanager
def invalidated(*_: Any, **__: Any) -> Iterator[None]:
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_what_went_wrong_in_a_capture_is_raised_and_not_what_it_led_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "graph", invalidated)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    stream: Any = SimpleNamespace(device=torch.device("cuda", 0))
    pool: Any = SimpleNamespace(id=(0, 1))
    graph: Any = None
    with pytest.raises(ValueError, match="the cause"), capturing(graph, stream, pool):
        raise ValueError("the cause")
    with pytest.raises(RuntimeError, match="previous error"), capturing(graph, stream, pool):
        pass
