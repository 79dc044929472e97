"""The code of kernels is kept on disk and found again, by everything that decides it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lowering_tools import traced
from torch._inductor import config

from trainmux.lowering import KernelCache, Lowered, _inductor, _known, lower
from trainmux.lowering._inductor import _SELDOM_USED, LoadedCode, _without_unused_imports, surroundings
from trainmux.lowering._known import is_known, recall, remember, stored_key

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


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

    def refuse(*_: object) -> None:
        raise AssertionError("expected nothing to be compiled")

    monkeypatch.setattr(_inductor, "compile_graph", refuse)
    return copy


@needs_compiler
def test_a_second_process_would_load_and_not_compile(stored: Path) -> None:
    cache = KernelCache()
    lowered = lowered_in(cache)
    cache.compile(lowered.kernels)
    assert [kernel.failure for kernel in lowered.kernels] == [""]
    assert all(kernel.is_compiled for kernel in lowered.kernels)
    x = torch.randn(16, 8)
    torch.testing.assert_close(lowered.module(x), (x * 3).relu() + 1)
    assert isinstance(lowered.kernels[0]._compiled, LoadedCode)
    assert lowered.kernels[0].code() == b""  # nothing new to keep


LOADS = """
import sys
from pathlib import Path
from functools import partial
import torch
from trainmux.lowering import KernelCache, _inductor, _known
from trainmux.lowering._regions import from_payload

folder, key = Path(sys.argv[1]), sys.argv[2]
_known.cache_folder = lambda: folder
cache = KernelCache()
kernel = cache.kernel(key, partial(from_payload, (folder / "payload").read_bytes()))
cache.compile([kernel])
assert kernel.is_compiled, kernel.failure
assert isinstance(kernel._compiled, _inductor.LoadedCode)
x = torch.randn(16, 8)
(result,) = kernel.run([x])
torch.testing.assert_close(result, (x * 3).relu() + 1)
for part in ("compile_fx", "graph", "lowering", "select_algorithm"):
    assert f"torch._inductor.{part}" not in sys.modules, part
"""


@needs_compiler
@pytest.mark.slow
def test_a_new_process_loads_code_without_the_compiler(folder: Path) -> None:
    (kernel,) = lowered_in(KernelCache()).kernels
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADS, str(folder), kernel.key], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.parametrize("damage", ["cut off", "something else"])
@pytest.mark.filterwarnings("ignore:1 of 1 regions could not be compiled")
def test_damaged_code_is_not_taken(stored: Path, damage: str) -> None:
    (path,) = (stored / "trainmux").iterdir()
    path.write_bytes(path.read_bytes()[:-100] if damage == "cut off" else b"no pickle")
    cache = KernelCache()
    lowered = lowered_in(cache)
    cache.compile(lowered.kernels)  # tries to compile, which the fixture refuses
    assert "expected nothing to be compiled" in lowered.kernels[0].failure


@needs_compiler
@pytest.mark.filterwarnings("ignore:1 of 1 regions could not be compiled")
def test_code_of_other_settings_is_not_taken(stored: Path) -> None:
    cache = KernelCache(deterministic=True)
    lowered = lowered_in(cache)
    cache.compile(lowered.kernels)
    assert lowered.kernels[0].failure


def test_what_decides_the_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {surroundings()}
    assert found == {surroundings()}
    with config.patch(max_fusion_size=7):
        found.add(surroundings())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        found.add(surroundings())
    with monkeypatch.context() as patch:
        patch.setattr(_inductor, "_source_version", lambda: "changed")
        found.add(surroundings())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for name, capability in (("a", (9, 0)), ("b", (9, 0)), ("a", (8, 0))):
            patch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
            patch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
            found.add(surroundings())
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
        found.add(surroundings())
    assert len(found) == 8


def test_code_is_kept_by_region_and_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_known, "cache_folder", lambda: tmp_path)
    keys = {stored_key(region, around) for region in "ab" for around in "cd"}
    assert len(keys) == 4
    first, *others = keys
    remember(first, b"one")
    assert recall(first) == b"one"
    assert not any(is_known(key) or recall(key) for key in others)


def test_only_imports_that_nothing_uses_are_left_out() -> None:
    imports = "import torch\n" + "".join(_SELDOM_USED.values())
    assert (
        _without_unused_imports(imports + "assert_alignment = 1\n") == "import torch\nassert_alignment = 1\n"
    )
    used = imports + "def call(args):\n    extern_kernels.mm(args[0], args[1])\n    return align(3)\n"
    assert _without_unused_imports(used) == used
