"""The code of kernels is kept on disk and found again, by everything that decides it; workers fill it."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lowering_tools import traced
from torch._inductor import config
from torch.utils._python_dispatch import TorchDispatchMode

import trainmux as tm
from trainmux.lowering import Kernel, KernelCache, Lowered, _inductor, _known, _workers, lower
from trainmux.lowering._inductor import _SELDOM_USED, LoadedCode, _without_unused_imports, surroundings
from trainmux.lowering._known import is_known, recall, remember, stored_key
from trainmux.lowering._workers import MIN_FOR_WORKER, Workers

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def lowered_in(cache: KernelCache) -> Lowered:
    return lower(traced(lambda x: (x * 3).relu() + 1, torch.zeros(16, 8)), cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the kernel of ``lowered_in`` lies."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_known, "cache_folder", lambda: folder)
        cache = KernelCache()
        (kernel,) = lowered_in(cache).kernels
        (folder / "payload").write_bytes(kernel.payload())
        cache.compile([kernel])
    return folder


@pytest.fixture
def stored(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, in use; nothing can be compiled."""
    copy = shutil.copytree(folder, tmp_path / "kernels")
    monkeypatch.setattr(_known, "cache_folder", lambda: copy)
    refuse = Mock(side_effect=AssertionError("expected nothing to be compiled"))
    monkeypatch.setattr(_inductor, "compile_graph", refuse)
    return copy


@needs_compiler
def test_code_on_disk_is_loaded_and_not_compiled(stored: Path) -> None:
    cache = KernelCache()
    lowered = lowered_in(cache)
    cache.compile(lowered.kernels)
    assert [kernel.failure for kernel in lowered.kernels] == [""]
    x = torch.randn(16, 8)
    torch.testing.assert_close(lowered.module(x), (x * 3).relu() + 1)
    assert isinstance(lowered.kernels[0]._compiled, LoadedCode)


@needs_compiler
@pytest.mark.parametrize("why", ["cut off", "something else", "other settings"])
@pytest.mark.filterwarnings("ignore:1 of 1 regions could not be compiled")
def test_damaged_code_and_code_of_other_settings_is_not_taken(stored: Path, why: str) -> None:
    (path,) = (stored / "trainmux").iterdir()
    if why != "other settings":
        path.write_bytes(path.read_bytes()[:-100] if why == "cut off" else b"no pickle")
    cache = KernelCache(deterministic=why == "other settings")
    lowered = lowered_in(cache)
    cache.compile(lowered.kernels)  # tries to compile, which the fixture refuses
    assert "expected nothing to be compiled" in lowered.kernels[0].failure


def test_what_decides_the_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {surroundings(), surroundings()}
    with config.patch(max_fusion_size=7):
        found.add(surroundings())
    monkeypatch.setattr(torch, "__version__", "9.9")
    found.add(surroundings())
    monkeypatch.setattr(_inductor, "source_version", lambda folder: "changed")
    found.add(surroundings())
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    found.add(surroundings())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, capability in (("a", (9, 0)), ("b", (9, 0)), ("a", (8, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        found.add(surroundings())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found.add(surroundings())
    assert len(found) == 9
    assert len({stored_key(region, around) for region in "ab" for around in found}) == 18


def test_a_full_disk_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(_known, "cache_folder", lambda: in_the_way)
    remember("key", b"code")
    assert not is_known("key")
    assert recall("key") == b""


def test_only_imports_that_nothing_uses_are_left_out() -> None:
    imports = "import torch\n" + "".join(_SELDOM_USED.values())
    unused = "assert_alignment = 1\n"
    assert _without_unused_imports(imports + unused) == "import torch\n" + unused
    used = imports + "def call(args):\n    extern_kernels.mm(args[0], args[1])\n    return align(3)\n"
    assert _without_unused_imports(used) == used


KNOWN = """
import sys
from trainmux.lowering._regions import op_name, op_of

name = "prims._low_memory_max_pool_with_offsets.default"
assert op_name(op_of(name)) == name  # the compiler's own

from functools import partial
from pathlib import Path
import torch
from trainmux.lowering import KernelCache, _inductor, _known, decompositions, lower
from trainmux.lowering._regions import from_payload
from trainmux.lowering import _workers
from trainmux.lowering._workers import Workers
from trainmux.tracing import make_fx, static_fake_mode

folder, key, factor = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
_known.cache_folder = lambda: folder
cache = KernelCache()
kernel = cache.kernel(key, partial(from_payload, (folder / "payload").read_bytes()))
cache.compile([kernel])
assert isinstance(kernel._compiled, _inductor.LoadedCode), kernel.failure
x = torch.randn(16, 8)
(result,) = kernel.run([x])
torch.testing.assert_close(result, (x * 3).relu() + 1)
for part in ("compile_fx", "graph", "lowering", "select_algorithm"):
    assert f"torch._inductor.{part}" not in sys.modules, part

def pool(x):
    return torch.ops.aten.max_pool2d_with_indices(x, [2, 2])

with static_fake_mode():
    graph = make_fx(pool, decomposition_table=decompositions())(torch.empty(1, 2, 4, 4)).graph
assert not graph.find_nodes(op="call_function", target=torch.ops.aten.max_pool2d_with_indices.default)
"""

BY_A_WORKER = """
with static_fake_mode():
    module = make_fx(lambda x: (x * factor).relu() + 1)(torch.empty(16, 8))
lowered = lower(module, cache)
(kernel,) = lowered.kernels
(key,) = cache._stored_keys([kernel]).values()
kernel.stored_key = key
_workers.num_workers = lambda *_: 1
with Workers(1, deterministic=False) as workers:
    workers.add(kernel.job())
    workers.finish()
cache.compile([kernel])
assert isinstance(kernel._compiled, _inductor.LoadedCode), kernel.failure
assert "torch._inductor.compile_fx" not in sys.modules
torch.testing.assert_close(lowered.module(x), (x * factor).relu() + 1)
"""


@needs_compiler
@pytest.mark.parametrize(
    "code", [KNOWN, pytest.param(KNOWN + BY_A_WORKER, marks=pytest.mark.extensive)], ids=["known", "made now"]
)
def test_a_new_process_loads_what_others_compiled(code: str, folder: Path) -> None:
    """Without the compiler, whether the code was known or a worker has just made it. Pooling is taken apart
    in a process that has compiled nothing."""
    (kernel,) = lowered_in(KernelCache()).kernels
    new = str(1 + uuid.uuid4().int % 10**9 / 10**9)  # code that nobody has compiled before
    environment = dict(os.environ)
    if code != KNOWN:  # a worker has to find the folder; Inductor then tries the C++ compiler anew, for long
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder), kernel.key, new],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ---- workers -------------------------------------------------------------------------------------------

ECHO = """
import pickle, sys
from pathlib import Path
for _ in range(int(sys.argv[1])):
    try:
        payload, combines, key = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    Path(key).touch()
    pickle.dump("", sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


@pytest.mark.parametrize(
    ("lives", "num_jobs", "num_finished"),
    [([100, 100], 20, 20), ([100, 100], 11, 0), ([3, 0], 20, 3), ([0, 0, 0], 20, 0), ([100], 20, 0)],
    ids=["all", "too few for two", "they die", "all die at once", "one alone"],
)
def test_workers_share_the_work_and_leave_what_they_cannot_do(
    lives: list[int], num_jobs: int, num_finished: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waiting = list(lives)

    def start(_: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ECHO, str(waiting.pop())]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))

    monkeypatch.setattr(_workers, "_started", start)
    with Workers(len(lives), deterministic=False) as workers:
        for number in range(num_jobs):
            workers.add((b"x" * 100_000, False, str(tmp_path / str(number))))
        workers.finish()
    assert len(list(tmp_path.iterdir())) == num_finished


def test_a_step_computes_on_the_cores_that_workers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import sys; sys.stdin.buffer.read()"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    class Threads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(torch.get_num_threads())
            return func(*args, **(kwargs or {}))

    def threads_of_a_step() -> set[int]:
        with Threads() as threads:
            fleet.step(torch.ones(1, 2))
        return threads.seen

    model = torch.nn.Linear(2, 1)
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fleet = tm.Fleet([member], lambda m, x: m(x).sum(), torch.ones(1, 2), device="cpu", lowering="aten")
    fleet.step(torch.ones(1, 2))
    monkeypatch.setattr(_workers, "_started", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert threads_of_a_step() == {4}
        with Workers(2, deterministic=False) as workers:
            for _ in range(2 * MIN_FOR_WORKER):
                workers.add((b"", False, ""))
            wait_until(lambda: len(_workers._running) == 2)
            assert min(threads_of_a_step()) == 2
            assert torch.get_num_threads() == 4
            for worker in list(_workers._running):
                worker.kill()
            workers.finish()
        assert threads_of_a_step() == {4}
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_code_on_disk_does_not_wait_for_what_others_compile(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end = threading.Event(), threading.Event()

    def finish(workers: Workers) -> None:
        begun.set()
        end.wait(30)

    monkeypatch.setattr(Workers, "finish", finish)
    cache = KernelCache()
    others = threading.Thread(target=cache.fill([]))
    others.start()
    begun.wait(30)
    cache.compile(lowered_in(cache).kernels)
    assert others.is_alive()
    end.set()
    others.join()


def test_a_worker_outlives_a_region_that_it_cannot_read() -> None:
    jobs = [(b"damaged", False, ""), (b"damaged, too", False, "")]
    with subprocess.Popen(
        [sys.executable, "-m", "trainmux.lowering._worker", ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as worker:
        found, _ = worker.communicate(b"".join(map(pickle.dumps, jobs)))
    answers = io.BytesIO(found)
    assert all(pickle.load(answers) for _ in jobs)


def test_known_kernels_need_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_known, "cache_folder", lambda: tmp_path)
    monkeypatch.setenv("TRAINMUX_COMPILE_WORKERS", "2")
    asked: list[int] = []
    monkeypatch.setattr(Workers, "finish", lambda workers: asked.append(workers._num_jobs))
    monkeypatch.setattr(Workers, "_serve", lambda workers: None)

    def fill(deterministic: bool = False) -> list[str]:
        """Two kernels; the keys that their code is kept by."""
        cache = KernelCache(deterministic=deterministic)
        lowered = [lower(traced(lambda x: x.relu() + 1, torch.zeros(4, n)), cache) for n in (3, 5)]
        kernels = [kernel for each in lowered for kernel in each.kernels]
        cache.fill(kernels)()
        return list(cache._stored_keys(kernels).values())

    for key in fill():
        remember(key, b"code")
    assert asked == [2]
    fill()
    assert asked == [2, 0]
    fill(deterministic=True)
    assert asked == [2, 0, 2]
    monkeypatch.setenv("TRAINMUX_COMPILE_WORKERS", "0")
    fill(deterministic=True)
    assert asked == [2, 0, 2, 0]


def test_workers_begin_while_other_kernels_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_known, "cache_folder", lambda: tmp_path)
    given: list[str] = []
    monkeypatch.setattr(Workers, "add", lambda workers, job: given.append(job[2]))
    served = Mock(return_value=None)
    monkeypatch.setattr(Workers, "__exit__", served)
    cache = KernelCache()

    def batches() -> Iterator[Sequence[Kernel]]:
        first, second = (lower(traced(lambda x: x.exp(), torch.zeros(n)), cache).kernels for n in (3, 5))
        yield first
        assert len(given) == 1
        yield [*first, *second]
        assert len(given) == 2
        served.assert_not_called()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.compile_batches(batches())
    served.assert_called_once()
