"""One member's step as a graph: forward, backward from an explicit tangent, buffer updates (B.1.2).

The member's own Python code runs once, under fake tensors: no memory is touched, and a model larger
than the device can be traced. Autocast, in-place changes, batch-norm updates, Python control flow and
modules are gone from the result; what is left are ATen operators.

The paper fuses modules first and traces the fused one. Here one member is traced and its graph is
fused afterwards (D1): the cost of tracing does not grow with the width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainmux.errors import LossError, TraceError, TrainmuxError
from trainmux.ir import GraphInput, GraphOutput, InputKind, OutputKind
from trainmux.runtime import deterministic_algorithms
from trainmux.tracing._cleanup import output_nodes, simplify, source_of
from trainmux.tracing._composites import own_composites
from trainmux.tracing._constant_masks import drop_constant_masks
from trainmux.tracing._linalg import failures_make_nan
from trainmux.tracing._randomness import draw_from_counters, own_generator_error
from trainmux.tracing._source import innermost_user_frame, is_user_file, node_location
from trainmux.tracing._substitute import Substitution, unique_buffers, unique_parameters
from trainmux.tracing._torch_private import (
    DATA_DEPENDENT_ERRORS,
    CheckpointPolicy,
    FakeTensorMode,
    checkpoint_regions,
    functionalized,
    make_fx,
    recorded_frames,
    refuses_generators,
    traced_operator,
    tracing_flags,
)
from trainmux.tracing._tree import FlatBatch

LossFunction = Callable[[Any, Any], Any]

_INDEPENDENT = (
    "expected a loss that depends on the model's parameters, got one that does not (no gradient reaches any "
    "of them); compute it from the model's output without detach() or no_grad()"
)
_DECOMPOSE = (
    torch.ops.aten.native_dropout_backward,
    torch.ops.aten.slice_backward,
    torch.ops.aten.select_backward,
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.rrelu_with_noise_backward,
)


@dataclass(frozen=True)
class TraceSettings:
    """What besides model, loss and batch decides the graph."""

    device: torch.device
    autocast: torch.dtype | None
    compute_dtype: torch.dtype | None  # floating inputs are seen in this dtype; None keeps their own
    deterministic: bool = False  # torch picks its attention kernels by this, and it does so while tracing


@dataclass(frozen=True)
class TracedGraph:
    """A member's graph with the meaning of its placeholders and outputs, in order.

    ``num_forward_outputs`` of the outputs come from the forward pass; gradients follow. A forward-only
    trace has no gradients and no tangent.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]

    @property
    def num_forward_outputs(self) -> int:
        return sum(output.kind is not OutputKind.GRADIENT for output in self.outputs)


class _Names:
    """Collected while the user's function runs: names that only its result reveals."""

    def __init__(self) -> None:
        self.metrics: list[str] = []
        self.used_parameters: list[str] = []
        self.regions = 0


def trace_joint(
    model: nn.Module, loss_fn: LossFunction, batch: FlatBatch, settings: TraceSettings
) -> TracedGraph:
    """Trace forward, backward and buffer updates of one member, or raise ``TraceError`` or ``LossError``."""
    return _trace(model, loss_fn, batch, settings, training=True)


def trace_forward(
    model: nn.Module, metric_fn: LossFunction, batch: FlatBatch, settings: TraceSettings
) -> TracedGraph:
    """Trace ``metric_fn(model, batch) -> tensor | {name: tensor}`` without gradients, in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return _trace(model, metric_fn, batch, settings, training=False)
    finally:
        for module, mode in modes:
            module.training = mode


def _trace(
    model: nn.Module, fn: LossFunction, batch: FlatBatch, settings: TraceSettings, *, training: bool
) -> TracedGraph:
    parameters, buffers = unique_parameters(model), unique_buffers(model)
    substitution = Substitution(model)
    names = _Names()
    trainable = [named.tensor.requires_grad and training for named in parameters]
    num_parameters, num_buffers, num_leaves = len(parameters), len(buffers), len(batch.tensors)
    buffer_names = tuple(named.name for named in buffers)

    def step(*flat: Tensor) -> list[Any]:
        given = list(flat[:num_parameters])
        held = list(flat[num_parameters : num_parameters + num_buffers])
        leaves = list(flat[num_parameters + num_buffers :][:num_leaves])
        tangent = flat[-1]
        used = [
            tensor.detach().requires_grad_(True) if learns else tensor
            for tensor, learns in zip(given, trainable, strict=True)
        ]
        replacements = {
            id(named.tensor): tensor
            for named, tensor in zip((*parameters, *buffers), (*used, *held), strict=True)
        }
        with substitution.active(replacements), _autocast(settings), _grad(training):
            result = fn(model, batch.rebuild(leaves))
            new_buffers = substitution.current(buffer_names)
        if not training:
            return _as_metrics(result, names)
        loss, metrics = _as_loss(result, names)
        learning = [tensor for tensor, learns in zip(used, trainable, strict=True) if learns]
        gradients = torch.autograd.grad(
            loss, learning, tangent.to(loss.dtype).reshape(loss.shape), allow_unused=True
        )
        learning_names = [named.name for named, learns in zip(parameters, trainable, strict=True) if learns]
        names.used_parameters = [
            name for name, grad in zip(learning_names, gradients, strict=True) if grad is not None
        ]
        kept = [grad for grad in gradients if grad is not None]
        if not kept:
            raise LossError(_INDEPENDENT)
        # The parameters go out too: a placeholder that comes back as itself was not changed.
        return [loss.detach().reshape(()), *metrics, *new_buffers, *kept, *used]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    scalar = torch.empty((), dtype=torch.float64)  # a third must be a third in any loss's dtype
    counter = torch.empty((), dtype=torch.int64)
    originals = [named.tensor for named in (*parameters, *buffers)] + list(batch.tensors)
    fakes = [_fake(mode, tensor, settings) for tensor in (*originals, counter, counter, scalar)]
    with deterministic_algorithms(settings.deterministic):
        module = _run_tracer(step, fakes, mode, names)
    failures_make_nan(module, mode)
    draw_from_counters(module, num_parameters + num_buffers + num_leaves, mode)
    drop_constant_masks(module)

    kinds = (
        [(InputKind.PARAMETER, named.name) for named in parameters]
        + [(InputKind.BUFFER, named.name) for named in buffers]
        + [(InputKind.BATCH, leaf.path) for leaf in batch.spec.leaves]
        + [(InputKind.SEED, "seed"), (InputKind.COUNTER, "counter"), (InputKind.TANGENT, "tangent")]
    )
    inputs = tuple(
        GraphInput(kind, name, tuple(fake.shape), str(fake.dtype))
        for (kind, name), fake in zip(kinds, fakes, strict=True)
    )
    metric_outputs = [GraphOutput(OutputKind.METRIC, name) for name in names.metrics]
    buffer_outputs = [GraphOutput(OutputKind.BUFFER, name) for name in buffer_names]
    if not training:
        simplify(module, range(len(metric_outputs)))
        return TracedGraph(module, inputs, tuple(metric_outputs))
    gradient_outputs = [GraphOutput(OutputKind.GRADIENT, name) for name in names.used_parameters]
    outputs = [GraphOutput(OutputKind.LOSS, "loss"), *metric_outputs, *buffer_outputs, *gradient_outputs]
    _refuse_changed_parameters(module, [named.name for named in parameters])
    kept = _without_unchanged_buffers(module, outputs)
    simplify(module, kept)
    return TracedGraph(module, inputs, tuple(outputs[position] for position in kept))


def _fake(mode: FakeTensorMode, tensor: Tensor, settings: TraceSettings) -> Tensor:
    dtype = tensor.dtype
    if settings.compute_dtype is not None and dtype.is_floating_point:
        dtype = settings.compute_dtype
    # Stacked storage is contiguous per member, whatever strides the member's own tensor has.
    with mode:
        return torch.empty(tensor.shape, dtype=dtype, device=settings.device)


def _autocast(settings: TraceSettings) -> AbstractContextManager[Any]:
    if settings.autocast is None:
        return torch.autocast(settings.device.type, enabled=False)
    # The weight cache would hand a cast made in one place to another with a graph of its own.
    return torch.autocast(settings.device.type, dtype=settings.autocast, cache_enabled=False)


def _grad(training: bool) -> AbstractContextManager[Any]:
    return torch.enable_grad() if training else torch.no_grad()


def _as_loss(result: Any, names: _Names) -> tuple[Tensor, list[Tensor]]:
    metrics: dict[str, Any] = {}
    loss = result
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], dict):
        loss, metrics = result
    if not isinstance(loss, Tensor):
        raise LossError(
            f"expected the loss function to return a scalar tensor or (loss, {{name: tensor}}), got "
            f"{type(result).__name__}; return the loss itself, e.g. output.loss"
        )
    if loss.numel() != 1:
        raise LossError(
            f"expected a scalar loss, got a tensor of shape {tuple(loss.shape)}; reduce it with .mean()"
        )
    if not loss.dtype.is_floating_point:
        raise LossError(f"expected a floating-point loss, got {loss.dtype}; compute it from model outputs")
    if not loss.requires_grad:
        raise LossError(_INDEPENDENT)
    return loss, _metric_values(metrics, names)


def _as_metrics(result: Any, names: _Names) -> list[Tensor]:
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], dict):
        result = {"loss": result[0], **result[1]}
    if isinstance(result, Tensor):
        result = {"loss": result}
    if not isinstance(result, dict) or not result:
        raise LossError(
            f"expected the metric function to return a tensor or a dict of tensors, got "
            f"{type(result).__name__}; return {{name: scalar tensor}}"
        )
    return _metric_values(result, names)


def _metric_values(metrics: dict[str, Any], names: _Names) -> list[Tensor]:
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            raise LossError(
                f"metric {name!r}: expected a tensor, got {type(value).__name__}; do not call .item() on it"
            )
    names.metrics = [str(name) for name in metrics]
    # The clone keeps a metric that is an input or the loss itself a value of its own.
    return [value.detach().clone() for value in metrics.values()]


def _run_tracer(
    step: Callable[..., Any], fakes: Sequence[Tensor], mode: FakeTensorMode, names: _Names
) -> fx.GraphModule:
    def mark(nodes: list[fx.Node]) -> None:
        names.regions += 1
        for node in nodes:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = names.regions

    table: Any = torch._decomp.get_decompositions(_DECOMPOSE)
    tracer = make_fx(functionalized(step), decomposition_table=table, record_stack_traces=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # What torch says about its own fake kernels is not news to the user.
            warnings.simplefilter("ignore")
            stack.enter_context(mode)
            stack.enter_context(tracing_flags())
            stack.enter_context(recorded_frames(is_user_file))
            stack.enter_context(own_composites())
            stack.enter_context(checkpoint_regions(mark))
            return tracer(*fakes)
    except TrainmuxError:
        raise
    except Exception as error:
        raise _trace_error(error) from error


def _trace_error(error: Exception) -> TraceError:
    location = innermost_user_frame(error.__traceback__)
    where = f" at {location}" if location else ""
    op = getattr(error, "func", None)
    if refuses_generators(error):
        return own_generator_error(str(traced_operator(error)), location)
    if isinstance(error, DATA_DEPENDENT_ERRORS):
        name = str(op)
        return TraceError(
            f"{name}{where}: the result or its shape depends on the values in a tensor, which a graph "
            "cannot express; replace .item(), `if tensor`, nonzero or boolean indexing by torch.where or "
            "a fixed shape",
            op=name,
            location=location,
        )
    return TraceError(
        f"tracing stopped{where}: {type(error).__name__}: {error}; the model must run on fake tensors: "
        "no NumPy, no Python values read from tensors, constants registered as buffers",
        op=None if op is None else str(op),
        location=location,
    )


def _refuse_changed_parameters(module: fx.GraphModule, names: list[str]) -> None:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"][: len(names)]
    returned = output_nodes(module)[-len(names) :] if names else []
    for name, placeholder, value in zip(names, placeholders, returned, strict=True):
        changed = source_of(value)
        if changed is not placeholder:
            location = node_location(changed)
            where = f" at {location}" if location else ""
            raise TraceError(
                f"parameter {name} is changed in place{where} by the forward pass; expected parameters to be "
                "changed by the optimizer only: compute a new tensor, or keep the value in a buffer",
                op=str(changed.target),
                location=location,
            )


def _without_unchanged_buffers(module: fx.GraphModule, outputs: list[GraphOutput]) -> list[int]:
    """Positions of the outputs to keep: all but buffers that come back as they went in."""
    kept = []
    for position, (output, node) in enumerate(zip(outputs, output_nodes(module), strict=False)):
        unchanged = output.kind is OutputKind.BUFFER and source_of(node).op == "placeholder"
        if not unchanged:
            kept.append(position)
    return kept
