"""The random state on the host that decides which batches come next.

Members draw from counters of their own; what is kept here is only for the data: shuffling and augmentation
by torch's default CPU generator, a loader's own generators, ``random`` and ``numpy.random``. With it, a
resumed run sees the batches that the uninterrupted one would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture_global() -> dict[str, Any]:
    """The process-wide state now, as values that a checkpoint can hold."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    legacy = np.random.get_state(legacy=False)
    # Another bit generator may stand behind numpy.random; its state has no fixed form.
    if isinstance(legacy, dict) and legacy["bit_generator"] == "MT19937":
        key = torch.from_numpy(legacy["state"]["key"].astype(np.int64))
        state["numpy"] = [key, legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]]
    return state


def restore_global(state: Mapping[str, Any]) -> None:
    """Back to a ``capture_global``; parts that are missing in it stay as they are."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        key, position, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", key.numpy().astype(np.uint32), position, has_gauss, gauss))


def capture_generators(loader: object) -> dict[str, torch.Tensor]:
    """The states of the loader's and its samplers' own generators, by where they were found."""
    return {path: generator.get_state() for path, generator in _generators(loader).items()}


def restore_generators(loader: object, states: Mapping[str, torch.Tensor]) -> None:
    """Back to a ``capture_generators``; generators that are not in it stay as they are."""
    for path, generator in _generators(loader).items():
        if path in states:
            generator.set_state(states[path])


def _generators(loader: object) -> dict[str, torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    found: dict[str, torch.Generator] = {}
    for path, owner in owners.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found.values()):
            found[path] = generator
    return found
