"""``trainmux doctor``: on this machine, and on machines that are played."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import trainmux as tm
from trainmux import runtime
from trainmux.cli import doctor
from trainmux.cli._app import app
from trainmux.cli.doctor import Finding, Level, check
from trainmux.fleet import CacheFacts, Rates, _machine
from trainmux.profiling import LinkRates
from trainmux.runtime import CudaFacts, DriverFacts, FolderFacts, GpuFacts, HostFacts, ListedGpu, _gpu, _host

GIB = 1 << 30
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

GPU = GpuFacts(0, "Some GPU", "9.0", 80 * GIB, 79 * GIB, 5 << 20, "Default")
LISTED = ListedGpu("GPU-0123", "Some GPU", 80 * GIB, 5 << 20, "Default")
FOLDER = FolderFacts("/somewhere/kept", True, 12, 3 << 20, True, 100 * GIB, "")
RATES = Rates(LinkRates(55e9, 54e9, 51e9, 50e9), 4e12, 256 << 20)
HEALTHY = tm.MachineFacts(
    python="3.11.7",
    system="Linux",
    torch="2.11.0+cu130",
    triton="3.6.0",
    packages={"trainmux": "1.0"},
    device="cuda:0",
    host=HostFacts(16, 128 * GIB, 120 * GIB, None, None, None),
    driver=DriverFacts("580.1", (LISTED,), ""),
    cuda=CudaFacts("13.0", "9.1.0", "", (GPU,), "", "", "native", (), None, True, False),
    region_error="",
    cpp_error="",
    c_compiler="/usr/bin/gcc",
    caches=(
        CacheFacts("profiles", "TRAINMUX_PROFILE_DIR", False, FOLDER),
        CacheFacts("compiler", "TORCHINDUCTOR_CACHE_DIR", True, FOLDER),
    ),
    rates=RATES,
    rates_error="",
    seconds=1.5,
)
NO_GPU = replace(HEALTHY.cuda, gpus=(), error="No CUDA GPUs are available")


def machine(**parts: Any) -> tm.MachineFacts:
    """The healthy one with other facts; for the host, CUDA, its GPU or the folder, only what is changed."""
    if "gpu" in parts:
        parts["cuda"] = {"gpus": (replace(GPU, **parts.pop("gpu")),)}
    if "folder" in parts:
        folder = replace(FOLDER, **parts.pop("folder"))
        parts["caches"] = tuple(replace(cache, folder=folder) for cache in HEALTHY.caches)
    for name in parts.keys() & {"host", "cuda"}:
        parts[name] = replace(getattr(HEALTHY, name), **parts[name])
    return replace(HEALTHY, **parts)


def without_device(cuda: CudaFacts = NO_GPU, driver: DriverFacts = HEALTHY.driver) -> tm.MachineFacts:
    return replace(HEALTHY, device="cpu", cuda=cuda, driver=driver, rates=None)


def complaints(facts: tm.MachineFacts) -> list[Finding]:
    return [finding for finding in check(facts) if finding.level is not Level.OK]


def as_text(facts: tm.MachineFacts) -> str:
    console = Console(width=400, highlight=False)
    with console.capture() as captured:
        doctor.show(check(facts), facts, console)
    return captured.get()


def test_a_healthy_machine_has_nothing_to_note() -> None:
    assert complaints(HEALTHY) == []
    text = as_text(HEALTHY)
    for said in (
        *("torch 2.11.0+cu130", "CUDA 13.0", "cuDNN 9.1.0", "Triton 3.6.0", "driver 580.1"),
        *("cuda:0 Some GPU", "80.00 GiB", "79.00 GiB free", "idle", "120.00 GiB may be pinned"),
        *("out 55.0 GB/s", "in 54.0 GB/s", "out 51.0 GB/s", "in 50.0 GB/s", "4,000.0 GB/s"),
        *("CUDA graphs work", "(MemPool) work", "default settings", "12 files, 3.0 MiB", "/somewhere/kept"),
        *("nothing to note", "on cuda:0"),
    ):
        assert said in text, said


NOTES = [
    (machine(torch="3.0.0a0"), "torch 3.0.0a0 is untested"),
    (machine(torch="unknown"), "torch unknown is untested"),
    (machine(python="3.14.0"), "Python 3.14.0 is untested"),
    (without_device(replace(NO_GPU, built_for="")), "this torch was built without CUDA"),
    (without_device(replace(NO_GPU, visible_devices="")), "CUDA_VISIBLE_DEVICES='' hides Some GPU"),
    (without_device(driver=DriverFacts("580.1", (), "No devices")), "(No devices; torch:"),
    (without_device(driver=DriverFacts("", (), "there is no driver")), "there is no GPU"),
    (machine(gpu={"others_bytes": 3 * GIB}), "other processes use 3.00 GiB"),
    (machine(gpu={"compute_mode": "Exclusive_Process"}), "one process at a time"),
    (machine(host={"available_bytes": 16 * GIB}), "16.00 GiB may be pinned"),
    (machine(host={"limit_bytes": 64 * GIB, "limit_left_bytes": 60 * GIB}), "60.00 GiB may be pinned"),
    (machine(host={"available_bytes": None}), "may be pinned is not known"),
    (machine(region_error="Triton is not installed"), "ATen's slower kernels"),
    (machine(c_compiler=""), "needs a C compiler"),
    (machine(cpp_error="there is no C++ compiler"), "there is no C++ compiler"),
    (machine(rates=replace(RATES, link=LinkRates(20e9, 20e9, 10e9, 10e9))), "slow each other down"),
    (machine(rates=None, rates_error="out of memory"), "be measured: out of memory"),
    (machine(cuda={"allocator_settings": (("ALLOC_CONF", "a:True"),)}), "ALLOC_CONF=a:True"),
    (machine(cuda={"allocator": "cudaMallocAsync"}), "cudaMallocAsync"),
    (machine(cuda={"is_mps_running": True}), "MPS is running"),
    (machine(folder={"write_error": "Read-only file system"}), "to: Read-only file system"),
    (machine(folder={"free_bytes": 5 << 20}), "a disk with only 5.0 MiB left"),
]
PROBLEMS = [
    (machine(torch="2.4.1"), "torch 2.4.1 is too old: trainmux needs 2.11 to 2.15"),
    (machine(python="3.10.2"), "Python 3.10.2 is too old"),
    (without_device(), "torch cannot use it: No CUDA GPUs are available"),
    (without_device(replace(NO_GPU, error="CUDA out of memory. Tried")), "no memory is left"),
    (machine(gpu={"free_bytes": 100 << 20, "others_bytes": 79 * GIB}), "too little to train"),
    (machine(cuda={"graphs_error": "operation not permitted"}), "CUDA graphs cannot be used"),
    (machine(cuda={"pool_error": "no attribute MemPool"}), "memory pools (MemPool) cannot be used"),
    (machine(folder={"exists": False, "write_error": "Denied"}), "cannot be created: Denied"),
]


@pytest.mark.parametrize(("facts", "said"), [*NOTES, *PROBLEMS])
def test_what_is_not_good_is_said_with_a_remedy(facts: tm.MachineFacts, said: str) -> None:
    level = Level.PROBLEM if (facts, said) in PROBLEMS else Level.NOTE
    found = complaints(facts)
    assert {finding.level for finding in found if said in finding.text} == {level}
    assert all(finding.remedy for finding in found)
    assert doctor.can_train(check(facts)) is (level is not Level.PROBLEM)


def test_only_what_was_found_out_is_said_without_a_gpu_and_without_measurements() -> None:
    facts = without_device(replace(NO_GPU, built_for="", error="no CUDA"), DriverFacts("", (), "no driver"))
    assert {finding.section for finding in check(facts)}.isdisjoint({"CUDA graphs", "Bandwidth"})
    assert "Training works here, on cpu" in as_text(facts)
    assert "host memory" in as_text(replace(facts, rates=RATES))
    assert "link" not in as_text(replace(facts, rates=RATES))


def test_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    for name, (first, end) in doctor.SUPPORTED.items():
        limits = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        assert f"{name}{limits}" in [*project["dependencies"], f"Python{project['requires-python']}"]


def test_a_machine_that_cannot_train_ends_with_status_1_and_writes_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = machine(torch="2.4.1")
    monkeypatch.setattr(tm, "inspect_machine", lambda *, measures: broken if measures else None)
    file = tmp_path / "new" / "doctor.json"
    result = CliRunner().invoke(app, ["doctor", "--json", str(file)])
    assert result.exit_code == 1
    assert "Training cannot work: 1 problem (" in result.output
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["can_train"] is False
    (worst,) = [finding for finding in written["findings"] if finding["level"] == "problem"]
    assert worst["remedy"] == "pip install 'torch>=2.11,<2.16'"
    assert written["facts"]["rates"]["link"]["out"] == 55e9
    assert written["facts"].keys() == {field.name for field in dataclasses.fields(tm.MachineFacts)}
    assert CliRunner().invoke(app, ["doctor", "--json", str(tmp_path)]).exit_code == 2  # a folder


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    result = CliRunner().invoke(app, ["doctor", "--quick", "--json", str(tmp_path / "facts.json")])
    assert result.exit_code == 0, result.output
    assert f"torch {torch.__version__}" in result.output
    facts = json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))["facts"]
    assert facts["rates"] is None
    assert facts["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    kept = {cache["keeps"]: cache["folder"] for cache in facts["caches"]}
    assert kept["profiles"]["path"] == str(tmp_path / "profiles")
    assert not (tmp_path / "profiles").exists(), "expected that looking leaves nothing behind"
    assert {"plans", "programs", "kernels", "compiler"} < kept.keys()


# ---- how facts are found: rates, caches, the driver, torch, the host, folders -----------------------------


def test_rates_are_measured_within_what_is_free_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(free_bytes: int) -> tuple[Rates | None, str]:
        host = machine(host={"available_bytes": free_bytes}).host
        return _machine._measure(torch.device("cpu"), host, NO_GPU)

    rates, error = measure(16 << 20)
    assert rates is not None
    assert (rates.num_bytes, error) == (2 << 20, "")
    link = rates.link
    assert min(rates.memory, link.out, link.into, link.out_duplex, link.into_duplex) > 0
    assert measure(1 << 20)[0] is None

    def fail(device: torch.device, num_bytes: int) -> float:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(_machine, "probe_memory", fail)
    assert measure(GIB) == (None, "CUDA error: out of memory")


def test_a_cache_folder_that_cannot_be_made_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise PermissionError(13, "Permission denied", "/closed/folder")

    monkeypatch.setattr(_machine, "cache_folder", refuse)
    compiler = _machine._caches()[-1]
    assert (compiler.folder.path, compiler.folder.exists) == ("/closed/folder", False)
    assert not doctor.can_train(check(machine(caches=(compiler,))))


LISTS = """cat <<'END'
GPU-0123, Some GPU, 81920, 5, Default, 580.1
GPU-4567, Other GPU, [N/A], [N/A], Exclusive_Process, 580.1
END"""
OTHER = ListedGpu("GPU-4567", "Other GPU", None, None, "Exclusive_Process")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (LISTS, ""),
        ("echo 'No devices were found'; exit 6", "No devices were found"),
        ("echo 'Failed to start' >&2; exit 9", "Failed to start"),
        ("exit 0", "nvidia-smi listed no device"),
        ("exec sleep 5", "nvidia-smi gave no answer in 0.2 s"),
        ("", "there is no driver"),
    ],
)
def test_the_driver_lists_its_devices_or_says_why_not(
    script: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    monkeypatch.setattr(_gpu, "_SMI_SECONDS", 0.2 if "sleep" in script else 5.0)
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Mon Jan 1\nGCC\n"
        )
    gpus, version = ((LISTED, OTHER), "580.1") if script == LISTS else ((), "570.86.15" if script else "")
    assert runtime.ask_driver(tmp_path) == DriverFacts(version, gpus, error)


def test_a_broken_cuda_is_told_without_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        warnings.warn("CUDA initialization: forward compatibility was attempted", stacklevel=1)
        raise RuntimeError("No CUDA GPUs are available\nsecond line")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    cuda = runtime.look_at_cuda(HEALTHY.driver)
    assert (cuda.error, cuda.gpus, cuda.graphs_error) == ("No CUDA GPUs are available", (), "")
    assert cuda.allocator_settings == (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
    assert cuda.is_mps_running


VERSION_2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/memory.max": "600000\n",
    "sys/fs/cgroup/jobs/memory.current": "300000\n",
    "sys/fs/cgroup/jobs/memory.stat": "anon 1\ninactive_file 100000\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:cpu,memory:/not/mounted/here\n1:cpu:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "600000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 100000\n",
}
UNLIMITED = VERSION_1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}


@pytest.mark.parametrize(
    ("files", "limit", "pinnable"),
    [(VERSION_2, 600_000, 400_000), (VERSION_1, 600_000, 400_000), (UNLIMITED, None, 921_600)],
    ids=["version 2", "version 1", "unlimited"],
)
def test_a_control_group_limits_what_may_be_pinned(
    files: dict[str, str], limit: int | None, pinnable: int, tmp_path: Path
) -> None:
    assert runtime.look_at_host(tmp_path).pinnable_bytes is None  # nothing is known
    meminfo = "MemTotal:       1000 kB\nMemAvailable:    900 kB\nHugePages_Total:       0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    host = runtime.look_at_host(tmp_path)
    assert (host.memory_bytes, host.available_bytes) == (1_024_000, 921_600)
    assert (host.limit_bytes, host.pinnable_bytes) == (limit, pinnable)


def test_folders_are_counted_and_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("0.step", "1.step", "deep/other"):
        (tmp_path / name).write_bytes(bytes(10))
    steps, everything = runtime.look_at_folder(tmp_path, "*.step"), runtime.look_at_folder(tmp_path)
    assert (steps.num_files, steps.size_bytes, steps.is_whole, steps.write_error) == (2, 20, True, "")
    assert everything.num_files == 3
    assert steps.free_bytes is not None
    assert len(list(tmp_path.iterdir())) == 3, "expected that nothing is left behind"
    monkeypatch.setattr(_host, "_MAX_FILES", 1)
    bounded = runtime.look_at_folder(tmp_path, "*.step")
    assert (bounded.num_files, bounded.is_whole) == (1, False)
    in_the_way = runtime.look_at_folder(tmp_path / "0.step" / "below")
    assert not in_the_way.exists
    assert "is not a folder" in in_the_way.write_error

    def full(dir: Path) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_host.tempfile, "TemporaryFile", full)
    assert runtime.look_at_folder(tmp_path).write_error == "No space left on device"
