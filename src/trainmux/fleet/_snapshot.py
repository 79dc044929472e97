"""A member's optimizer state, taken before the member joins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainmux.fleet._member import Member
from trainmux.fusion.optimizers import OptimizerStructure, read_state, read_steps
from trainmux.ir import OutputKind
from trainmux.tracing import TracedGraph, unique_parameters


@dataclass(frozen=True)
class OptimizerSnapshot:
    """A member's optimizer, read and checked before the member joins.

    ``states`` maps (parameter, state name) to a tensor, or to the number that fills a state torch has not
    made yet; ``steps`` has the updates done, one number per parameter group.
    """

    structure: OptimizerStructure
    steps: tuple[int, ...]
    states: dict[tuple[str, str], Tensor | float]


def snapshot_optimizer(
    member: Member, name: str, structure: OptimizerStructure, traced: TracedGraph
) -> OptimizerSnapshot:
    """Read the state of every parameter that gets a gradient; ``OptimizerError`` if it cannot be used."""
    parameters = unique_parameters(member.model)
    learning = {output.name for output in traced.outputs if output.kind is OutputKind.GRADIENT}
    used = {position for position, item in enumerate(parameters) if item.name in learning}
    tensors = [item.tensor for item in parameters]
    steps = read_steps(member.optimizer, structure, tensors, used, member=name)
    states: dict[tuple[str, str], Tensor | float] = {}
    for index, group in enumerate(structure.groups):
        for position in used.intersection(group.params):
            values, _ = read_state(member.optimizer, index, tensors[position])
            for state, value in values.items():
                states[parameters[position].name, state] = value
    return OptimizerSnapshot(structure, steps, states)
