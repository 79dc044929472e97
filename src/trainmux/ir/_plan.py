"""A plan: how members are put into sub-arrays, what is swapped, what is recomputed, and in which order.

A plan is data. `rewrite` turns it into a `Program`, the verifier proves the program, the engine runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Multiplexing(Enum):
    """The way sub-arrays share the device."""

    TURNS = "turns"
    """One after another, each forward, backward and update before the next begins."""
    RING = "ring"
    """The backward pass of each overlaps the forward pass of the next; the last one's overlaps the first
    one's of the following step. With two sub-arrays this is the paper's pair."""


@dataclass(frozen=True)
class SubArray:
    """Members that are fused. ``profile`` is the position of their profile in the plan's fingerprints."""

    members: tuple[str, ...]
    profile: int


@dataclass(frozen=True)
class Swap:
    """A tensor that leaves the device and comes back.

    Nodes are (sub-array, rank). It is offloaded as soon as ``offload_after`` has run, its bytes are given
    back just before ``release_before`` and taken again, for the copy back, just before ``prefetch_prompt``
    runs. ``reason`` says in words why, with the paper's case (1a to 3) where there is one.
    """

    sub_array: int
    tensor: int
    offload_after: tuple[int, int]
    release_before: tuple[int, int]
    prefetch_prompt: tuple[int, int]
    reason: str = ""


@dataclass(frozen=True)
class Recomputation:
    """A tensor that is dropped after its last forward use and made again just before ``before`` runs.

    ``nodes`` are the ranks to run again, in order; what they make besides ``tensor`` is dropped as soon as
    no later node of this recomputation needs it.
    """

    sub_array: int
    tensor: int
    nodes: tuple[int, ...]
    before: tuple[int, int]
    reason: str = ""


@dataclass(frozen=True)
class Schedule:
    """A policy's decisions for given sub-arrays.

    ``order`` is the body: (sub-array, rank) of each node of each sub-array, once each. In a ring the forward
    nodes of the first sub-array come last: they belong to its next step.
    """

    multiplexing: Multiplexing
    order: tuple[tuple[int, int], ...]
    swaps: tuple[Swap, ...]
    recomputes: tuple[Recomputation, ...]


@dataclass(frozen=True)
class Attempt:
    """A partition that was tried: what it would cost, and why it was not taken (empty: it was).

    Times are those by which partitions are compared: without the cost of synchronising nodes with copies.
    ``num_branches`` above 1: the members of a sub-array are not fused, but train side by side.
    """

    policy: str
    widths: tuple[int, ...]
    multiplexing: Multiplexing
    step_seconds: float
    peak_bytes: int
    stall_seconds: float
    recompute_seconds: float
    lost_because: str
    num_branches: int = 1


@dataclass(frozen=True)
class PlanRecord:
    """The chosen schedule with what the simulation says of it.

    ``peak_bytes`` is what will be reserved on the device: the slab with every tensor, and ``fixed_bytes`` for
    library workspaces and graphs. ``step_seconds`` is one pass through the body: one step of every member.
    ``swap_overlap`` is the share of copy time that overlaps compute, ``recompute_share`` recompute time as
    a share of compute time (§5.3). ``plain_peak_bytes`` are what the same sub-arrays would have in use at
    their peak, fixed bytes included, with nothing swapped and nothing recomputed. ``num_left_out`` counts the
    partitions that the limit on attempts left untried. With ``num_branches`` above
    1 the members of a sub-array are not fused but train concurrently, on that many branches. No schedule of
    the arrangements that were tried takes less than ``bound_seconds``, sync costs aside.
    """

    policy: str
    budget_bytes: int
    fixed_bytes: int
    profiles: tuple[str, ...]
    partition: tuple[SubArray, ...]
    schedule: Schedule
    peak_bytes: int
    host_bytes: int
    step_seconds: float
    stall_seconds: float
    recompute_seconds: float
    swap_overlap: float
    recompute_share: float
    attempts: tuple[Attempt, ...] = ()
    plain_peak_bytes: int = 0
    num_left_out: int = 0
    num_branches: int = 1
    bound_seconds: float = 0.0

    @property
    def gap(self) -> float:
        """By how much the step time is above the bound: 0.03 is 3%; 0 where no bound is known."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0

    @property
    def peak_over_limit(self) -> float:
        """By how much that plain peak passes the budget, as a share of the budget; 0 where it does not."""
        return max(0.0, self.plain_peak_bytes / self.budget_bytes - 1) if self.budget_bytes else 0.0

    @property
    def swaps(self) -> tuple[Swap, ...]:
        return self.schedule.swaps

    @property
    def recomputes(self) -> tuple[Recomputation, ...]:
        return self.schedule.recomputes
