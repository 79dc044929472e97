"""Profiles are made of programs whose kernels are lowered, but not compiled."""

from __future__ import annotations

import pytest

from trainmux.lowering import KernelCache


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCache, "compile_batches", lambda self, batches: None)
