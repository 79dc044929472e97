"""``trainmux doctor``: check what this machine has for training, and say what to do about what is missing.

Each check is a function of ``trainmux.MachineFacts`` alone, so that tests can describe any machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import trainmux as tm
from trainmux.sizes import format_bytes as size

SUPPORTED = {"Python": ((3, 11), (3, 14)), "torch": ((2, 11), (2, 16))}
"""From the first version, up to but without the second; as in pyproject.toml."""
LEAST_FREE_DEVICE_BYTES = 256 << 20
"""Library workspaces take 32 MiB for each stream; below this a fleet has no room."""
LEAST_FREE_DISK_BYTES = 1 << 30
IDLE_DEVICE_BYTES = 64 << 20
"""A driver keeps less than this for itself on an idle device."""
SHARED_LINK = 0.75
"""A copy direction below this share of its own rate while both are busy waits for the other one."""


class Level(StrEnum):
    """How good a finding is; with a problem, training does not work with its defaults."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was found; ``remedy`` is what to do about it, if it is not good."""

    level: Level
    text: str
    remedy: str = ""
    section: str = ""


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
problem = partial(Finding, Level.PROBLEM)


def run_doctor(*, quick: bool, json_file: Path | None) -> bool:
    """Check this machine, print and write the findings; say whether training can work."""
    console = Console(highlight=False)
    with console.status("checking this machine"):
        facts = tm.inspect_machine(measures=not quick)
    findings = check(facts)
    show(findings, facts, console)
    if json_file is not None:
        document = {
            "format": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "can_train": can_train(findings),
            "findings": [asdict(finding) for finding in findings],
            "facts": asdict(facts),
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(Text(f"written to {json_file}"))
    return can_train(findings)


def can_train(findings: Iterable[Finding]) -> bool:
    return all(finding.level is not Level.PROBLEM for finding in findings)


def show(findings: Sequence[Finding], facts: tm.MachineFacts, console: Console) -> None:
    """Print the findings by section, and one sentence about all of them."""
    for section, rows in groupby(findings, lambda finding: finding.section):
        table = Table.grid(padding=(0, 1))
        table.add_column(width=max(map(len, Level)), justify="right")
        table.add_column(overflow="fold")
        for row in rows:
            remedy = (f"\n> {row.remedy}" if row.remedy else "", "italic")
            table.add_row(Text(row.level, style=_STYLES[row.level]), Text.assemble(row.text, remedy))
        console.print(Text(section, style="bold"), table)
    counted = Counter(finding.level for finding in findings)
    counts = [_counted(counted[bad], bad) for bad in (Level.PROBLEM, Level.NOTE) if counted[bad]]
    verdict = f"Training works here, on {facts.device}" if can_train(findings) else "Training cannot work"
    told = f"{verdict}: {', '.join(counts) or 'nothing to note'} ({facts.seconds:.1f} s)."
    console.print(Text(f"\n{told}", "bold"))


def check_versions(facts: tm.MachineFacts) -> Iterator[Finding]:
    yield ok(f"trainmux {facts.packages.get('trainmux') or tm.__version__} on {facts.system}")
    for name, found in (("Python", facts.python), ("torch", facts.torch)):
        first, end = SUPPORTED[name]
        supported = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
        limits = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        remedy = f"pip install 'torch{limits}'" if name == "torch" else f"use Python {supported}"
        match = re.match(r"(\d+)\.(\d+)", found)
        number = tuple(map(int, match.groups())) if match else ()
        if number and number < first:
            yield problem(f"{name} {found} is too old: trainmux needs {supported}", remedy)
        elif not number or number >= end:
            yield note(f"{name} {found} is untested: trainmux is tested with {supported}", remedy)
        else:
            yield ok(f"{name} {found}")
    cuda, driver = facts.cuda, facts.driver.version
    parts = {"CUDA": cuda.built_for, "cuDNN": cuda.cudnn, "Triton": facts.triton, "NVIDIA driver": driver}
    yield ok(", ".join(f"{name} {found}" if found else f"no {name}" for name, found in parts.items()))


def check_device(facts: tm.MachineFacts) -> Iterator[Finding]:
    for gpu in facts.cuda.gpus:
        free = "" if gpu.free_bytes is None else f", {size(gpu.free_bytes)} free"
        text = f"cuda:{gpu.index} {gpu.name}, compute {gpu.capability}, {size(gpu.memory_bytes)}{free}"
        if gpu.free_bytes is not None and gpu.free_bytes < LEAST_FREE_DEVICE_BYTES:
            yield problem(f"{text}: too little to train", "end what else runs on it, or use another device")
        elif gpu.others_bytes is None:
            yield ok(f"{text}; unknown whether other processes use it")
        elif gpu.others_bytes > IDLE_DEVICE_BYTES:
            remedy = "leave the device to one process, or give a budget below what is free"
            yield note(f"{text}; other processes use {size(gpu.others_bytes)}", remedy)
        else:
            yield ok(f"{text}; idle")
        if "exclusive" in gpu.compute_mode.lower():
            text = f"cuda:{gpu.index} takes one process at a time (compute mode {gpu.compute_mode})"
            yield note(text, f"nvidia-smi -i {gpu.index} -c DEFAULT lets several processes use it")
    if not facts.cuda.gpus:
        yield _missing_device(facts)


def _missing_device(facts: tm.MachineFacts) -> Finding:
    """Explain why there is no GPU; training works on the CPU, so only a broken GPU is a problem."""
    cuda, driver, error = facts.cuda, facts.driver, _clause(facts.cuda.error)
    listed = ", ".join(gpu.name for gpu in driver.gpus)
    has = f"the driver has {listed}, but"
    if listed and "out of memory" in error.lower():
        return problem(f"{has} no memory is left on it", "end what else runs on it")
    if not listed and driver.version:
        why = f"NVIDIA driver {driver.version} has no device here ({_clause(driver.error)}; torch: {error})"
        remedy = "give this machine or container a device, for docker with --gpus all"
    elif not listed:
        why = f"there is no GPU ({error})"
        remedy = "to plan for a GPU without having one: trainmux plan FILE:NAME --device a100-40gb"
    elif not cuda.built_for:
        why, remedy = f"{has} this torch was built without CUDA", "install a build of torch with CUDA"
    elif cuda.visible_devices is not None and cuda.visible_devices.strip() in ("", "-1"):
        why = f"CUDA_VISIBLE_DEVICES={cuda.visible_devices!r} hides {listed}"
        remedy = "unset CUDA_VISIBLE_DEVICES"
    else:
        remedy = f"update the driver to one for CUDA {cuda.built_for}, or install a torch for this driver"
        return problem(f"{has} torch cannot use it: {error}", remedy)
    return note(f"training runs on the CPU: {why}", remedy)


def check_host(facts: tm.MachineFacts) -> Iterator[Finding]:
    host, pinnable = facts.host, facts.host.pinnable_bytes
    text = _counted(host.num_cpus, "core")
    text += ", unknown memory" if host.memory_bytes is None else f", {size(host.memory_bytes)} of memory"
    text += "" if host.available_bytes is None else f", {size(host.available_bytes)} available"
    text += "" if host.limit_bytes is None else f", limited to {size(host.limit_bytes)} by a control group"
    yield ok(text)
    if pinnable is None:
        remedy = "give plans a device of your own (tm.Device) with host_bytes to limit what they offload"
        yield note("how much memory may be pinned is not known", remedy)
    elif pinnable < max((gpu.memory_bytes for gpu in facts.cuda.gpus), default=0):
        so = "less than the device has, so plans for small budgets recompute more"
        remedy = "give this machine, container or job more memory"
        yield note(f"{size(pinnable)} may be pinned to offload to: {so}", remedy)
    else:
        yield ok(f"{size(pinnable)} may be pinned to offload to")


def check_compilers(facts: tm.MachineFacts) -> Iterator[Finding]:
    if facts.cuda.gpus and facts.region_error:
        remedy = "install the Triton that belongs to this torch (pip install triton)"
        yield note(f"steps stay on ATen's slower kernels: {_clause(facts.region_error)}", remedy)
    elif facts.cuda.gpus and not facts.c_compiler:
        yield note("Triton needs a C compiler to build kernel launchers", "install gcc or clang")
    elif facts.cuda.gpus:
        yield ok(f"Triton compiles for {facts.device}, with {facts.c_compiler}")
    broken = f'lowering="inductor" does not work on the CPU: {_clause(facts.cpp_error)}'
    yield note(broken, "install g++ or clang++") if facts.cpp_error else ok("C++ compiles for the CPU")


def check_rates(facts: tm.MachineFacts) -> Iterator[Finding]:
    if facts.rates_error:
        remedy = "free memory on the device and the host, and run this again"
        yield note(f"nothing could be measured: {_clause(facts.rates_error)}", remedy)
    if facts.rates is None:
        return
    kind, link = "device" if facts.cuda.gpus else "host", facts.rates.link
    yield ok(f"{kind} memory {_rate(facts.rates.memory)} (read and written by a copy)")
    if facts.cuda.gpus:
        each = f"out {_rate(link.out)}, in {_rate(link.into)}"
        both = f"out {_rate(link.out_duplex)}, in {_rate(link.into_duplex)}"
        text = f"link to the host: {each}; both at once: {both}"
        is_shared = min(link.out_duplex / link.out, link.into_duplex / link.into) < SHARED_LINK
        remedy = "if offloading matters, give the device a slot of its own and keep other traffic off it"
        yield note(f"{text}: the directions slow each other down", remedy) if is_shared else ok(text)


def check_capture(facts: tm.MachineFacts) -> Iterator[Finding]:
    if not (cuda := facts.cuda).gpus:
        return
    for what, error in (("CUDA graphs", cuda.graphs_error), ("memory pools (MemPool)", cuda.pool_error)):
        remedy = 'update the driver and torch; until then train with engine="reference"'
        yield problem(f"{what} cannot be used: {_clause(error)}", remedy) if error else ok(f"{what} work")
    settings = ", ".join([cuda.allocator, *(f"{name}={value}" for name, value in cuda.allocator_settings)])
    remedy = f"unset {' and '.join(name for name, _ in cuda.allocator_settings) or 'what changes it'}"
    untested = note(f"only the defaults of torch's allocator are tested, not {settings}", remedy)
    yield ok("torch's allocator has its default settings") if settings == "native" else untested
    if cuda.is_mps_running:
        text = "MPS is running: other processes may compute on the device at the same time"
        yield note(text, "stop it before measuring: echo quit | nvidia-cuda-mps-control")


def check_caches(facts: tm.MachineFacts) -> Iterator[Finding]:
    for cache in facts.caches:
        folder = cache.folder
        most = "" if folder.is_whole else "more than "
        held = f"{most}{_counted(folder.num_files, 'file')}, {most}{size(folder.size_bytes)}"
        text = f"{cache.keeps}: {held if folder.exists else 'nothing yet'}, in {folder.path or 'no folder'}"
        remedy = f"set {cache.variable} to a folder on a disk with room that can be written to"
        if folder.write_error and cache.needed and not folder.exists:
            yield problem(f"{text}, which cannot be created: {_clause(folder.write_error)}", remedy)
        elif folder.write_error:
            yield note(f"{text}, which cannot be written to: {_clause(folder.write_error)}", remedy)
        elif folder.free_bytes is not None and folder.free_bytes < LEAST_FREE_DISK_BYTES:
            yield note(f"{text}, on a disk with only {size(folder.free_bytes)} left", remedy)
        else:
            yield ok(text)


CHECKS = {
    "Versions": check_versions,
    "Device": check_device,
    "Host": check_host,
    "Compilers": check_compilers,
    "Bandwidth": check_rates,
    "CUDA graphs": check_capture,
    "Caches": check_caches,
}


def check(facts: tm.MachineFacts) -> tuple[Finding, ...]:
    """Run all checks, section by section."""
    return tuple(replace(found, section=section) for section, one in CHECKS.items() for found in one(facts))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.1f} GB/s"


def _clause(message: str) -> str:
    """Somebody else's message, to stand within a sentence of ours."""
    return message.strip().rstrip(".") or "no reason given"
