"""The updates of parameters, written into the graph that is being traced."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.engine._row_gradients import Rows, zero_like
from trainmux.engine._units import Unit
from trainmux.engine._update_settings import TailInputs, UpdateSettings
from trainmux.fusion.optimizers import apply_update, scalar_dtype, scalar_specs, state_names
from trainmux.tracing import copy_node, last_node, nodes_after, tracer_graph

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
def unit_of_graph(name: str, *, is_bucket: bool = False) -> Iterator[None]:
    """Mark what is traced inside as one unit: lowering makes a region of it, and of a bucket few kernels."""
    graph = tracer_graph()
    last = last_node(graph)
    yield
    for node in nodes_after(graph, last):
        _mark(node, name, is_bucket=is_bucket)


def _mark(node: fx.Node, unit: str, *, is_bucket: bool) -> None:
    node.meta["unit"] = unit
    node.meta["bucket"] = is_bucket


class _InDtype:
    """The ``[k]`` tensors of the update in a parameter's dtype."""

    def __init__(
        self,
        settings: UpdateSettings,
        given: TailInputs,
        commits: Tensor,
        norm: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._settings = settings
        self._of_group: dict[int, dict[str, Tensor]] = {}
        self.rows = torch.where(commits, given.scalars, given.neutral).to(scalar_dtype(dtype))
        rows = last_node(tracer_graph())
        self.keeps = -commits.to(_BITS[dtype.itemsize])
        keeps = last_node(tracer_graph())
        self.nodes = [(self.rows, rows), (self.keeps, keeps)]
        if settings.clips_norm:
            assert norm is not None
            self.shrink = torch.clamp(given.limits[0] / (norm + 1e-6), max=1.0).to(dtype)
        if settings.clips_value:
            self.bound = given.limits[1].to(dtype)
            self.nodes.append((self.bound, last_node(tracer_graph())))

    def of_group(self, index: int) -> dict[str, Tensor]:
        if index not in self._of_group:
            first = self._settings.scalar_offsets()[index]
            specs = scalar_specs(self._settings.structure.groups[index])
            self._of_group[index] = {spec.name: self.rows[first + i] for i, spec in enumerate(specs)}
        return self._of_group[index]


@dataclass(frozen=True)
class Scalars:
    """The ``[k]`` tensors of updates behind one mask; ``unit`` is the one that they are for, if not all."""

    in_dtype: Mapping[torch.dtype, _InDtype]
    shaped: Broadcast
    unit: Unit | None


class Updates:
    """Writes the updates of one step's parameters."""

    def __init__(self, settings: UpdateSettings, given: TailInputs) -> None:
        self._settings = settings
        self._given = given
        self._states = dict(zip(settings.state_keys(), given.states, strict=True))
        self._traced = _Traced(given)

    def scalars_of_all(self, commits: Tensor, norm: Tensor, shaped: Broadcast) -> Scalars:
        """Those of all parameters; members outside of ``commits`` get neutral ones."""
        return self._scalars(range(len(self._given.parameters)), commits, norm, shaped, None)

    def scalars_of(self, unit: Unit, commits: Tensor) -> Scalars:
        """Those of one unit, without what clips by norm."""
        return self._scalars(unit.positions, commits, None, Broadcast(), unit)

    def _scalars(
        self,
        positions: Sequence[int],
        commits: Tensor,
        norm: Tensor | None,
        shaped: Broadcast,
        unit: Unit | None,
    ) -> Scalars:
        owned = [position for position in positions if self._settings.group_of[position] is not None]
        dtypes = dict.fromkeys(self._given.parameters[position].dtype for position in owned)
        made = {dtype: _InDtype(self._settings, self._given, commits, norm, dtype) for dtype in dtypes}
        return Scalars(made, shaped, unit)

    def append(
        self, position: int, unit: Unit, gradient: Tensor | Rows, scalars: Scalars, *, fresh: bool
    ) -> None:
        """Update one parameter; a ``fresh`` gradient is overwritten. Nothing where no optimizer has it."""
        settings = self._settings
        name, index = settings.parameters[position], settings.group_of[position]
        if index is None:
            return
        names = state_names(settings.structure.groups[index])
        parameter = self._given.parameters[position]
        tensors = [parameter, *(self._states[name, state_name] for state_name in names)]
        if isinstance(gradient, Rows):
            with unit_of_graph(f"rows of update {unit.number}"):
                rows = [gradient.take(tensor) for tensor in tensors]
                of_rows = dict(zip(names, rows[1:], strict=True))
                self._change(index, rows[0], gradient.gradient, of_rows, scalars, fresh=False)
            with unit_of_graph(f"update {unit.number}"):
                parameter, *state = flat(*tensors)
                self._change(
                    index, parameter, None, dict(zip(names, state, strict=True)), scalars, fresh=False
                )
            with unit_of_graph(f"rows into {unit.number}"):
                for tensor, row in zip(tensors, rows, strict=True):
                    gradient.put(tensor, row)
            return
        own = [parameter, gradient, *tensors[1:]]
        like = self._traced.like(own, (index, fresh), scalars)
        if self._traced.repeat(like, unit):
            return
        with (
            self._traced.noted(like),
            unit_of_graph(f"update {unit.number}", is_bucket=unit.is_bucket),
        ):
            parameter, gradient, *state = flat(*own)
            self._change(
                index, parameter, gradient, dict(zip(names, state, strict=True)), scalars, fresh=fresh
            )

    def _change(
        self,
        index: int,
        parameter: Tensor,
        gradient: Tensor | None,
        state: Mapping[str, Tensor],
        scalars: Scalars,
        *,
        fresh: bool,
    ) -> None:
        """Update one parameter, or rows of it; ``None`` is a gradient of zero."""
        known, shaped = scalars.in_dtype[parameter.dtype], scalars.shaped
        if gradient is None:
            gradient = zero_like(parameter)
        else:
            gradient = gradient.to(parameter.dtype)
            if self._settings.clips_norm:
                gradient = gradient * shaped(known.shrink, gradient)
            if self._settings.clips_value:
                bound = shaped(known.bound, gradient)
                gradient = torch.clamp(gradient, -bound, bound)
            gradient = _zero_unless(gradient, shaped(known.keeps, gradient), fresh=fresh)
        apply_update(
            self._settings.structure.groups[index],
            parameter,
            gradient,
            state,
            {key: shaped(value, parameter) for key, value in known.of_group(index).items()},
            idle=self._settings.idle[index],
        )


def _zero_unless(gradient: Tensor, keeps: Tensor, *, fresh: bool) -> Tensor:
    """``gradient`` where the bits of ``keeps`` are all ones, +0.0 where they are zeros, NaN or not.

    The same as ``where`` with a zero, at a third of its time on a CPU, which has no fast loop for two
    operands that broadcast. A ``fresh`` gradient is nobody else's memory and is overwritten.
    """
    bits = gradient.view(keeps.dtype)
    return (bits.bitwise_and_(keeps) if fresh else bits & keeps).view(gradient.dtype)


@dataclass(frozen=True)
class _Like:
    """An update: the nodes that are its own, if all of them are known, and what those with equal kinds share.

    All else that it reads is common to updates of its kind.
    """

    nodes: tuple[fx.Node, ...] | None
    kind: Hashable


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

    def like(self, own: Sequence[Tensor], decisive: Hashable, scalars: Scalars) -> _Like:
        """The update of ``own`` tensors behind the mask of ``scalars``."""
        found = [self._node_of.get(id(tensor)) for tensor in own]
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in own)
        unit = scalars.unit
        whose: Hashable = "all"
        if unit is not None and len(unit.positions) > 1:
            whose = unit.number  # its parameters share shapes of its scalars, which no other unit may read
        elif unit is not None:
            whose = "one"
            found += [node for _, node in scalars.in_dtype[own[0].dtype].nodes]
        nodes = tuple(node for node in found if node is not None)
        is_known = len(set(nodes)) == len(found)  # accumulated gradients are computed here
        return _Like(nodes if is_known else None, (decisive, whose, shapes))

    def repeat(self, like: _Like, unit: Unit) -> bool:
        """Write an update, if one of the same kind is known; says whether it did."""
        found = self._known.get(like.kind)
        if like.nodes is None or found is None:
            return False
        before, body = found
        copied = dict(zip(before, like.nodes, strict=True))
        for node in body:
            # What depends on nothing of the parameter's own is common to all: scalars, shaped to broadcast.
            if any(source in copied for source in node.all_input_nodes):
                copied[node] = copy_node(self._graph, node, lambda n: copied.get(n, n))
                _mark(copied[node], f"update {unit.number}", is_bucket=unit.is_bucket)
        return True

    @contextmanager
    def noted(self, like: _Like) -> Iterator[None]:
        """What is traced inside is such an update."""
        last = last_node(self._graph)
        yield
        if like.nodes is not None:
            self._known[like.kind] = (like.nodes, nodes_after(self._graph, last))


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
