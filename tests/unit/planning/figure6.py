"""µ-TWO's worked example (§4.2.2, Figure 6) as profiles, with numbers under which it runs as described.

Sub-array 0 is the paper's first: five layers, backward pass ∇Z5, ∇W5, ∇Z4, ∇W4, ... ∇W1. Sub-array 1 is the
second, whose forward nodes Z1² to Z5² hide the first one's swaps. Bytes are chosen so that memory stops the
multiplexer where the text says so:

- two forward nodes fit in front of ∇W2, one in front of ∇W3 (its workspace), none in front of ∇W4 (its);
- ∇Z5 and ∇W5 are over the limit until all four have been decided on, ∇Z4 only at first: the peak interval.

Beyond the figure there is R, made by the last forward node and read by ∇Z4. With Z4 back for ∇W5, as 1a has
it, something else must leave before memory fits there; R is what is left, and cheaper to make than to fetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steps import Builder, static_bytes

from trainmux.ir import ByteClass, Phase, Profile

LIMIT_BEYOND_STATIC = 24
SWAP_IN = {"Z1": 4.0, "Z2": 4.0, "Z3": 3.0, "Z4": 3.0, "R": 6.0}


def rank_of(profile: Profile, name: str) -> int:
    return [node.name for node in profile.nodes].index(name)


def tensor_of(profile: Profile, name: str) -> int:
    return [tensor.name for tensor in profile.tensors].index(name)


def first(swap_in: Mapping[str, float] = SWAP_IN, recompute_seconds: float = 4.0) -> Profile:
    """The sub-array whose feature maps are swapped."""
    builder = Builder()
    builder.tensor("X", ByteClass.BATCH, 1)
    for layer in range(1, 6):
        builder.tensor(f"W{layer}", ByteClass.PARAMETER, 1)
        builder.tensor(f"∇W{layer}", ByteClass.GRADIENT, 0)
        builder.tensor(f"∇Z{layer}", ByteClass.GRADIENT_MAP, 0)
        size = 10 if layer < 5 else 0
        builder.tensor(f"Z{layer}", ByteClass.FEATURE_MAP, size, swap_in.get(f"Z{layer}", 0.0))
    builder.tensor("R", ByteClass.FEATURE_MAP, 10, swap_in["R"])
    for layer in range(1, 6):
        inputs = ["X" if layer == 1 else f"Z{layer - 1}", f"W{layer}"]
        builder.node(f"Z{layer}", Phase.FORWARD, inputs, [f"Z{layer}"], 2.0, repeatable=False)
    builder.node("R", Phase.FORWARD, ["X"], ["R"], recompute_seconds)
    builder.node("∇Z5", Phase.BACKWARD, ["Z5"], ["∇Z5"], workspace=16)
    workspaces = {5: 6, 4: 12, 3: 8}
    for layer in range(5, 0, -1):
        source = "X" if layer == 1 else f"Z{layer - 1}"
        builder.node(
            f"∇W{layer}",
            Phase.BACKWARD,
            [source, f"∇Z{layer}"],
            [f"∇W{layer}"],
            workspace=workspaces.get(layer, 0),
        )
        if layer > 1:
            reads = [f"W{layer}", f"∇Z{layer}", *(["R"] if layer == 5 else [])]
            seconds = 2.0 if layer in (5, 4) else 1.0
            builder.node(f"∇Z{layer - 1}", Phase.BACKWARD, reads, [f"∇Z{layer - 1}"], seconds)
    weights = [f"W{layer}" for layer in range(1, 6)]
    builder.node("update", Phase.UPDATE, [f"∇W{layer}" for layer in range(1, 6)], changes=weights)
    return builder.profile("figure 6, first")


def second() -> Profile:
    """The sub-array whose forward pass hides the swaps of the first."""
    builder = Builder()
    builder.tensor("X", ByteClass.BATCH, 1)
    for layer in range(1, 6):
        builder.tensor(f"W{layer}", ByteClass.PARAMETER, 1)
        builder.tensor(f"∇W{layer}", ByteClass.GRADIENT, 0)
        builder.tensor(f"∇Z{layer}", ByteClass.GRADIENT_MAP, 0)
        builder.tensor(f"Z{layer}", ByteClass.FEATURE_MAP, 4, 1.0)
    for layer in range(1, 6):
        inputs = ["X" if layer == 1 else f"Z{layer - 1}", f"W{layer}"]
        builder.node(f"Z{layer}", Phase.FORWARD, inputs, [f"Z{layer}"], 2.0, repeatable=False)
    builder.node("∇Z5", Phase.BACKWARD, ["Z5"], ["∇Z5"])
    for layer in range(5, 0, -1):
        source = "X" if layer == 1 else f"Z{layer - 1}"
        builder.node(f"∇W{layer}", Phase.BACKWARD, [source, f"∇Z{layer}"], [f"∇W{layer}"])
        if layer > 1:
            reads = [f"W{layer}", f"∇Z{layer}"]
            builder.node(f"∇Z{layer - 1}", Phase.BACKWARD, reads, [f"∇Z{layer - 1}"])
    weights = [f"W{layer}" for layer in range(1, 6)]
    builder.node("update", Phase.UPDATE, [f"∇W{layer}" for layer in range(1, 6)], changes=weights)
    return builder.profile("figure 6, second")


def limit(profiles: Sequence[Profile]) -> int:
    return LIMIT_BEYOND_STATIC + static_bytes(profiles)
