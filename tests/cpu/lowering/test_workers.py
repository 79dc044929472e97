"""Compile workers: messages, workers that die, and one that really compiles."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lowering_tools import traced

from trainmux.lowering import KernelCache, _compile, _known, _workers, lower
from trainmux.lowering._compile import Kernel
from trainmux.lowering._known import is_known, recall, remember
from trainmux.lowering._workers import compile_in_workers, receive, send

ECHO = """
import sys
from trainmux.lowering._workers import receive, send
left = int(sys.argv[1])
while left:
    try:
        payload, combines = receive(sys.stdin.buffer)
    except EOFError:
        break
    send(sys.stdout.buffer, "" if payload != b"bad" else "cannot")
    left -= 1
"""


def test_messages_arrive_as_they_were_sent() -> None:
    stream = io.BytesIO()
    messages = [b"", (b"x" * 100_000, True), "", "failed: \n ü"]
    for message in messages:
        send(stream, message)
    stream.seek(0)
    assert [receive(stream) for _ in messages] == messages
    with pytest.raises(EOFError, match="has gone"):
        receive(stream)


@pytest.mark.parametrize("cut", [1, 20])
def test_half_a_message_is_the_end(cut: int) -> None:
    stream = io.BytesIO()
    send(stream, b"some bytes that take more than twenty")
    with pytest.raises(EOFError, match="has gone"):
        receive(io.BytesIO(stream.getvalue()[:cut]))


def started(monkeypatch: pytest.MonkeyPatch, *lives: int) -> None:
    """Workers that answer so many messages and die; no torch in them."""
    waiting = list(lives)
    root = str(Path(_workers.__file__).parents[2])
    # The package's own __init__ would import torch: a few seconds for each worker.
    program = ECHO.replace(
        "from trainmux.lowering._workers import receive, send",
        f"import importlib.util as u; s = u.spec_from_file_location('w', {_workers.__file__!r})\n"
        "w = u.module_from_spec(s); s.loader.exec_module(w); receive, send = w.receive, w.send",
    )

    def start(_: bool) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(waiting.pop())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=root),
        )

    monkeypatch.setattr(_workers, "_started", start)


def compile_all(payloads: list[bytes], num_workers: int) -> int:
    return compile_in_workers(
        payloads, num_workers=num_workers, deterministic=False, combines=[False] * len(payloads)
    )


def test_workers_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 100, 100)
    assert compile_all([b"%d" % i for i in range(20)], 2) == 20


def test_a_failure_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 100)
    assert compile_all([b"good", b"bad", b"good"], 1) == 2


def test_a_worker_that_dies_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 3)
    assert compile_all([b"%d" % i for i in range(10)], 1) == 3
    started(monkeypatch, 0, 0)
    assert compile_all([b"1", b"2"], 2) == 0


def test_few_kernels_are_not_worth_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: bool) -> subprocess.Popen[bytes]:
        raise AssertionError("expected no worker")

    monkeypatch.setattr(_workers, "_started", refuse)
    cache = KernelCache()
    lowered = lower(traced(lambda x: x.relu() + 1, torch.zeros(4)), cache)
    cache.fill(lowered.kernels)()
    assert not lowered.kernels[0].is_claimed


def test_what_lies_in_the_cache_needs_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINMUX_COMPILE_WORKERS", "2")
    asked: list[int] = []

    def count(payloads: list[bytes], **_: object) -> int:
        asked.append(len(payloads))
        return 0

    monkeypatch.setattr(_compile, "compile_in_workers", count)
    monkeypatch.setattr(_compile, "_MIN_FOR_WORKER", 1)

    def kernels(deterministic: bool) -> tuple[KernelCache, tuple[Kernel, ...]]:
        cache = KernelCache(deterministic=deterministic)
        tensors = [torch.zeros(4, n) for n in (3, 5)]
        lowered = [lower(traced(lambda x: x.relu() + 1, x), cache) for x in tensors]
        return cache, tuple(kernel for one in lowered for kernel in one.kernels)

    cache, found = kernels(deterministic=False)
    cache.fill(found)()
    assert asked == [2]
    for key in cache._stored_keys(found).values():
        remember(key, b"code")
    cache, found = kernels(deterministic=False)
    cache.fill(found)()
    assert asked == [2]
    cache, found = kernels(deterministic=True)
    cache.fill(found)()
    assert asked == [2, 2]


def test_a_full_disk_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(_known, "cache_folder", lambda: in_the_way)
    remember("key", b"code")
    assert not is_known("key")
    assert recall("key") == b""


LOADS = """
import torch
from torch._dynamo.utils import counters
from lowering_tools import traced
from trainmux.lowering import KernelCache, lower
from trainmux.lowering._known import is_known
from trainmux.lowering._workers import compile_in_workers

cache = KernelCache()
lowered = lower(traced(lambda x: (x * 3).relu() + 1, torch.zeros(64, 8)), cache)
(kernel,) = lowered.kernels
assert compile_in_workers([kernel.payload()], num_workers=1, deterministic=False, combines=[False]) == 1
counters.clear()
cache.compile([kernel])
assert kernel.is_compiled, kernel.failure
assert is_known(*cache._stored_keys([kernel]).values())
assert counters["inductor"]["fxgraph_cache_hit"] == 1, counters["inductor"]
x = torch.randn(64, 8)
assert torch.equal(lowered.module(x), (x * 3).relu() + 1)
"""


@pytest.mark.slow
def test_what_a_worker_compiled_is_loaded_from_the_cache(tmp_path: Path) -> None:
    """In a process of its own: torch's switches, which other tests turn, are part of the compiler's key."""
    here, package = Path(__file__).parent, Path(_workers.__file__).parents[2]
    environment = dict(
        os.environ,
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
        PYTHONPATH=os.pathsep.join((str(here), str(package))),
    )
    done = subprocess.run(
        [sys.executable, "-c", LOADS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
