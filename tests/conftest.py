"""What every test folder shares: one thread per worker, and a reason where a GPU is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    # pyproject.toml sets `timeout`, and unknown settings are errors. Where only torch and pytest are
    # installed (make test-gpu), the setting is declared here and has no effect.
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "declared because pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores; torch would start a thread per core in each of them.
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is false here")
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(no_gpu)
