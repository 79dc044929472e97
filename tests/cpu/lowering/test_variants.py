"""Which variant of a kernel is the quickest is found out once, not in every process."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowering_tools import traced

from trainmux.lowering import KernelCache, _known, lower
from trainmux.lowering._compile import Kernel
from trainmux.lowering._inductor import LoadedCode, short_benchmarks
from trainmux.lowering._known import recall_choices, remember_choices


class Reduction:
    """As Inductor's kernels are: several launchers until the first call, which tries all of them."""

    def __init__(self, quickest: int) -> None:
        self.quickest, self.num_tries = quickest, 0
        self.launchers = [
            SimpleNamespace(config=SimpleNamespace(kwargs={"R0_BLOCK": block}, num_warps=8, num_stages=1))
            for block in (1024, 512)
        ]

    def run(self) -> None:
        if len(self.launchers) > 1:
            self.num_tries += len(self.launchers)
            self.launchers = [self.launchers[self.quickest]]

    @property
    def found(self) -> tuple[int, int]:
        """The variants that were tried, and the block of the one that is left."""
        (launcher,) = self.launchers
        return self.num_tries, launcher.config.kwargs["R0_BLOCK"]


def kernel_of(key: str = "stored", **kernels: Reduction) -> Kernel:
    """Compiled code, in a module of its own, that runs these kernels."""
    names: dict[str, Any] = {**kernels, "in_order": list(kernels.values())}
    exec("def call(args):\n    for kernel in in_order:\n        kernel.run()\n    return list(args)\n", names)
    (kernel,) = lower(traced(lambda x: x + 1, torch.zeros(4)), KernelCache()).kernels
    kernel.stored_key = key
    kernel._compiled = LoadedCode(names["call"])
    return kernel


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which 512 is the choice for the kernel ``a`` of the code ``stored``."""
    monkeypatch.setattr(_known, "cache_folder", lambda: tmp_path)
    first = Reduction(quickest=1)
    kernel_of(a=first).run([1])
    assert first.found == (2, 512)
    return tmp_path


@pytest.mark.parametrize(
    ("key", "is_damaged", "expected"),
    [
        ("stored", False, (0, 512)),
        ("another", False, (2, 1024)),
        ("", False, (2, 1024)),
        ("stored", True, (2, 1024)),
    ],
    ids=["known", "other code", "code without a key", "damaged"],
)
def test_the_next_process_tries_again_only_what_is_not_known(
    folder: Path, key: str, is_damaged: bool, expected: tuple[int, int]
) -> None:
    if is_damaged:
        (path,) = (folder / "trainmux").iterdir()
        path.write_bytes(path.read_bytes()[:-1])
    again = Reduction(quickest=0)
    kernel_of(key, a=again).run([1])
    assert again.found == expected


def test_a_choice_that_is_no_variant_stays_open_and_the_rest_is_kept() -> None:
    kept = recall_choices("stored")
    remember_choices("stored", {**kept, "b": "of another time"})
    a, b = Reduction(quickest=0), Reduction(quickest=0)
    kernel_of(a=a, b=b).run([1])
    assert (a.num_tries, b.num_tries) == (0, 2)
    assert recall_choices("stored")["a"] == kept["a"]
    again = Reduction(quickest=1)
    kernel_of(b=again).run([1])
    assert again.found == (0, 1024)


def test_a_choice_before_a_failure_is_kept() -> None:
    """As where a second kernel finds no memory to be tried in."""

    class Fails(Reduction):
        def run(self) -> None:
            raise RuntimeError("no memory")

    kernel = kernel_of("new", a=Reduction(quickest=1), b=(other := Fails(quickest=0)))
    with pytest.raises(RuntimeError, match="no memory"):
        kernel.run([1])
    other.__class__ = Reduction
    kernel.run([1])
    a, b = Reduction(quickest=0), Reduction(quickest=1)
    kernel_of("new", a=a, b=b).run([1])
    assert (a.found, b.found) == ((0, 512), (0, 1024))


def test_variants_are_compared_by_a_few_runs_in_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Benchmarker:
        def benchmark_gpu(self, call: object, **how: Any) -> None:
            asked.append(how)

    benchmarker = Benchmarker()
    module = "torch._inductor.runtime.benchmarking"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(benchmarker=benchmarker))

    def run() -> None:
        benchmarker.benchmark_gpu(None, rep=40)

    with short_benchmarks():
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    run()
    short, elsewhere, after = asked
    assert short["rep"] < 10
    assert elsewhere == after == {"rep": 40}


def test_inductors_benchmarks_take_what_they_are_given() -> None:
    benchmarking = pytest.importorskip("torch._inductor.runtime.benchmarking")
    for name in ("TritonBenchmarker", "InductorBenchmarker"):
        parameters = inspect.signature(getattr(benchmarking, name).benchmark_gpu).parameters
        assert any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = inspect.signature(benchmarking.InductorBenchmarker.benchmark_gpu).parameters
    assert {"estimation_iters", "memory_warmup_iters", "benchmark_iters", "max_benchmark_duration"} <= {
        *named
    }


def test_inductors_kernels_are_as_expected() -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    source = inspect.getsource(heuristics.CachingAutotuner)
    assert "self.launchers: list" in source
    assert "if len(self.launchers) > 1:" in source  # only then are variants tried
    assert "self.launchers = [" in source
    hashable = inspect.getsource(heuristics.triton_config_to_hashable)
    for name in ("kwargs", "num_warps", "num_stages"):
        assert f".{name}" in hashable
