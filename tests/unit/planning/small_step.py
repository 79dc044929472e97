"""A step small enough to write its programs by hand."""

from __future__ import annotations

from collections.abc import Sequence

from trainmux.ir import (
    ByteClass,
    DeviceFacts,
    Multiplexing,
    Phase,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Program,
    Recomputation,
    Schedule,
    Swap,
)
from trainmux.planning._rewrite import draft, place

BATCH, WEIGHT, MAP, MASK, TOP, LOSS, SLOPE, GRADIENT = range(8)
LAYER, HEAD, LOSS_NODE, LOSS_BACKWARD, BACKWARD, UPDATE = range(6)


def tensor(name: str, byte_class: ByteClass, size_bytes: int) -> ProfiledTensor:
    """One second per 1024 bytes out, half of that back; in company a quarter more."""
    out, back = size_bytes / 1024, size_bytes / 2048
    return ProfiledTensor(name, byte_class, size_bytes, out, back, 1.25 * out, 1.25 * back)


STEP = Profile(
    fingerprint="small step",
    source="analytic",
    width=1,
    device=DeviceFacts("a test's device", 1 << 30, 1 << 30),
    tensors=(
        tensor("batch", ByteClass.BATCH, 512),
        tensor("weight", ByteClass.PARAMETER, 1024),
        tensor("map", ByteClass.FEATURE_MAP, 2048),
        tensor("mask", ByteClass.FEATURE_MAP, 512),
        tensor("top", ByteClass.FEATURE_MAP, 1024),
        tensor("loss", ByteClass.RESULT, 4),
        tensor("slope", ByteClass.GRADIENT_MAP, 2048),
        tensor("gradient", ByteClass.GRADIENT, 1024),
    ),
    nodes=(
        ProfiledNode("layer", Phase.FORWARD, (BATCH, WEIGHT), (MAP, MASK), (), 1.0, workspace_bytes=100),
        ProfiledNode("head", Phase.FORWARD, (MAP,), (TOP,), (), 1.0),
        ProfiledNode("loss", Phase.FORWARD, (TOP,), (LOSS,), (), 1.0),
        ProfiledNode("loss backward", Phase.BACKWARD, (TOP, LOSS), (SLOPE,), (), 1.0),
        ProfiledNode("layer backward", Phase.BACKWARD, (SLOPE, MASK, MAP, BATCH), (GRADIENT,), (), 1.0),
        ProfiledNode("update", Phase.UPDATE, (GRADIENT,), (), (WEIGHT,), 1.0),
    ),
)


def schedule(
    multiplexing: Multiplexing,
    swaps: Sequence[Swap] = (),
    recomputes: Sequence[Recomputation] = (),
    num_sub_arrays: int = 1,
) -> Schedule:
    """The plain order of so many small steps; in a ring each backward pass comes before the forward pass."""
    order: list[tuple[int, int]] = []
    for s in range(num_sub_arrays):
        if multiplexing is Multiplexing.TURNS:
            order += [(s, rank) for rank in range(6)]
        else:
            order += [(s, rank) for rank in range(3, 6)]
            order += [((s + 1) % num_sub_arrays, rank) for rank in range(3)]
    return Schedule(multiplexing, tuple(order), tuple(swaps), tuple(recomputes))


def plain(profiles: Sequence[Profile], plan: Schedule) -> Program:
    """A schedule's program with a wait wherever a draft needs one, before any is found needless."""
    return place(profiles, draft(profiles, plan))
