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


def rank_of(profile: Profile, name: str) -> int:
    return [node.name for node in profile.nodes].index(name)


def _five_layers(
    name: str,
    sizes: Sequence[int],
    swap_in: Mapping[str, float],
    seconds: Mapping[str, float],
    workspaces: Mapping[str, int],
) -> Profile:
    """``sizes`` are those of Z1 to Z5; there is an R if it has ``seconds``."""
    builder = Builder()
    builder.tensor("X", ByteClass.BATCH, 1)
    for layer, size in enumerate(sizes, start=1):
        builder.tensor(f"W{layer}", ByteClass.PARAMETER, 1)
        builder.tensor(f"∇W{layer}", ByteClass.GRADIENT, 0)
        builder.tensor(f"∇Z{layer}", ByteClass.GRADIENT_MAP, 0)
        builder.tensor(f"Z{layer}", ByteClass.FEATURE_MAP, size, swap_in.get(f"Z{layer}", 0.0))
    for layer in range(1, 6):
        inputs = ["X" if layer == 1 else f"Z{layer - 1}", f"W{layer}"]
        builder.node(f"Z{layer}", Phase.FORWARD, inputs, [f"Z{layer}"], 2.0, repeatable=False)
    if "R" in seconds:
        builder.tensor("R", ByteClass.FEATURE_MAP, 10, swap_in["R"])
        builder.node("R", Phase.FORWARD, ["X"], ["R"], seconds["R"])
    builder.node("∇Z5", Phase.BACKWARD, ["Z5"], ["∇Z5"], workspace=workspaces.get("∇Z5", 0))
    for layer in range(5, 0, -1):
        reads, made = ["X" if layer == 1 else f"Z{layer - 1}", f"∇Z{layer}"], f"∇W{layer}"
        builder.node(made, Phase.BACKWARD, reads, [made], workspace=workspaces.get(made, 0))
        if layer > 1:
            reads, made = [f"W{layer}", f"∇Z{layer}"], f"∇Z{layer - 1}"
            reads += ["R"] if layer == 5 and "R" in seconds else []
            builder.node(made, Phase.BACKWARD, reads, [made], seconds.get(made, 1.0))
    weights = [f"W{layer}" for layer in range(1, 6)]
    builder.node("update", Phase.UPDATE, [f"∇{weight}" for weight in weights], changes=weights)
    return builder.profile(name)


def first(recompute_seconds: float = 4.0) -> Profile:
    """The sub-array whose feature maps are swapped."""
    swap_in = {"Z1": 4.0, "Z2": 4.0, "Z3": 3.0, "Z4": 3.0, "R": 6.0}
    seconds = {"R": recompute_seconds, "∇Z4": 2.0, "∇Z3": 2.0}
    workspaces = {"∇Z5": 16, "∇W5": 6, "∇W4": 12, "∇W3": 8}
    return _five_layers("figure 6, first", (10, 10, 10, 10, 0), swap_in, seconds, workspaces)


def second() -> Profile:
    """The sub-array whose forward pass hides the swaps of the first."""
    return _five_layers("figure 6, second", (4,) * 5, {f"Z{n}": 1.0 for n in range(1, 6)}, {}, {})


def limit(profiles: Sequence[Profile]) -> int:
    return 24 + static_bytes(profiles)
