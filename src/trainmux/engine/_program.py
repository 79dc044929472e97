"""A fused step as one graph.

The program is forward, backward and tail in one line of nodes; values passed between them are freed at
their last use. It changes parameters, buffers and optimizer state in place and returns losses and
metrics.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.engine._order import Apply, Halves, KeptViews, make_masks_late
from trainmux.engine._row_gradients import as_row_gradient, erase_unread
from trainmux.engine._updates import TailInputs, UpdateSettings, make_tail
from trainmux.fusion import FusedGraph
from trainmux.fusion.optimizers import StateEntry
from trainmux.ir import ByteClass, GraphInput, InputKind, OutputKind, Phase
from trainmux.runtime import stacked_strides
from trainmux.tracing import (
    FakeTensor,
    copy_node,
    graph_constant,
    graph_module,
    make_fx,
    output_nodes,
    split_joint,
)

TAIL_INPUTS = ("scalars", "neutral", "limits", "active", "alive", "updates")
"""Arguments of the update, behind the fused inputs, optimizer state and accumulators, in this order."""
FED_NUMBERS = ("scalars", "limits", "active")
"""Numbers that the host sends with every step."""
HELD_NUMBERS = tuple(name for name in TAIL_INPUTS if name not in FED_NUMBERS)
"""Numbers that stay on the device from step to step."""
_BYTE_CLASSES = {
    InputKind.PARAMETER: ByteClass.PARAMETER,
    InputKind.BUFFER: ByteClass.BUFFER,
    InputKind.BATCH: ByteClass.BATCH,
    InputKind.COUNTER: ByteClass.BATCH,
    InputKind.NUMBER: ByteClass.BATCH,
    InputKind.SEED: ByteClass.BUFFER,
}


class _Arguments:
    """Arguments of a program: fused inputs, optimizer state, gradient accumulators, numbers."""

    inputs: tuple[GraphInput, ...]

    @property
    def _update(self) -> UpdateSettings | None:
        """The update whose state is among the arguments."""
        raise NotImplementedError

    def state_keys(self) -> tuple[tuple[str, str], ...]:
        """(parameter, state name) of the optimizer state tensors, behind the fused inputs."""
        return () if self._update is None else self._update.state_keys()

    def total_names(self) -> tuple[str, ...]:
        """Names of the gradients whose accumulators come next."""
        return self._update.parameters if self._update is not None and self._update.accumulates else ()

    def number_names(self) -> tuple[str, ...]:
        """Names of the arguments that come last, out of ``TAIL_INPUTS``."""
        raise NotImplementedError

    def position_of(self, name: str) -> int:
        """Position of one of the numbers among the arguments."""
        first = len(self.inputs) + len(self.state_keys()) + len(self.total_names())
        return first + self.number_names().index(name)

    @functools.cached_property
    def fed_positions(self) -> tuple[int, ...]:
        """Positions of the batch, whose tensors are new with every run. All others keep their address."""
        # Cached, as the next one: every step asks for them.
        return tuple(i for i, item in enumerate(self.inputs) if item.kind is InputKind.BATCH)

    @functools.cached_property
    def positions_fed_anew(self) -> tuple[int, ...]:
        """Positions of arguments with new values in every run: the batch, and the host's numbers."""
        own = (InputKind.COUNTER, InputKind.NUMBER)
        of_members = [i for i, item in enumerate(self.inputs) if item.kind in own]
        fed = [name for name in self.number_names() if name in FED_NUMBERS]
        return (*self.fed_positions, *of_members, *map(self.position_of, fed))

    def byte_classes(self) -> list[ByteClass]:
        """Class of each argument in a budget."""
        found = [_BYTE_CLASSES.get(item.kind, ByteClass.CONSTANT) for item in self.inputs]
        found += [ByteClass.OPTIMIZER_STATE] * (len(self.state_keys()) + len(self.total_names()))
        return found + [
            ByteClass.BATCH if name in FED_NUMBERS else ByteClass.BUFFER for name in self.number_names()
        ]


@dataclass(frozen=True)
class StepProgram(_Arguments):
    """A step ready to run; its last arguments are ``TAIL_INPUTS``.

    It returns the loss, the gradient norm, the finite mask and the metrics, each with the model axis first.
    ``notes`` say in words how it runs.
    """

    module: torch.nn.Module
    inputs: tuple[GraphInput, ...]
    settings: UpdateSettings
    metrics: tuple[str, ...]
    notes: tuple[str, ...] = ()

    counts_draws = True
    """Random draws are numbered by the members' counters."""

    @property
    def _update(self) -> UpdateSettings:
        return self.settings

    def number_names(self) -> tuple[str, ...]:
        return TAIL_INPUTS

    def mask_positions(self) -> list[int]:
        """Arguments of which zeros keep a run from changing parameters, buffers and optimizer state."""
        return [self.position_of("active")]

    def accumulator_positions(self) -> range:
        """Positions of the gradient accumulators; none where the step does not accumulate."""
        first = len(self.inputs) + len(self.state_keys())
        return range(first, first + len(self.total_names()))

    def begin(self, arguments: Sequence[Tensor], kept: KeptViews | None = None) -> Apply:
        """Run up to the first change of anything that lasts; the result does the rest."""
        # Not a cached property: Python 3.11 has one lock for those, and cutting waits for the process's lock.
        halves: Any = self.__dict__.get("_halves")
        if halves is None:
            lasting = set(range(len(arguments))).difference(self.fed_positions)
            halves = Halves(self.module, lasting) if isinstance(self.module, fx.GraphModule) else self.module
            self.__dict__["_halves"] = halves
        begun: Apply = halves.begin(arguments, kept)
        return begun


@dataclass(frozen=True)
class ForwardProgram(_Arguments):
    """A forward-only program: fused inputs in, metrics out.

    It may have further arguments that it does not touch: with ``carried`` those which a step of these
    settings keeps from one run to the next (optimizer state, accumulators, ``HELD_NUMBERS``). A planned
    program has places for them then, the same ones as that of the step.
    """

    module: torch.nn.Module
    inputs: tuple[GraphInput, ...]
    metrics: tuple[str, ...]
    carried: UpdateSettings | None = None

    counts_draws = False
    """Random draws are numbered by the batches of an evaluation, whenever it is made."""

    @property
    def _update(self) -> UpdateSettings | None:
        return self.carried

    def number_names(self) -> tuple[str, ...]:
        return () if self.carried is None else HELD_NUMBERS

    def mask_positions(self) -> list[int]:
        """None: a run changes nothing that lasts."""
        return []

    def accumulator_positions(self) -> range:
        """None: a run adds to none of them."""
        return range(0)

    def begin(self, arguments: Sequence[Tensor], kept: KeptViews | None = None) -> Apply:
        """Run all of it: nothing that lasts changes."""
        results: list[Tensor] = self.module(*arguments)
        return lambda: results


def build_forward(fused: FusedGraph) -> ForwardProgram:
    """A forward-only program from a fused graph without gradients."""
    metrics = tuple(output.name for output in fused.outputs if output.kind is OutputKind.METRIC)
    return ForwardProgram(fused.module, fused.inputs, metrics)


def build_planned_forward(fused: FusedGraph, carried: UpdateSettings | None) -> ForwardProgram:
    """A forward-only program that a plan can be made of, with what is ``carried`` through it.

    Each metric is a copy of its own: one that is an argument, or a view of one, is computed by no node.
    """
    graph = fx.Graph()
    owner = torch.nn.Module()
    arguments = _placeholders(graph, fused)
    if carried is not None:
        by_name = _by_name(arguments, fused.inputs)
        parameters = {name: by_name[InputKind.PARAMETER, name].meta["val"] for name in carried.parameters}
        _state_placeholders(graph, carried, parameters)
        fakes = _number_fakes(carried, fused.width, arguments[0].meta["val"])
        for name in HELD_NUMBERS:
            _new_placeholder(graph, name, fakes[name])
    metrics = tuple(output.name for output in fused.outputs if output.kind is OutputKind.METRIC)
    results = []
    for value in _append(graph, owner, fused.module, arguments, Phase.FORWARD, "forward"):
        copied = graph.call_function(torch.ops.aten.clone.default, (value,))
        copied.meta.update(val=value.meta["val"], phase=Phase.FORWARD)
        results.append(copied)
    graph.output(results)
    graph.lint()
    return ForwardProgram(graph_module(owner, graph), fused.inputs, metrics, carried)


def build_step(
    fused: FusedGraph,
    settings: UpdateSettings,
    *,
    reuses_gradients: bool = True,
    updates_rows: bool = False,
) -> StepProgram:
    """Split the fused joint graph, append the tail, and write all of it as one graph.

    ``reuses_gradients`` lets the update overwrite gradients: a pass over memory less where operators run
    one by one, one more inside a compiled region; on a CPU it decides how they are masked as well.
    ``updates_rows``: gradients of embedding tables are never written as a whole; what is added up for one row
    comes in no fixed order.
    """
    split = split_joint(fused.module, fused.inputs, fused.outputs)
    graph = fx.Graph()
    owner = torch.nn.Module()
    arguments = _placeholders(graph, fused)
    by_name = _by_name(arguments, fused.inputs)
    tangents = [
        node for node, item in zip(arguments, fused.inputs, strict=True) if item.kind is InputKind.TANGENT
    ]
    primal = [node for node in arguments if node not in tangents]
    forward_values = _append(graph, owner, split.forward, primal, Phase.FORWARD, "forward")
    results, saved = forward_values[: split.num_forward_outputs], forward_values[split.num_forward_outputs :]
    saved_names = [node.name for node in output_nodes(split.forward)[split.num_forward_outputs :]]
    saved_by_name = dict(zip(saved_names, saved, strict=True))
    backward_inputs = [
        saved_by_name[node.name] if node.name in saved_by_name else tangents[0]
        for node in split.backward.graph.nodes
        if node.op == "placeholder"
    ]
    gradients = _append(graph, owner, split.backward, backward_inputs, Phase.BACKWARD, "backward")
    make_masks_late(graph)

    outputs: dict[OutputKind, dict[str, fx.Node]] = {kind: {} for kind in OutputKind}
    for described, node in zip(fused.outputs, results + gradients, strict=True):
        outputs[described.kind][described.name] = node
    norm, finite = _append_tail(
        graph,
        owner,
        by_name,
        outputs,
        settings,
        fused.width,
        reuses_gradients=reuses_gradients,
        updates_rows=updates_rows and settings.applies and not settings.accumulates,
    )
    metrics = outputs[OutputKind.METRIC]
    loss = outputs[OutputKind.LOSS]["loss"]
    graph.output([loss, norm, finite, *metrics.values()])
    _placeholders_first(graph)
    graph.lint()
    module = graph_module(owner, graph)
    return StepProgram(module, fused.inputs, settings, tuple(metrics))


def _by_name(
    nodes: Sequence[fx.Node], described: Sequence[GraphInput]
) -> dict[tuple[InputKind, str], fx.Node]:
    return {(item.kind, item.name): node for node, item in zip(nodes, described, strict=True)}


def _placeholders(graph: fx.Graph, fused: FusedGraph) -> list[fx.Node]:
    """Arguments for the fused inputs."""
    arguments = []
    for number, original in enumerate(fused.module.graph.find_nodes(op="placeholder")):
        arguments.append(graph.placeholder(f"input_{number}"))
        arguments[-1].meta["val"] = original.meta["val"]
    return arguments


def _append(
    graph: fx.Graph,
    owner: torch.nn.Module,
    part: fx.GraphModule,
    inputs: Sequence[fx.Node],
    phase: Phase,
    prefix: str,
) -> list[fx.Node]:
    """Copy ``part`` to the end of ``graph``; returns the nodes of its outputs."""
    copied: dict[fx.Node, fx.Node] = {}
    given = iter(inputs)
    for node in part.graph.nodes:
        if node.op == "placeholder":
            copied[node] = next(given)
        elif node.op != "output":
            new = copy_node(graph, node, lambda n: copied[n])
            if node.op == "get_attr":
                new.target = f"{prefix}_{str(node.target).replace('.', '_')}"
                value = graph_constant(part, node)
                if isinstance(value, FakeTensor):
                    raise RuntimeError(
                        f"expected real constants in the {prefix} graph, got a fake {node.target}"
                    )
                owner.register_buffer(new.target, value, persistent=False)
            if node.target is torch.ops.aten.view.default and not (
                phase is Phase.UPDATE and copied[_root(node)].op == "placeholder"
            ):
                # A kernel's real strides may differ from its fake ones (Fourier transforms do): a view that
                # was possible in the trace may not be in the run. What the update writes to stays a view.
                new.target = torch.ops.aten.reshape.default
            new.meta["phase"] = phase
            copied[node] = new
    return [copied[item] for item in output_nodes(part)]


def _root(node: fx.Node) -> fx.Node:
    """The node at the beginning of a chain of first arguments."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _placeholders_first(graph: fx.Graph) -> None:
    """Later stages add placeholders of their own: move all of them to the front, in order."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes))
    for node in placeholders:
        if node is not first:
            first.append(node)
        first = node


def _owns_memory(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether a gradient's memory holds every element once and belongs to no input and no other output."""
    if not node.meta["val"].is_contiguous():
        return False
    while node.op == "call_function" and node not in others:
        if node.target is operator.getitem:
            source, position = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(position, int)
            returned = source.target._schema.returns  # type: ignore[union-attr]
            return len(returned) > position and returned[position].alias_info is None
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        if node.target._schema.returns[0].alias_info is None:
            return True
        node = node.args[0]  # type: ignore[assignment]
    return False


def _fresh(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _new_placeholder(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    node = graph.placeholder("state_" + "".join(c if c.isalnum() else "_" for c in name))
    node.meta["val"] = value
    return node


def _state_placeholders(
    graph: fx.Graph, settings: UpdateSettings, parameters: Mapping[str, Tensor]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Optimizer state, and accumulators shaped like their parameters."""

    def fake(entry: StateEntry, parameter: Tensor) -> Tensor:
        dtype = entry.dtype or parameter.dtype
        if entry.shape == parameter.shape[1:] and dtype == parameter.dtype:
            return parameter
        assert isinstance(parameter, FakeTensor)
        shape, device = (parameter.shape[0], *entry.shape), parameter.device
        with parameter.fake_mode:
            strides = stacked_strides(entry.shape, dtype, device)
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    states = [
        _new_placeholder(graph, f"{name}:{entry.name}", fake(entry, parameters[name]))
        for name, entry in settings.state_entries()
    ]
    totals = settings.parameters if settings.accumulates else ()
    return states, [_new_placeholder(graph, f"total:{name}", parameters[name]) for name in totals]


def _number_fakes(settings: UpdateSettings, width: int, like: Tensor) -> dict[str, Tensor]:
    """Fakes for ``TAIL_INPUTS``, of the mode and device of ``like``."""
    assert isinstance(like, FakeTensor)
    num_scalars = len(settings.neutral_scalars())
    kinds = {
        "scalars": ((num_scalars, width), torch.float64),
        "neutral": ((num_scalars, 1), torch.float64),
        "limits": ((2, width), torch.float64),
        "active": ((width,), torch.bool),
        "alive": ((width,), torch.bool),
        "updates": ((width,), torch.int64),
    }
    with like.fake_mode:
        return {
            name: torch.empty(shape, dtype=dtype, device=like.device)
            for name, (shape, dtype) in kinds.items()
        }


def _append_tail(
    graph: fx.Graph,
    owner: torch.nn.Module,
    inputs: Mapping[tuple[InputKind, str], fx.Node],
    outputs: Mapping[OutputKind, Mapping[str, fx.Node]],
    settings: UpdateSettings,
    width: int,
    *,
    reuses_gradients: bool,
    updates_rows: bool,
) -> list[fx.Node]:
    """Trace the tail over fake tensors and append it behind the backward pass; norm and finite mask."""
    loss = outputs[OutputKind.LOSS]["loss"]
    parameters = [inputs[InputKind.PARAMETER, name] for name in settings.parameters]
    whole = [outputs[OutputKind.GRADIENT][name] for name in settings.parameters]
    elementwise = [
        settings.is_elementwise(position, node.meta["val"]) for position, node in enumerate(parameters)
    ]
    gradients = [
        (as_row_gradient(gradient, parameter) if updates_rows and alone else None) or gradient
        for gradient, parameter, alone in zip(whole, parameters, elementwise, strict=True)
    ]
    new_buffers = list(outputs[OutputKind.BUFFER].values())
    buffers = [inputs[InputKind.BUFFER, name] for name in outputs[OutputKind.BUFFER]]
    fakes = {name: node.meta["val"] for name, node in zip(settings.parameters, parameters, strict=True)}
    states, accumulators = _state_placeholders(graph, settings, fakes)
    numbers = _number_fakes(settings, width, loss.meta["val"])
    fed = [_new_placeholder(graph, name, numbers[name]) for name in TAIL_INPUTS]
    roles = [loss, buffers, new_buffers, parameters, gradients, states, accumulators, *fed]
    nodes, spec = pytree.tree_flatten(roles)
    forward_outputs = {loss, *outputs[OutputKind.METRIC].values(), *new_buffers}
    fresh = [reuses_gradients and _owns_memory(node, forward_outputs) for node in whole]
    by_bits = reuses_gradients or loss.meta["val"].device.type != "cpu"
    tail = make_tail(settings, fresh, elementwise, by_bits=by_bits)

    def flat(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return tail(TailInputs(*pytree.tree_unflatten(list(tensors), spec)))

    with loss.meta["val"].fake_mode, torch.no_grad():
        # Fresh ones: the tracer tells its inputs apart by identity, and state shares its parameter's.
        part = make_fx(flat)(*[_fresh(node.meta["val"]) for node in nodes])
    appended = _append(graph, owner, part, nodes, Phase.UPDATE, "update")
    for node, gradient in zip(whole, gradients, strict=True):
        if node is not gradient:
            erase_unread(node)
    return appended
