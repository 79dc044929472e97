"""Programs written by hand, each right, with every wait that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ir_programs import named, placed, statics, tape, two_layers

from trainmux.ir import Profile, Program


@dataclass(frozen=True)
class Case:
    program: Program
    profiles: tuple[Profile, ...]


def _merged(first: str, second: str) -> str:
    """Two passes beside one another: a line of one, a line of the other."""
    one, two = first.strip().splitlines(), second.strip().splitlines()
    length = max(len(one), len(two))
    rows = zip(one + [""] * (length - len(one)), two + [""] * (length - len(two)), strict=True)
    return "\n".join(line for pair in rows for line in pair if line)


def _ring(profiles: Sequence[Profile], forward: str, backward: str, without: Sequence[str] = ()) -> Case:
    """A pair from its forward and backward pass, {s} standing for the sub-array."""
    passes = [(forward.replace("{s}", str(s)), backward.replace("{s}", str(s))) for s in (0, 1)]
    (forward_0, backward_0), (forward_1, backward_1) = passes
    body = _merged(backward_0, forward_1) + "\n" + _merged(backward_1, forward_0)
    swapped = [(s, named(profiles[s], name)) for s in (0, 1) for name in without]
    parts = [tape(profiles, text) for text in (forward_0, body, backward_0)]
    return Case(placed(profiles, parts, statics(profiles, swapped)), tuple(profiles))


def turns() -> Case:
    """Two sub-arrays one after the other; nothing is swapped or recomputed."""
    profiles = [two_layers()] * 2
    step = """
        compute {s} fw_h
        compute {s} fw_stats
        compute {s} fw_a
        compute {s} fw_loss
        free {s} t
        compute {s} bw_loss
        free {s} a
        compute {s} up_w2
        free {s} g_w2
        compute {s} bw_a
        free {s} g_a
        free {s} mask
        compute {s} bw_h
        free {s} h
        free {s} g_h
        compute {s} up_w1
        free {s} g_w1
        free {s} loss
    """
    body = tape(profiles, "\n".join(step.strip().replace("{s}", str(s)) for s in (0, 1)))
    return Case(placed(profiles, [[], body, []], statics(profiles)), tuple(profiles))


def pair_with_swap() -> Case:
    """A pair; the first feature map is copied out in the forward pass and back in the backward pass."""
    forward = """
        compute {s} fw_h
        compute {s} fw_stats
        compute {s} fw_a
        offload {s} h after compute
        compute {s} fw_loss
        free {s} t
        free {s} h after offload:h
    """
    backward = """
        compute {s} bw_loss
        free {s} a
        compute {s} up_w2
        free {s} g_w2
        prefetch {s} h after offload:h compute
        compute {s} bw_a after prefetch:h
        free {s} g_a
        free {s} mask
        compute {s} bw_h
        free {s} h
        free {s} g_h
        compute {s} up_w1
        free {s} g_w1
        free {s} loss
    """
    return _ring([two_layers()] * 2, forward, backward)


def pair_with_recompute() -> Case:
    """A pair; both feature maps are dropped and made again; the mask is kept, its second copy discarded."""
    forward = """
        compute {s} fw_h
        compute {s} fw_stats
        compute {s} fw_a
        free {s} h
        compute {s} fw_loss
        free {s} a
        free {s} t
    """
    backward = """
        recompute {s} fw_h h
        recompute {s} fw_a a
        compute {s} bw_loss
        free {s} a
        compute {s} up_w2
        free {s} g_w2
        compute {s} bw_a
        free {s} g_a
        free {s} mask
        compute {s} bw_h
        free {s} h
        free {s} g_h
        compute {s} up_w1
        free {s} g_w1
        free {s} loss
    """
    return _ring([two_layers()] * 2, forward, backward)


def pair_with_swapped_state() -> Case:
    """A pair; momentum lies on the host, comes for its update and goes back changed."""
    forward = """
        compute {s} fw_h
        compute {s} fw_stats
        compute {s} fw_a
        compute {s} fw_loss
        free {s} t
    """
    backward = """
        compute {s} bw_loss
        free {s} a
        compute {s} up_w2
        free {s} g_w2
        compute {s} bw_a
        free {s} g_a
        free {s} mask
        prefetch {s} m1 after compute
        compute {s} bw_h
        free {s} h
        free {s} g_h
        compute {s} up_w1 after prefetch:m1
        offload {s} m1 after compute
        free {s} g_w1
        free {s} loss
        free {s} m1 after offload:m1
    """
    return _ring([two_layers()] * 2, forward, backward, without=["m1"])


def recompute_from_swapped() -> Case:
    """One sub-array; a chain is recomputed from a batch and a parameter that were swapped out meanwhile."""
    profiles = [two_layers()]
    body = tape(
        profiles,
        """
        prefetch 0 x
        compute 0 fw_h after prefetch:x
        offload 0 w1 after compute
        compute 0 fw_stats
        free 0 x
        compute 0 fw_a
        free 0 h
        free 0 mask
        compute 0 fw_loss
        free 0 t
        free 0 a
        free 0 w1 after offload:w1
        prefetch 0 w1 after offload:w1 compute
        prefetch 0 x
        recompute 0 fw_h h after prefetch:w1 prefetch:x
        recompute 0 fw_a a mask
        compute 0 bw_loss
        free 0 a
        compute 0 up_w2
        free 0 g_w2
        compute 0 bw_a
        free 0 g_a
        free 0 mask
        compute 0 bw_h
        free 0 h
        free 0 x
        free 0 g_h
        compute 0 up_w1
        free 0 g_w1
        free 0 loss
        """,
    )
    resident = statics(profiles, [(0, named(profiles[0], "x"))])
    return Case(placed(profiles, [[], body, []], resident), tuple(profiles))


HANDMADE: tuple[Callable[[], Case], ...] = (
    turns,
    pair_with_swap,
    pair_with_recompute,
    pair_with_swapped_state,
    recompute_from_swapped,
)
