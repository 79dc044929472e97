"""Lowered steps on disk: a second start of the same fleet traces its model and goes on from there.

A stored step is found by everything that decides it: the member's graph with its constants, the width, the
update, the fleet's settings, the device, and the versions of torch and of this package's own source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainmux.engine import StepProgram, UpdateSettings
from trainmux.fleet._traces import graph_key
from trainmux.ir import FusionRecord, GraphInput, replace_file
from trainmux.lowering import KernelCache, Lowered, cache_folder, from_bytes, to_bytes
from trainmux.runtime import device_name, private_folder, source_version
from trainmux.tracing import TracedGraph

_ROOMS = ("engine", "fusion", "lowering", "runtime", "tracing", "fleet", "ir")
"""A step that another version of their source lowered is not taken."""


@dataclass(frozen=True)
class StoredStep:
    """A lowered step with what else a program needs. Lines of code in ``records`` are those of the day
    it was stored."""

    lowered: Lowered
    inputs: tuple[GraphInput, ...]
    metrics: tuple[str, ...]
    records: tuple[FusionRecord, ...]
    num_nodes: int

    def program(self, settings: UpdateSettings) -> StepProgram:
        """The step as a program."""
        return StepProgram(self.lowered.module, self.inputs, settings, self.metrics)


def step_key(traced: TracedGraph, *decisive: Any) -> str:
    """The key of a stored step; ``decisive`` are further values that decide it."""
    digest = hashlib.sha256(graph_key(traced).encode())
    for node in traced.module.graph.nodes:
        marks = [str(node.meta[mark]) for mark in ("recompute", "ac_graph_id") if mark in node.meta]
        value = node.meta.get("val") if node.op == "placeholder" else None
        shape = "" if value is None else f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
        digest.update(f"{node.name} {marks} {shape}\n".encode())
    named = [device_name(torch.device("cuda"))] if torch.cuda.is_available() else []
    everything = (*decisive, torch.__version__, named, source_version(*_ROOMS))
    digest.update(_canonical(everything).encode())
    return digest.hexdigest()


def store(key: str, step: StoredStep) -> None:
    """Write a step; a disk that is full or read-only only costs the next start its time.

    So does a graph that calls something which has no name to find it by again.
    """
    described = (step.inputs, step.metrics, step.records, step.num_nodes)
    try:
        data = pickle.dumps((described, to_bytes(step.lowered)))
    except (TypeError, AttributeError, pickle.PicklingError):
        return
    with suppress(OSError):
        replace_file(_path(key), lambda file: file.write(data), is_durable=False)


def load(key: str, cache: KernelCache, device: torch.device) -> StoredStep | None:
    """A stored step, or ``None`` where there is none that can be read."""
    try:
        (inputs, metrics, records, num_nodes), data = pickle.loads(_path(key).read_bytes())
        return StoredStep(from_bytes(data, cache, device), inputs, metrics, records, num_nodes)
    except Exception:
        # A file that was cut off or damaged can fail in any way; the step is then built again and rewritten.
        return None


def _path(key: str) -> Path:
    return private_folder(cache_folder() / "trainmux") / f"{key}.step"


def _canonical(value: Any) -> str:
    """Text that is the same in every process: sets and dicts in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f"{f.name}={_canonical(getattr(value, f.name))}" for f in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_canonical(k)}: {_canonical(v)}' for k, v in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_canonical, value)))}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_canonical, value))}]"
    return repr(value)
