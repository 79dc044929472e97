"""How long a proof takes."""

from __future__ import annotations

import time

from ir_handmade import Case
from ir_programs import Tape, placed, profile, statics, tensor

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Lane,
    Offload,
    Phase,
    Prefetch,
    ProfiledNode,
    find_violations,
)


def swapping_pair(num_layers: int) -> Case:
    """A ring of two deep sub-arrays in which every feature map is swapped."""
    weights = [tensor(f"w{layer}", ByteClass.PARAMETER, 64) for layer in range(num_layers)]
    features = [tensor(f"f{layer}", ByteClass.FEATURE_MAP, 100 + layer % 7) for layer in range(num_layers)]
    gradients = [tensor(f"g{layer}", ByteClass.GRADIENT_MAP, 96) for layer in range(num_layers)]
    of_weights = [tensor(f"gw{layer}", ByteClass.GRADIENT, 64) for layer in range(num_layers)]
    f, g, gw = num_layers, 2 * num_layers, 3 * num_layers
    nodes = []
    for layer in range(num_layers):
        reads = (layer, f + layer - 1) if layer else (layer,)
        nodes.append(ProfiledNode(f"fw{layer}", Phase.FORWARD, reads, (f + layer,), (), 1e-3, 16))
    for layer in reversed(range(num_layers)):
        reads = (layer, f + layer) if layer == num_layers - 1 else (layer, f + layer, g + layer + 1)
        made = (g + layer, gw + layer)
        nodes.append(ProfiledNode(f"bw{layer}", Phase.BACKWARD, reads, made, (), 1e-3, 8))
        nodes.append(ProfiledNode(f"up{layer}", Phase.UPDATE, (gw + layer,), (), (layer,), 1e-3))
    of = profile([*weights, *features, *gradients, *of_weights], nodes)

    def forward(made: Tape, s: int) -> None:
        for layer in range(num_layers):
            made.do(Compute(s, layer))
            made.wait_for_compute(Lane.OUT)
            made.do(Offload(s, f + layer))
            for past in [layer - 1] if 0 < layer < num_layers - 1 else [layer - 1, layer] if layer else []:
                made.wait_for_copy(Lane.COMPUTE, Offload, (s, f + past))
                made.do(Free(s, f + past))

    def backward(made: Tape, s: int) -> None:
        for number, layer in enumerate(reversed(range(num_layers))):
            key = (s, f + layer)
            made.wait_for_copy(Lane.IN, Offload, key)
            made.wait_for_compute(Lane.IN)
            made.do(Prefetch(*key))
            made.wait_for_copy(Lane.COMPUTE, Prefetch, key)
            made.do(Compute(s, num_layers + 2 * number))
            made.do(Free(*key))
            if layer < num_layers - 1:
                made.do(Free(s, g + layer + 1))
            made.do(Compute(s, num_layers + 2 * number + 1))
            made.do(Free(s, gw + layer))
        made.do(Free(s, g))

    prologue, body, epilogue = Tape(), Tape(), Tape()
    forward(prologue, 0)
    for s in (0, 1):
        backward(body, s)
        forward(body, 1 - s)
    backward(epilogue, 0)
    parts = [each.instructions for each in (prologue, body, epilogue)]
    return Case(placed([of, of], parts, statics([of, of])), (of, of))


def test_twenty_thousand_instructions_take_seconds() -> None:
    case = swapping_pair(num_layers=700)
    parts = (case.program.prologue, case.program.body, case.program.epilogue)
    assert sum(len(part.instructions) for part in parts) >= 20_000
    start = time.process_time()
    assert find_violations(case.program, case.profiles, budget_bytes=case.program.slab_bytes) == ()
    assert time.process_time() - start < 2
