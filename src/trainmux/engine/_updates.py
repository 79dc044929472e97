"""The tail of a step, written into the graph that is being traced: checks, buffer commits, optimizer updates.

Updates run after all gradients exist: a member's weights and buffers change only if its loss and all of its
gradients are finite, and clipping needs the norm over all of them. A member that must not change gets neutral
scalars and a zero gradient, which leaves its rows bitwise as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.engine._row_gradients import GradientRows, RowGradient, zero_like
from trainmux.engine._units import Unit, large_alone
from trainmux.fusion.optimizers import (
    OptimizerStructure,
    StateEntry,
    apply_update,
    is_elementwise,
    rule_of,
    scalar_dtype,
)
from trainmux.tracing import copy_node, last_node, nodes_after, tracer_graph


@dataclass(frozen=True)
class UpdateSettings:
    """Settings that decide the update, besides the graph.

    ``parameters`` are the names that get gradients; ``group_of`` gives the optimizer's parameter group
    of each, ``None`` for one that no optimizer owns, and ``entries`` its optimizer state. ``idle`` names, for
    each group, the settings that no member makes use of. A step that applies nothing need not have
    ``carries_state``: optimizer state is then none of its arguments.
    """

    structure: OptimizerStructure
    idle: tuple[frozenset[str], ...]
    parameters: tuple[str, ...]
    group_of: tuple[int | None, ...]
    entries: tuple[tuple[StateEntry, ...], ...]
    clips_norm: bool
    clips_value: bool
    accumulates: bool
    applies: bool
    carries_state: bool = True

    def __post_init__(self) -> None:
        assert self.carries_state or not self.applies

    def state_keys(self) -> tuple[tuple[str, str], ...]:
        """(parameter, state name) of every optimizer state tensor, in a fixed order."""
        return tuple((parameter, entry.name) for parameter, entry in self.state_entries())

    def state_entries(self) -> Iterator[tuple[str, StateEntry]]:
        """Every optimizer state tensor with the name of its parameter, in the order of ``state_keys``."""
        if self.carries_state:
            for parameter, entries in zip(self.parameters, self.entries, strict=True):
                yield from ((parameter, entry) for entry in entries)

    def is_elementwise(self, position: int, parameter: Tensor) -> bool:
        """Whether each element of a stacked parameter is updated by itself; no trace may be under way."""
        index = self.group_of[position]
        like = parameter.new_empty(parameter.shape[1:], device="meta")
        return index is None or is_elementwise(self.structure.groups[index], like)

    def neutral_scalars(self) -> tuple[float, ...]:
        """The neutral value of each row of the scalar matrix."""
        return tuple(chain.from_iterable(rule_of(group).scalars.values() for group in self.structure.groups))


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


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Broadcast:
    """``[k]`` tensors shaped to broadcast over a parameter, each shape made once."""

    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, value: Tensor, like: Tensor) -> Tensor:
        key = (id(value), like.dim())
        if key not in self.made:
            # The value itself is kept too: its id must not be given to another tensor.
            self.made[key] = (value, value.reshape(-1, *([1] * (like.dim() - 1))))
        return self.made[key][1]


@contextmanager
def unit_of_graph(name: str) -> Iterator[None]:
    """Mark what is traced inside as one unit: lowering makes a region of it."""
    graph = tracer_graph()
    last = last_node(graph)
    yield
    for node in nodes_after(graph, last):
        node.meta["unit"] = name


class _InDtype:
    """The ``[k]`` tensors of the update in a parameter's dtype."""

    def __init__(
        self,
        settings: UpdateSettings,
        given: TailInputs,
        commits: Tensor,
        norm: Tensor,
        dtype: torch.dtype,
        *,
        by_bits: bool,
    ) -> None:
        self._settings = settings
        self._of_group: dict[int, dict[str, Tensor]] = {}
        self.rows = torch.where(commits, given.scalars, given.neutral).to(scalar_dtype(dtype))
        self.keeps = -commits.to(_BITS[dtype.itemsize]) if by_bits else commits
        if settings.clips_norm:
            self.shrink = torch.clamp(given.limits[0] / (norm + 1e-6), max=1.0).to(dtype)
        if settings.clips_value:
            self.bound = given.limits[1].to(dtype)

    def of_group(self, index: int) -> dict[str, Tensor]:
        if index not in self._of_group:
            groups = self._settings.structure.groups
            first = sum(len(rule_of(group).scalars) for group in groups[:index])
            names = enumerate(rule_of(groups[index]).scalars, first)
            self._of_group[index] = {name: self.rows[row] for row, name in names}
        return self._of_group[index]


class Updates:
    """Writes the updates of one step's parameters; members outside of ``commits`` get neutral scalars.

    ``norm`` is the one that clipping goes by; ``shaped`` has shapes that were made before; ``elementwise``
    says whose elements are updated one by one, ``by_bits`` how gradients are masked (`_zero_unless`).
    """

    def __init__(
        self,
        settings: UpdateSettings,
        given: TailInputs,
        commits: Tensor,
        norm: Tensor,
        shaped: Broadcast,
        elementwise: Sequence[bool],
        *,
        by_bits: bool,
    ) -> None:
        self._settings = settings
        self._elementwise = elementwise
        self._given = given
        self._shaped = shaped
        self._states = dict(zip(settings.state_keys(), given.states, strict=True))
        self._traced = _Traced(given)
        owners = zip(given.parameters, settings.group_of, strict=True)
        dtypes = dict.fromkeys(parameter.dtype for parameter, index in owners if index is not None)
        self._in_dtype = {
            dtype: _InDtype(settings, given, commits, norm, dtype, by_bits=by_bits) for dtype in dtypes
        }

    def append(self, position: int, unit: Unit, gradient: Tensor | GradientRows, *, fresh: bool) -> None:
        """Update one parameter; a ``fresh`` gradient is overwritten. Nothing where no optimizer has it."""
        settings, shaped = self._settings, self._shaped
        name, index = settings.parameters[position], settings.group_of[position]
        if index is None:
            return
        names = tuple(entry.name for entry in settings.entries[position])
        parameter = self._given.parameters[position]
        shape = tuple(parameter.shape[1:])
        known, group = self._in_dtype[parameter.dtype], settings.structure.groups[index]

        def change_one(
            parameter: Tensor, gradient: Tensor | None, state: Sequence[Tensor], *, fresh: bool
        ) -> None:
            """Update the parameter, flat or not, or rows of it; ``None`` is a gradient of zero."""
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
            scalars = {key: shaped(value, parameter) for key, value in known.of_group(index).items()}
            named, idle = dict(zip(names, state, strict=True)), settings.idle[index]
            apply_update(group, parameter, gradient, named, scalars, idle=idle, shape=shape)

        tensors = [parameter, *(self._states[name, state_name] for state_name in names)]
        if isinstance(gradient, GradientRows):
            with unit_of_graph(f"rows of update {unit.number}"):
                rows = [gradient.take(tensor) for tensor in tensors]
                change_one(rows[0], gradient.gradient, rows[1:], fresh=False)
            with unit_of_graph(f"update {unit.number}"):
                parameter, *state = flat(*tensors)
                change_one(parameter, None, state, fresh=False)
            with unit_of_graph(f"rows into {unit.number}"):
                for tensor, row in zip(tensors, rows, strict=True):
                    gradient.put(tensor, row)
            return
        own = [parameter, gradient, *tensors[1:]]

        def change() -> None:
            numbers = [tensor.dim() == 1 < parameter.dim() for tensor in own]
            together = iter(flat(*(t for t, is_number in zip(own, numbers, strict=True) if not is_number)))
            flattened = [t if n else next(together) for t, n in zip(own, numbers, strict=True)]
            first, second, *state = flattened if self._elementwise[position] else own
            change_one(first, second, state, fresh=fresh)

        self._traced.write(own, (index, fresh), unit, change)


def _zero_unless(gradient: Tensor, keeps: Tensor, *, fresh: bool) -> Tensor:
    """``gradient`` where ``keeps`` is true or its bits are all ones, +0.0 elsewhere, NaN or not.

    Bits take a third of the time of ``where`` on ATen's kernels for a CPU, which has no fast loop for two
    operands that broadcast. Code that Inductor compiles for a CPU takes three times as long by bits: it looks
    at a float's bits one by one. A ``fresh`` gradient is nobody else's memory and may be overwritten.
    """
    if keeps.dtype is torch.bool:
        return torch.where(keeps, gradient, 0.0)
    bits = gradient.view(keeps.dtype)
    return (bits.bitwise_and_(keeps) if fresh else bits & keeps).view(gradient.dtype)


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
        self._known: dict[Hashable, tuple[tuple[fx.Node, ...], list[fx.Node]]] = {}

    def write(
        self, own: Sequence[Tensor], decisive: Hashable, unit: Unit, change: Callable[[], None]
    ) -> None:
        """Write the update of ``own`` tensors, by tracing ``change`` where none of the same kind is known.

        All else that it reads is common to updates whose shapes and ``decisive`` facts are equal.
        """
        kind = (decisive, tuple((tuple(t.shape), t.stride(), t.dtype) for t in own))
        nodes = tuple(self._node_of[id(tensor)] for tensor in own if id(tensor) in self._node_of)
        is_known = len(set(nodes)) == len(own)  # accumulated gradients are computed here
        if is_known and kind in self._known:
            before, body = self._known[kind]
            copied = dict(zip(before, nodes, strict=True))
            for node in body:
                # What depends on nothing of the parameter's own is common to all: scalars, shaped to
                # broadcast.
                if any(source in copied for source in node.all_input_nodes):
                    copied[node] = copy_node(self._graph, node, lambda n: copied.get(n, n))
                    copied[node].meta["unit"] = f"update {unit.number}"
            return
        last = last_node(self._graph)
        with unit_of_graph(f"update {unit.number}"):
            change()
        if is_known:
            self._known[kind] = (nodes, nodes_after(self._graph, last))


def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors ``[k, ...]`` as ``[k, n]`` where all of them are in one order in memory, else as they are.

    Parameters of many shapes then share one compiled update.
    """
    shape, stride = tensors[0].shape[1:], tensors[0].stride()[1:]
    if any(tensor.stride()[1:] != stride for tensor in tensors) or math.prod(shape) == 0:
        return tensors
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim]))
    expected = 1
    for dim in reversed(order):
        if shape[dim] > 1 and stride[dim] != expected:
            return tensors
        expected *= shape[dim]
    axes = [0, *(dim + 1 for dim in order)]
    return tuple(tensor.permute(axes).reshape(tensor.shape[0], -1) for tensor in tensors)


Tail = Callable[[TailInputs], tuple[Tensor, Tensor]]


def make_tail(
    settings: UpdateSettings, fresh: Sequence[bool], elementwise: Sequence[bool], *, by_bits: bool
) -> Tail:
    """The tail as a function to trace; it returns the gradient norm and who is finite, ``[k]`` each.

    ``fresh`` says which gradients are in memory that nothing else refers to, ``elementwise`` which parameters
    are updated element by element, ``by_bits`` how gradients are masked.
    """

    def tail(given: TailInputs) -> tuple[Tensor, Tensor]:
        gradients: list[Tensor | GradientRows] = [
            _in_full(given, position) for position in range(len(given.gradients))
        ]
        if settings.accumulates:
            gradients = [
                total.add_(_dense(gradient))
                for total, gradient in zip(given.accumulators, gradients, strict=True)
            ]
        norm = _norm(gradients, given.loss)
        shaped = Broadcast()
        finite, commits = _commit_buffers(given, norm, shaped)
        if settings.applies:
            given.updates.add_(commits)
            updates = Updates(settings, given, commits, norm, shaped, elementwise, by_bits=by_bits)
            for unit in large_alone(given.parameters):
                for position in unit.positions:
                    mine = fresh[position] and not settings.accumulates
                    updates.append(position, unit, gradients[position], fresh=mine)
            if settings.accumulates:
                for total in given.accumulators:
                    total.zero_()
        return norm, finite

    return tail


def _commit_buffers(given: TailInputs, norm: Tensor, shaped: Broadcast) -> tuple[Tensor, Tensor]:
    """Masks of members that are finite, and that also train; buffers of the latter take their new values."""
    finite = torch.isfinite(given.loss) & torch.isfinite(norm)
    given.alive.logical_and_(finite | ~given.active)
    commits = given.alive & given.active
    for old, new in zip(given.buffers, given.new_buffers, strict=True):
        old.copy_(torch.where(shaped(commits, old), new, old))
    return finite, commits


def _in_full(given: TailInputs, position: int) -> Tensor | GradientRows:
    """A gradient; one of rows with what belongs to the same row added up."""
    gradient = given.gradients[position]
    if not isinstance(gradient, RowGradient):
        return gradient
    with unit_of_graph(f"rows {position}"):
        return GradientRows.of(gradient, given.parameters[position])


def _dense(gradient: Tensor | GradientRows) -> Tensor:
    assert isinstance(gradient, Tensor), "steps that accumulate have gradients of whole tensors"
    return gradient


def _norm(gradients: Sequence[Tensor | GradientRows], loss: Tensor) -> Tensor:
    """Per-member 2-norm over all gradients. One that overflows counts as infinite."""
    whole = [each.once if isinstance(each, GradientRows) else each for each in gradients]
    if not whole:
        return torch.zeros_like(loss, dtype=torch.float64)
    parts: dict[int, Tensor] = {}
    for unit in large_alone(whole):
        for position in unit.positions:
            wide = torch.float64 if whole[position].dtype == torch.float64 else torch.float32
            with unit_of_graph(f"norm {unit.number}"):
                rows = flat(whole[position])[0].reshape(len(loss), -1)
                parts[position] = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
    each_norm = torch.stack([parts[position].to(torch.float64) for position in sorted(parts)])
    norm: Tensor = torch.linalg.vector_norm(each_norm, dim=0)
    return norm
