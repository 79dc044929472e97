"""Which variant of a kernel is the quickest is found out once, not in every process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering_tools import traced

from trainmux.lowering import KernelCache, _known, lower
from trainmux.lowering._compile import Kernel
from trainmux.lowering._inductor import LoadedCode
from trainmux.lowering._known import recall_choices, remember_choices


@dataclass(frozen=True)
class Config:
    kwargs: dict[str, int]
    num_warps: int = 8
    num_stages: int = 1


@dataclass(frozen=True)
class Launcher:
    config: Config


@dataclass
class Reduction:
    """As Inductor's kernels are: several launchers until the first call, which tries all of them."""

    quickest: int
    launchers: list[Launcher] = field(
        default_factory=lambda: [Launcher(Config({"XBLOCK": 1, "R0_BLOCK": block})) for block in (1024, 512)]
    )
    num_tries: int = 0

    def run(self) -> None:
        if len(self.launchers) > 1:
            self.num_tries += len(self.launchers)
            self.launchers = [self.launchers[self.quickest]]


def generated(**kernels: Any) -> Callable[[list[Any]], list[Any]]:
    """A function in a module of its own, that runs its kernels."""
    names: dict[str, Any] = {**kernels, "in_order": list(kernels.values())}
    exec("def call(args):\n    for kernel in in_order:\n        kernel.run()\n    return list(args)\n", names)
    found: Callable[[list[Any]], list[Any]] = names["call"]
    return found


def kernel_of(code: Callable[[list[Any]], list[Any]], key: str = "stored") -> Kernel:
    (kernel,) = lower(traced(lambda x: x + 1, torch.zeros(4)), KernelCache()).kernels
    kernel.stored_key = key
    kernel._compiled = LoadedCode(code)
    return kernel


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_known, "cache_folder", lambda: tmp_path)
    return tmp_path


def block(kernel: Reduction) -> int:
    (launcher,) = kernel.launchers
    return launcher.config.kwargs["R0_BLOCK"]


def test_the_next_process_does_not_try_again() -> None:
    first, second = Reduction(quickest=1), Reduction(quickest=0)
    kernel_of(generated(a=first)).run([1])
    assert (first.num_tries, block(first)) == (2, 512)
    kernel_of(generated(a=second)).run([1])
    assert (second.num_tries, block(second)) == (0, 512)


@pytest.mark.parametrize("key", ["another", ""])
def test_choices_of_other_code_are_not_taken(key: str) -> None:
    kernel_of(generated(a=Reduction(quickest=1))).run([1])
    other = Reduction(quickest=0)
    kernel_of(generated(a=other), key).run([1])
    assert (other.num_tries, block(other)) == (2, 1024)


def test_a_choice_that_is_no_variant_stays_open_and_the_rest_is_kept() -> None:
    kernel_of(generated(a=Reduction(quickest=1))).run([1])
    kept = recall_choices("stored")
    remember_choices("stored", {**kept, "b": "of another time"})
    a, b = Reduction(quickest=0), Reduction(quickest=0)
    kernel_of(generated(a=a, b=b)).run([1])
    assert (a.num_tries, b.num_tries) == (0, 2)
    assert recall_choices("stored")["a"] == kept["a"]
    again = Reduction(quickest=1)
    kernel_of(generated(b=again)).run([1])
    assert (again.num_tries, block(again)) == (0, 1024)


def test_a_damaged_file_costs_its_time_only(folder: Path) -> None:
    kernel_of(generated(a=Reduction(quickest=1))).run([1])
    (path,) = (folder / "trainmux").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    again = Reduction(quickest=0)
    kernel_of(generated(a=again)).run([1])
    assert (again.num_tries, block(again)) == (2, 1024)


def test_a_choice_before_a_failure_is_kept() -> None:
    """As where a second kernel finds no memory to be tried in."""

    class Fails(Reduction):
        def run(self) -> None:
            raise RuntimeError("no memory")

    first, other = Reduction(quickest=1), Fails(quickest=0)
    kernel = kernel_of(generated(a=first, b=other))
    with pytest.raises(RuntimeError, match="no memory"):
        kernel.run([1])
    other.__class__ = Reduction
    kernel.run([1])
    a, b = Reduction(quickest=0), Reduction(quickest=1)
    kernel_of(generated(a=a, b=b)).run([1])
    assert (block(a), block(b), a.num_tries + b.num_tries) == (512, 1024, 0)


def test_inductors_kernels_are_as_expected() -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    source = inspect.getsource(heuristics.CachingAutotuner)
    assert "self.launchers: list" in source
    assert "if len(self.launchers) > 1:" in source  # only then are variants tried
    assert "self.launchers = [" in source
    hashable = inspect.getsource(heuristics.triton_config_to_hashable)
    for name in ("kwargs", "num_warps", "num_stages"):
        assert f".{name}" in hashable
