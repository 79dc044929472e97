"""trainmux: all members as one fleet."""

from __future__ import annotations

import torch

import trainmux as tm

from ._base import WEIGHT_DECAY, Prepared, Setup


def prepare(setup: Setup) -> Prepared:
    """A fleet over ordinary members; ``setup.fleet`` adds to its arguments, or replaces them."""
    members = [
        tm.Member(
            model.train(),
            torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY),
            name=f"member {index}",
            seed=index,
        )
        for index, (model, lr) in enumerate(zip(setup.models, setup.learning_rates, strict=True))
    ]
    # The step that is timed is the compiled one, from the first on.
    lowering = "inductor" if setup.device.type == "cuda" else "auto"
    arguments = {"precision": "bf16", "lowering": lowering, **setup.fleet}
    fleet = tm.Fleet(members, loss=setup.loss, example_batch=setup.example, device=setup.device, **arguments)
    return Prepared(fleet.step, len(members))
