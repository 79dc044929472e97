"""What compiled `vmap` cannot go below for a convolutional model: its convolutions, and nothing else.

    python benchmarks/vmap_convolutions.py resnet101 mobilenet_v3_large --out vmap_convolutions.json

`torch.compile` of a vmapped step takes many minutes for such models (`trainmux bench step` gives up), but
it calls the same convolutions of the library as eager `vmap`: grouped ones, groups for every member. Here
the calls of one such step are listed and replayed by themselves in a CUDA graph, each in its own layout and
in contiguous and channels-last ones; the quickest of these counts for each call. Beside it, in the same
process, the whole eager step. small:NAME workloads try it out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.bench.cases import find_case
from benchmarks.bench.environment import describe
from benchmarks.bench.job import Job
from benchmarks.bench.measure import make_setup
from benchmarks.bench.timing import seconds_of, time_blocks
from benchmarks.bench.ways import stacked
from benchmarks.bench.ways._capture import capture

CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
NUM_BLOCKS = 5


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def in_format(self, memory_format: torch.memory_format) -> Shape:
        if len(self.sizes) != 4:
            return self
        made = torch.empty(self.sizes, dtype=self.dtype, device="meta", memory_format=memory_format)
        return _shape(made)


LAYOUTS: Mapping[str, Callable[[Shape], Shape]] = {
    "as called": lambda shape: shape,
    "contiguous": lambda shape: shape.in_format(torch.contiguous_format),
    "channels last": lambda shape: shape.in_format(torch.channels_last),
}


@dataclass(frozen=True)
class Call:
    operator: Any
    arguments: tuple[Any, ...]


class Listing(TorchDispatchMode):
    """Counts the convolutions that are called, below `vmap` and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, tuple[Call, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in CONVOLUTIONS:
            arguments = tree_map_only(Tensor, _shape, args)
            call = Call(func, arguments)
            _, count = self.counts.get(repr(call), (call, 0))
            self.counts[repr(call)] = (call, count + 1)
        return func(*args, **(kwargs or {}))


def _shape(tensor: Tensor) -> Shape:
    return Shape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def seconds_of_call(call: Call, device: torch.device) -> float:
    """Median seconds of one call among many in a graph, on random values."""

    def make(shape: Shape) -> Tensor:
        last = sum((size - 1) * stride for size, stride in zip(shape.sizes, shape.strides, strict=True))
        values = torch.randn(last + 1, device=device).to(shape.dtype)
        return values.as_strided(shape.sizes, shape.strides)

    arguments = tree_map_only(Shape, make, call.arguments)

    def run(number: int = 1) -> Any:
        for _ in range(number):
            call.operator(*arguments)

    run()  # the first one tries algorithms
    if device.type != "cuda":
        return statistics.median(seconds_of(run, device) for _ in range(NUM_BLOCKS))
    number = max(1, min(20, round(2e-3 / seconds_of(run, device))))
    graph, _ = capture(partial(run, number), device)
    graph.replay()
    return statistics.median(seconds_of(graph.replay, device) for _ in range(NUM_BLOCKS)) / number


def measure(name: str, num_members: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds per member and step: the eager step, and its convolutions alone."""
    torch.backends.cudnn.benchmark = True
    batch_size = find_case(name).batch_sizes[0]
    job = Job(name, batch_size, num_members, "eager_vmap", str(device), NUM_BLOCKS, 0.2, "")
    setup, batches = make_setup(job, num_members, device)
    prepared = stacked.prepare_eager(setup)
    prepared.step(batches[0])
    listing = Listing()
    with listing:
        prepared.step(batches[0])
    blocks = time_blocks(prepared.step, batches, device, NUM_BLOCKS, 0.2)
    del prepared, setup
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    for call, count in listing.counts.values():
        known: dict[str, float] = {}
        seconds = {}
        for layout, in_layout in LAYOUTS.items():
            laid_out = Call(call.operator, tree_map_only(Shape, in_layout, call.arguments))
            key = repr(laid_out)
            if key not in known:
                known[key] = seconds_of_call(laid_out, device)
            seconds[layout] = known[key]
        rows.append({"call": repr(call), "count": count, "seconds": seconds})
    totals = {
        layout: 1e3 * sum(row["count"] * row["seconds"][layout] for row in rows) / num_members
        for layout in LAYOUTS
    }
    least = 1e3 * sum(row["count"] * min(row["seconds"].values()) for row in rows) / num_members
    return {
        "workload": name,
        "batch_size": batch_size,
        "num_members": num_members,
        "eager_vmap_ms": 1e3 * statistics.median(blocks.step_seconds) / num_members,
        "num_convolutions": sum(row["count"] for row in rows),
        "convolutions_ms": totals,
        "least_convolutions_ms": least,
        "calls": rows,
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(words)
    found: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/vmap_convolutions.py", *(words or sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe(arguments.device),
        "results": [],
    }
    for name in arguments.workloads:
        result = measure(name, arguments.members, torch.device(arguments.device))
        found["results"].append(result)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        shown = {key: value for key, value in result.items() if key != "calls"}
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
