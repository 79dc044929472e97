"""Members that differ in their seed only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainmux.errors import ConfigError, MemberError
from trainmux.fleet import Member, whole_number


def seeds(make: Callable[[], Member], which: int | Sequence[int]) -> list[Member]:
    """Make members that differ in their seed only: in what they begin with, and in what they draw.

    ``make`` takes nothing and returns a `Member`; it is called once for each seed, with torch's random
    numbers seeded by it. ``which`` has the seeds, or says how many, from 0. Members that have no seed or name
    get one: ``seed=0`` and so on.
    """
    members = []
    for seed in seed_numbers("which", which):
        member = seeded_member(make, seed)
        member.name = member.name or f"seed={seed}"
        members.append(member)
    return members


def seed_numbers(setting: str, which: int | Sequence[int]) -> list[int]:
    """The seeds that are meant by their number, or by themselves; refuses one that comes twice."""
    if isinstance(which, (int, np.integer)):
        return list(range(whole_number(setting, which)))
    given: list[Any] = list(which)
    found = [int(seed) for seed in given if type(seed) is int or isinstance(seed, np.integer)]
    if not found or len(found) < len(given) or len(set(found)) < len(found):
        raise ConfigError(f"{setting}: expected a number of seeds, or different whole numbers, got {which!r}")
    return found


def seeded_member(make: Callable[[], Member], seed: int) -> Member:
    """Call ``make`` with torch's random numbers seeded; they go on as before afterwards."""
    with _seeded(seed):
        member = make()
    if not isinstance(member, Member):
        raise MemberError(f"expected make() to return a trainmux.Member, got {type(member).__name__}")
    if member.seed is None:
        member.seed = seed
    return member


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
