"""The memory of one iteration of a job: tensor by tensor (Figures 1 and 2), and as the host sees it (3)."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainmux as tm
from trainmux.colocate._placement import Iteration, TensorClass, iteration_of_profile
from trainmux.profiling import analytic_profile, find_device

from .jobs import BenchJob, wait_for

NUM_POINTS = 400
_NUM_QUANTILES = 100
_NUM_WATCHED = 6
_SAMPLE_SECONDS = 2e-4
_MODELLED_DEVICE = "h200"
"""Kernel times are estimated for this device; they are scaled where the iteration itself was measured."""


def iteration_record(job: BenchJob) -> dict[str, Any]:
    """Describe an iteration of ``job``: lifespans of its tensors by class, and its bytes over time.

    Estimated kernel times are scaled so that the iteration takes as long as was measured.
    """
    iteration = _iteration(job.fleet, job.batches[0])
    begins = np.concatenate([[0.0], np.cumsum(iteration.kernel_seconds)])
    begins *= job.solo_seconds / begins[-1]
    rows = iteration.allocations
    first = np.array([row.allocated_by for row in rows])
    after = np.array([row.last_used_by + 1 for row in rows])
    sizes = np.array([row.size_bytes for row in rows])
    changes = np.zeros(len(begins), dtype=np.int64)
    np.add.at(changes, first, sizes)
    np.add.at(changes, after, -sizes)
    live = iteration.resident_bytes + np.cumsum(changes)
    classes = np.array([row.tensor_class for row in rows], dtype=object)
    is_map = classes == TensorClass.FEATURE_MAP
    groups = {"feature maps": is_map, "others": ~is_map & (classes != TensorClass.RESIDENT)}
    lifespans = begins[after] - begins[first]
    return {
        "seconds": float(begins[-1]),
        "lifespans": {name: _summary(lifespans[of], sizes[of]) for name, of in groups.items()},
        "lowest_bytes": int(live.min()),
        "peak_bytes": int(live.max()),
        "curve": _thinned(begins, live),
    }


def host_view(job: BenchJob) -> dict[str, Any]:
    """Bytes that torch's allocator has given out, by the host's clock, while plain torch trains ``job``.

    The host enqueues iterations one after another and waits for the device behind the last. On a CPU, where
    nothing is enqueued, these are the bytes of the process.
    """
    step, where = job.eager_step(), job.options.where
    samples: list[list[float]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_SAMPLE_SECONDS):
            sample()

    def sample() -> None:
        samples.append([time.perf_counter(), _given_out(where)])

    for number in range(_NUM_WATCHED):
        step(number)
    wait_for(where)
    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.perf_counter()
    sample()
    for number in range(_NUM_WATCHED):
        step(number)
    enqueued = time.perf_counter()
    wait_for(where)
    seconds = time.perf_counter() - begin
    is_over.set()
    watching.join()
    sample()
    curve = [[round(at - begin, 6), size] for at, size in samples if at >= begin]
    every = -(-len(curve) // NUM_POINTS) or 1
    return {"seconds": seconds, "enqueued_seconds": enqueued - begin, "curve": curve[::every]}


def _given_out(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _iteration(fleet: tm.Fleet, batch: Any) -> Iteration:
    """Read a step as co-location does. No public name offers this; all that it needs of inside is here."""
    pieces = fleet._in_segments()
    (part,) = pieces.begin(batch, applies=True)
    _, graph = part.kernels()
    device = find_device(_MODELLED_DEVICE)
    return iteration_of_profile(analytic_profile(graph, part.group.width, device, half=pieces.uses_half))


def _summary(seconds: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    places = np.linspace(0, 1, _NUM_QUANTILES + 1)
    return {
        "count": len(seconds),
        "bytes": int(sizes.sum()),
        "mean_seconds": float(seconds.mean()),
        "median_seconds": float(np.median(seconds)),
        "quantiles_seconds": np.quantile(seconds, places, method="nearest").tolist(),
        "median_bytes": float(np.median(sizes)),
    }


def _thinned(moments: np.ndarray, sizes: np.ndarray) -> list[list[float]]:
    """Keep at most `NUM_POINTS` moments: the highest in each of as many intervals, and the last."""
    places = np.minimum(NUM_POINTS - 2, (moments[:-1] / moments[-1] * (NUM_POINTS - 1)).astype(int))
    intervals = [np.flatnonzero(places == place) for place in np.unique(places)]
    highest = [inside[np.argmax(sizes[inside])] for inside in intervals]
    return [[float(moments[index]), int(sizes[index])] for index in (*highest, len(moments) - 1)]
