"""What every test folder shares: one thread per worker, and a reason where a GPU is missing."""

from __future__ import annotations

import gc
import importlib.util
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainmux.fleet import _program_store

GPU_TESTS = Path(__file__).parent / "gpu"
_MAX_GRAPH_CLASSES = 4000


def pytest_addoption(parser: pytest.Parser) -> None:
    # pyproject.toml sets `timeout`, and unknown settings are errors. Where only torch and pytest are
    # installed (make test-gpu), the setting is declared here and has no effect.
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "declared because pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores; torch would start a thread per core in each of them.
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    # Graphs are millions of objects that live on: with Python's own thresholds a fifth of the time goes into
    # looking for cycles among them.
    gc.set_threshold(200_000, 20, 100)
    # A shell has what it runs in the background ignore Ctrl-C, and so would tests that press it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is false here")
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    # What is imported by now stays: no need to look for cycles in it again and again.
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    # Each graph module is a class of its own, which lives until cycles are looked for.
    if len(torch.fx.GraphModule.__subclasses__()) > _MAX_GRAPH_CLASSES:
        gc.collect()


@pytest.fixture(autouse=True)
def no_steps_from_other_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Lowered steps are kept on disk from one start to the next; each test begins with none."""
    folders: list[Path] = []

    def folder() -> Path:
        if not folders:
            folders.append(tmp_path_factory.mktemp("steps"))
        return folders[0]

    monkeypatch.setattr(_program_store, "cache_folder", folder)


@pytest.fixture(scope="session", autouse=True)
def no_plans_of_other_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """So are plans; what is made for several tests comes before any test's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINMUX_PLAN_DIR", str(tmp_path_factory.mktemp("plans")))
        yield


@pytest.fixture(autouse=True)
def no_plans_from_other_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each test plans anew."""
    folder = tmp_path_factory.getbasetemp() / "plans of tests" / uuid.uuid4().hex
    monkeypatch.setenv("TRAINMUX_PLAN_DIR", str(folder))
