"""Models and random numbers that depend on a seed alone, and leave the caller's random state as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def _build_with(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also set the generators of every GPU, which are not restored here.
        torch.default_generator.manual_seed(seed)
        return make()


def seeded(make: Callable[..., nn.Module], **settings: Any) -> Callable[[int], nn.Module]:
    """``make(**settings)`` as a function of the seed that its initial weights are drawn with."""
    return partial(_build_with, partial(make, **settings))


def seeded_generator(seed: int) -> torch.Generator:
    """A generator on the CPU, for batches."""
    return torch.Generator().manual_seed(seed)
