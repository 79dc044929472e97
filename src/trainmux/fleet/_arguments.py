"""Which of a group's tensors is which argument of a program, and which settings its update goes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trainmux.engine import ForwardProgram, StepProgram
from trainmux.fleet._slots import StackedState
from trainmux.fusion.optimizers import OptimizerStructure
from trainmux.ir import InputKind
from trainmux.tracing import TracedGraph

Program = StepProgram | ForwardProgram


def held_arguments(
    program: Program, state: StackedState, numbers: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """The arguments of a program; ``None`` for each leaf of the batch.

    ``numbers`` has those that the host feeds, and what is neither state nor fed: "neutral" settings, the
    "tangent", and the counters of an "evaluation".
    """
    own = {
        InputKind.BATCH: None,
        InputKind.SEED: state.seeds,
        InputKind.COUNTER: numbers["counters" if program.counts_draws else "evaluation"],
        InputKind.TANGENT: numbers["tangent"],
    }
    by_name = {**state.shared, **state.buffers, **state.parameters}
    given = {**numbers, "alive": state.alive, "updates": state.updates}
    return [
        *(own[item.kind] if item.kind in own else by_name[item.name] for item in program.inputs),
        *(state.states[key] for key in program.state_keys()),
        *(state.totals[name] for name in program.total_names()),
        *(given[name] for name in program.number_names()),
    ]


def groups_of(
    parameters: Sequence[str], traced: TracedGraph, structure: OptimizerStructure
) -> tuple[int | None, ...]:
    """The optimizer's parameter group of each parameter; ``None`` for those that it does not have."""
    names = [item.name for item in traced.inputs if item.kind is InputKind.PARAMETER]
    owner = {
        names[position]: index for index, group in enumerate(structure.groups) for position in group.params
    }
    return tuple(owner.get(name) for name in parameters)


def with_batch(held: Sequence[Tensor | None], batch: Sequence[Tensor]) -> list[Tensor]:
    """All arguments: the leaves of ``batch`` in the places that were left for them."""
    leaves = iter(batch)
    return [next(leaves) if argument is None else argument for argument in held]
