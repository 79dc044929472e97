"""What follows the backward pass: per-member checks, buffer commits and the optimizer update.

The update runs after all gradients exist (D3 "deferred"): a member's weights and buffers change only if
its loss and all of its gradients are finite, and clipping needs the norm over all of them. A member
that must not change gets neutral scalars and a zero gradient, which leaves its rows bitwise as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.engine._row_gradients import RowGradient, Rows, zero_like
from trainmux.optim import (
    GroupStructure,
    OptimizerStructure,
    apply_update,
    scalar_dtype,
    scalar_specs,
    state_names,
)
from trainmux.tracing import last_node, nodes_after, tracer_graph

# Parameters of up to so many elements are updated together with others: a kernel each would mostly wait.
_SMALL = 1 << 14
_SMALL_TOGETHER = 24
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class UpdateSettings:
    """What decides the shape of the update, beside the graph.

    ``parameters`` are the names that get gradients; ``group_of`` gives the optimizer's parameter group
    of each, ``None`` for one that no optimizer owns. ``idle`` names, for each group, the settings that no
    member makes use of.
    """

    structure: OptimizerStructure
    idle: tuple[frozenset[str], ...]
    parameters: tuple[str, ...]
    group_of: tuple[int | None, ...]
    clips_norm: bool
    clips_value: bool
    accumulates: bool
    applies: bool

    def state_keys(self) -> tuple[tuple[str, str], ...]:
        """(parameter, state name) of every optimizer state tensor, in a fixed order."""
        return tuple(
            (parameter, name)
            for parameter, index in zip(self.parameters, self.group_of, strict=True)
            if index is not None
            for name in state_names(self.structure.groups[index])
        )

    def scalar_offsets(self) -> tuple[int, ...]:
        """Row of each group's first scalar in the scalar matrix."""
        offsets, total = [], 0
        for group in self.structure.groups:
            offsets.append(total)
            total += len(scalar_specs(group))
        return tuple(offsets)

    def neutral_scalars(self) -> tuple[float, ...]:
        """The neutral value of each row of the scalar matrix."""
        return tuple(spec.neutral for group in self.structure.groups for spec in scalar_specs(group))


@dataclass(frozen=True)
class TailInputs:
    """The tensors that the tail reads and changes in place, by role, all stacked."""

    loss: Tensor
    buffers: Sequence[Tensor]
    new_buffers: Sequence[Tensor]
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor | RowGradient[Tensor]]
    states: Sequence[Tensor]
    accumulators: Sequence[Tensor]
    scalars: Tensor  # [num_scalars, k], fp64
    neutral: Tensor  # [num_scalars, 1], fp64: the scalars of a member that must not change
    limits: Tensor  # [2, k], fp64: largest norm, largest value; infinite where there is none
    active: Tensor  # [k] bool, fed by the host
    alive: Tensor  # [k] bool, changed here: false from the first loss or gradient that is not finite
    updates: Tensor  # [k] int64, changed here: updates done


@dataclass
class _Broadcast:
    """``[k]`` tensors shaped to broadcast over a parameter, each shape made once."""

    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, value: Tensor, like: Tensor) -> Tensor:
        key = (id(value), like.dim())
        if key not in self.made:
            # The value itself is kept too: its id must not be given to another tensor.
            self.made[key] = (value, value.reshape(-1, *([1] * (like.dim() - 1))))
        return self.made[key][1]


@contextmanager
def _unit(name: str) -> Iterator[None]:
    """Mark what is traced inside as one unit: lowering makes a region of it."""
    graph = tracer_graph()
    last = last_node(graph)
    yield
    for node in nodes_after(graph, last):
        node.meta["unit"] = name


def make_tail(
    settings: UpdateSettings, fresh: Sequence[bool]
) -> Callable[[TailInputs], tuple[Tensor, Tensor]]:
    """The tail as a function to trace; it returns the gradient norm and who is finite, ``[k]`` each.

    ``fresh`` says which gradients are in memory that nothing else refers to.
    """

    def tail(given: TailInputs) -> tuple[Tensor, Tensor]:
        shaped = _Broadcast()
        gradients = _in_full(given)
        if settings.accumulates:
            gradients = [
                total.add_(_dense(gradient))
                for total, gradient in zip(given.accumulators, gradients, strict=True)
            ]
        norm = _norm([g.once if isinstance(g, Rows) else g for g in gradients], given.loss)
        finite = torch.isfinite(given.loss) & torch.isfinite(norm)
        given.alive.logical_and_(finite | ~given.active)
        commits = given.alive & given.active
        for old, new in zip(given.buffers, given.new_buffers, strict=True):
            old.copy_(torch.where(shaped(commits, old), new, old))
        if settings.applies:
            given.updates.add_(commits)
            mine = [False] * len(fresh) if settings.accumulates else fresh
            _update(settings, given, gradients, mine, norm, commits, shaped)
            if settings.accumulates:
                for total in given.accumulators:
                    total.zero_()
        return norm, finite

    return tail


def _in_full(given: TailInputs) -> list[Tensor | Rows]:
    """The gradients, those of rows with what belongs to the same row added up."""
    found: list[Tensor | Rows] = []
    for position, gradient in enumerate(given.gradients):
        if isinstance(gradient, RowGradient):
            with _unit(f"rows {position}"):
                found.append(Rows.of(gradient, given.parameters[position]))
        else:
            found.append(gradient)
    return found


def _dense(gradient: Tensor | Rows) -> Tensor:
    assert isinstance(gradient, Tensor), "steps that accumulate have gradients of whole tensors"
    return gradient


def _zero_unless(gradient: Tensor, keeps: Tensor, *, fresh: bool) -> Tensor:
    """``gradient`` where the bits of ``keeps`` are all ones, +0.0 where they are zeros, NaN or not.

    The same as ``where`` with a zero, at a third of its time on a CPU, which has no fast loop for two
    operands that broadcast. A ``fresh`` gradient is nobody else's memory and is overwritten.
    """
    bits = gradient.view(keeps.dtype)
    return (bits.bitwise_and_(keeps) if fresh else bits & keeps).view(gradient.dtype)


def _norm(gradients: Sequence[Tensor], loss: Tensor) -> Tensor:
    """Per-member 2-norm over all gradients. One that overflows counts as infinite."""
    parts: dict[int, Tensor] = {}
    for position, unit in _in_units(gradients):
        gradient = gradients[position]
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        with _unit(f"norm {unit}"):
            rows = _flat(gradient)[0].reshape(len(loss), -1)
            parts[position] = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
    if not parts:
        return torch.zeros_like(loss, dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([parts[position].to(torch.float64) for position in sorted(parts)]), dim=0
    )
    return norm


class _Scalars:
    """The ``[k]`` tensors of the update in a parameter's dtype."""

    def __init__(
        self, settings: UpdateSettings, given: TailInputs, norm: Tensor, commits: Tensor, dtype: torch.dtype
    ) -> None:
        self._settings = settings
        self._rows = torch.where(commits, given.scalars, given.neutral).to(scalar_dtype(dtype))
        self.keeps = -commits.to(_BITS[dtype.itemsize])
        self.shrink = torch.clamp(given.limits[0] / (norm + 1e-6), max=1.0).to(dtype)
        self.bound = given.limits[1].to(dtype)

    def of_group(self, index: int, group: GroupStructure) -> dict[str, Tensor]:
        first = self._settings.scalar_offsets()[index]
        return {spec.name: self._rows[first + i] for i, spec in enumerate(scalar_specs(group))}


def _update(
    settings: UpdateSettings,
    given: TailInputs,
    gradients: Sequence[Tensor | Rows],
    fresh: Sequence[bool],
    norm: Tensor,
    commits: Tensor,
    shaped: _Broadcast,
) -> None:
    states = dict(zip(settings.state_keys(), given.states, strict=True))
    owned = [p for p, index in zip(given.parameters, settings.group_of, strict=True) if index is not None]
    scalars = {
        dtype: _Scalars(settings, given, norm, commits, dtype)
        for dtype in dict.fromkeys(parameter.dtype for parameter in owned)
    }
    groups = {
        (index, dtype): known.of_group(index, group)
        for index, group in enumerate(settings.structure.groups)
        for dtype, known in scalars.items()
    }

    def change(
        index: int, parameter: Tensor, gradient: Tensor | None, state: Mapping[str, Tensor], *, fresh: bool
    ) -> None:
        """Update one parameter, or rows of it; ``None`` is a gradient of zero."""
        known = scalars[parameter.dtype]
        if gradient is None:
            gradient = zero_like(parameter)
        else:
            gradient = gradient.to(parameter.dtype)
            if settings.clips_norm:
                gradient = gradient * shaped(known.shrink, gradient)
            if settings.clips_value:
                bound = shaped(known.bound, gradient)
                gradient = torch.clamp(gradient, -bound, bound)
            gradient = _zero_unless(gradient, shaped(known.keeps, gradient), fresh=fresh)
        apply_update(
            settings.structure.groups[index],
            parameter,
            gradient,
            state,
            {key: shaped(value, parameter) for key, value in groups[index, parameter.dtype].items()},
            idle=settings.idle[index],
        )

    traced = _Traced(given)
    for position, unit in _in_units(given.parameters):
        name, index = settings.parameters[position], settings.group_of[position]
        parameter, gradient, is_fresh = given.parameters[position], gradients[position], fresh[position]
        if index is None:
            continue
        names = state_names(settings.structure.groups[index])
        tensors = [parameter, *(states[name, state_name] for state_name in names)]
        if isinstance(gradient, Rows):
            with _unit(f"rows of update {unit}"):
                rows = [gradient.take(tensor) for tensor in tensors]
                of_rows = dict(zip(names, rows[1:], strict=True))
                change(index, rows[0], gradient.gradient, of_rows, fresh=False)
            with _unit(f"update {unit}"):
                parameter, *state = _flat(*tensors)
                change(index, parameter, None, dict(zip(names, state, strict=True)), fresh=False)
            with _unit(f"rows into {unit}"):
                for tensor, row in zip(tensors, rows, strict=True):
                    gradient.put(tensor, row)
            continue
        own = [parameter, gradient, *tensors[1:]]
        if traced.repeat(own, (index, is_fresh), f"update {unit}"):
            continue
        with traced.noted(own, (index, is_fresh)), _unit(f"update {unit}"):
            parameter, gradient, *state = _flat(*own)
            change(index, parameter, gradient, dict(zip(names, state, strict=True)), fresh=is_fresh)


class _Traced:
    """Updates that were traced before: one like another is written down again, not traced again.

    A large model has some hundred parameters in a dozen shapes, and tracing takes a millisecond for each
    operator.
    """

    def __init__(self, given: TailInputs) -> None:
        self._graph = tracer_graph()
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        tensors = pytree.tree_leaves([getattr(given, item.name) for item in fields(given)])
        self._node_of = {id(t): node for t, node in zip(tensors, placeholders, strict=True)}
        for total in given.accumulators:  # has been added to: to the tracer it is that node's result now
            self._node_of.pop(id(total), None)
        self._known: dict[Hashable, tuple[list[fx.Node], list[fx.Node]]] = {}

    def repeat(self, own: Sequence[Tensor], decisive: Hashable, unit: str) -> bool:
        """Write the update of ``own`` tensors, if one of the same kind is known; says whether it did."""
        nodes = self._nodes(own)
        found = self._known.get(self._kind(own, decisive))
        if nodes is None or found is None:
            return False
        before, body = found
        copied = dict(zip(before, nodes, strict=True))
        for node in body:
            # What depends on nothing of the parameter's own is common to all: scalars, shaped to broadcast.
            if any(source in copied for source in node.all_input_nodes):
                copied[node] = self._graph.node_copy(node, lambda n: copied.get(n, n))
                copied[node].meta["unit"] = unit
        return True

    @contextmanager
    def noted(self, own: Sequence[Tensor], decisive: Hashable) -> Iterator[None]:
        """What is traced inside is the update of ``own``."""
        last = last_node(self._graph)
        yield
        nodes = self._nodes(own)
        if nodes is not None:
            self._known[self._kind(own, decisive)] = (nodes, nodes_after(self._graph, last))

    def _nodes(self, own: Sequence[Tensor]) -> list[fx.Node] | None:
        """The placeholders of tensors; ``None`` where one was computed here, as accumulated gradients are."""
        nodes = [self._node_of.get(id(tensor)) for tensor in own]
        return None if None in nodes or len(set(nodes)) < len(nodes) else nodes  # type: ignore[return-value]

    def _kind(self, own: Sequence[Tensor], decisive: Hashable) -> Hashable:
        return (decisive, *((tuple(t.shape), t.stride(), t.dtype) for t in own))


def _in_units(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(position, unit) of each tensor: large ones by themselves, then the small ones many together."""
    small = [position for position, tensor in enumerate(tensors) if tensor[0].numel() <= _SMALL]
    chosen = set(small)
    units = [(position, position) for position in range(len(tensors)) if position not in chosen]
    first = len(tensors)
    return units + [(position, first + i // _SMALL_TOGETHER) for i, position in enumerate(small)]


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors ``[k, ...]`` as ``[k, n]`` where all of them are in one order in memory, else as they are.

    Parameters of many shapes then share one compiled update.
    """
    rows = tensors[0][0]
    if any(tensor[0].stride() != rows.stride() for tensor in tensors) or rows.numel() == 0:
        return tensors
    order = sorted(range(rows.dim()), key=lambda dim: (-rows.stride()[dim], -rows.shape[dim]))
    if not rows.permute(order).is_contiguous():
        return tensors
    axes = [0, *(dim + 1 for dim in order)]
    return tuple(tensor.permute(axes).reshape(tensor.shape[0], -1) for tensor in tensors)
