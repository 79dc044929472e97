"""The memory of one iteration of a job, tensor by tensor: Figures 1, 2 and 6."""

from __future__ import annotations

from typing import Any

import numpy as np

import trainmux as tm
from trainmux.colocate._feature_maps import Iteration, TensorClass, iteration_of_profile
from trainmux.profiling import analytic_profile, find_device

from .jobs import BenchJob

NUM_POINTS = 400
_NUM_QUANTILES = 100
_MODELLED_DEVICE = "h200"
"""Kernel times are estimated for this device; they are scaled where the iteration itself was measured."""


def iteration_record(job: BenchJob, seconds: float | None) -> dict[str, Any]:
    """Describe an iteration of ``job``: lifespans of its tensors by class, and its bytes over time.

    Estimated kernel times are scaled so that the iteration takes ``seconds``, where that was measured.
    """
    iteration = _iteration(job.fleet, job.batches[0])
    begins = np.concatenate([[0.0], np.cumsum(iteration.kernel_seconds)])
    if seconds is not None:
        begins *= seconds / begins[-1]
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
        "is_scaled": seconds is not None,
        "lifespans": {name: _summary(lifespans[of], sizes[of]) for name, of in groups.items()},
        "lowest_bytes": int(live.min()),
        "peak_bytes": int(live.max()),
        "curve": _thinned(begins, live),
    }


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
