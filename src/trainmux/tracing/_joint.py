"""One member's step as a graph: forward, backward from an explicit tangent, buffer updates (B.1.2).

The member's own Python code runs once, under fake tensors: no memory is touched, and a model larger
than the device can be traced. Autocast, in-place changes, batch-norm updates, Python control flow and
modules are gone from the result; what is left are ATen operators.

The paper fuses modules first and traces the fused one. Here one member is traced and its graph is
fused afterwards (D1): the cost of tracing does not grow with the width.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainmux.errors import LossError, TraceError, TrainmuxError, TrainmuxWarning, warn_user
from trainmux.ir import GraphInput, GraphOutput, InputKind, OutputKind
from trainmux.runtime import deterministic_algorithms, ignored_warnings, process_lock
from trainmux.tracing._batch import FlatBatch, Text
from trainmux.tracing._composites import own_composites
from trainmux.tracing._effects import (
    Change,
    Substitution,
    lasting,
    random_error,
    same_results,
    state_error,
    watched_lines,
)
from trainmux.tracing._fixed_shapes import fixed_shape_decompositions
from trainmux.tracing._passes import (
    REGION,
    drop_constant_masks,
    graph_constant,
    move_to,
    output_nodes,
    simplify,
    source_of,
)
from trainmux.tracing._randomness import (
    DrawnBranchError,
    Draws,
    known_scalar,
    own_generator_error,
    random_decompositions,
    refuse_random_nodes,
)
from trainmux.tracing._reach import GeneratorState, Items, Reach
from trainmux.tracing._source import innermost_user_frame, is_user_file, node_location, refusal
from trainmux.tracing._torch_private import (
    DATA_DEPENDENT_ERRORS,
    MAX_NODES,
    CheckpointPolicy,
    ConstantChangedError,
    FakeTensorMode,
    TooLongError,
    checkpoint_regions,
    frames_of,
    functionalized,
    higher_order_operator,
    make_fx,
    refuses_generators,
    replaced,
    traced_operator,
    traced_tensor,
    tracing_thread,
)
from trainmux.tracing._transformers import transformers_as_in_eager
from trainmux.tracing._wider import extends_by_zeros

LossFunction = Callable[[Any, Any], Any]

_INDEPENDENT = (
    "expected a loss that depends on the model's parameters, got one that does not (no gradient reaches any "
    "of them); compute it from the model's output without detach() or no_grad()"
)
_REMEDY = "replace .item(), `if tensor`, nonzero or boolean indexing by torch.where or a fixed shape"
_EXPERTS = (
    "let experts compute in fixed shapes: model.set_experts_implementation('batched_mm') in transformers, or "
    "every expert for every token, weighted by its gate"
)
_REMEDIES = {
    "_pack_padded_sequence": "run the layer on the padded sequences and mask what comes after their ends",
    "_ctc_loss": "compute the loss from padded tensors by torch.logsumexp, one time step after another",
}
_RESERVED = frozenset({"loss", "grad_norm", "finite"})
_DECOMPOSE = (
    torch.ops.aten.native_dropout_backward,
    torch.ops.aten.slice_backward,
    torch.ops.aten.select_backward,
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.rrelu_with_noise_backward,
)
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)


@dataclass(frozen=True)
class TraceSettings:
    """Settings that decide a graph besides model, loss and batch."""

    device: torch.device
    autocast: torch.dtype | None
    compute_dtype: torch.dtype | None  # floating inputs are seen in this dtype; None keeps their own
    deterministic: bool = False  # torch picks its attention kernels by this, and it does so while tracing
    default_device: torch.device | None = None  # of tensors that user code makes; None is the CPU


@dataclass(frozen=True)
class TracedGraph:
    """A member's graph with the meaning of its placeholders and outputs, in order.

    Outputs of the forward pass come first, then gradients. A forward-only trace has no gradients and no use
    for the tangent.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]


Shape = tuple[int, ...]


def trace_joint(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: FlatBatch,
    settings: TraceSettings,
    wider: Mapping[str, Shape] = MappingProxyType({}),
) -> TracedGraph:
    """Trace forward, backward and buffer updates of one member, or raise ``TraceError`` or ``LossError``.

    ``wider`` has larger shapes for some parameters: the graph is for them padded with zeros. ``TraceError``
    where it would not compute the same.
    """
    with process_lock:
        trace = partial(_trace, model, loss_fn, batch, settings, training=True)
        return _trace_wider(batch.text, trace, wider)


def trace_forward(
    model: nn.Module,
    metric_fn: LossFunction,
    batch: FlatBatch,
    settings: TraceSettings,
    wider: Mapping[str, Shape] = MappingProxyType({}),
) -> TracedGraph:
    """Trace ``metric_fn(model, batch) -> tensor | {name: tensor}`` without gradients, in evaluation mode.

    ``wider`` is as for `trace_joint`.
    """
    with process_lock, Reach(model).restored() as before:
        model.eval()
        if dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys() != before.named.keys():
            raise TraceError(
                "eval() gives the model other parameters or buffers; expected the same ones in both modes: "
                "keep what it needs for evaluation in a plain attribute, or compute it in forward"
            )
        trace = partial(_trace, model, metric_fn, batch, settings, training=False)
        return _trace_wider(batch.text, trace, wider)


_Trace = Callable[[Mapping[str, Shape]], TracedGraph]
"""Traces for parameters of these shapes, if they are wider than their own."""


def _trace_wider(text: Text, trace: _Trace, wider: Mapping[str, Shape]) -> TracedGraph:
    """Trace for parameters padded with zeros, and refuse what then computes something else."""
    traced = _trace_as_read(text, trace, wider)
    if wider:
        own = _trace_as_read(text, trace, {})
        kinds = [output.kind for output in traced.outputs]
        if own.outputs != traced.outputs or not extends_by_zeros(own.module, traced.module, kinds):
            raise TraceError(
                f"expected a model that computes alike with {next(iter(wider))} padded with zeros, got one "
                "that depends on its size; members of several ranks train in a group each"
            )
    return traced


def _trace_as_read(text: Text, trace: _Trace, wider: Mapping[str, Shape]) -> TracedGraph:
    """Trace for any text in the batch or, if the code reads it, for its own text; with typed errors."""

    def typed() -> TracedGraph:
        try:
            return trace(wider)
        except TrainmuxError:
            raise
        except Exception as error:
            raise _trace_error(error) from error

    text.was_hidden = text.was_noted = False
    try:
        traced = typed()
    except TrainmuxError:
        if text.is_read or not text.was_hidden:
            raise
    else:
        if not text.was_noted:
            return traced
    # Not every use is noted: where C wants a string, it just fails.
    text.is_read = True
    try:
        return typed()
    except TrainmuxError:
        text.is_read = False
        raise


def _trace(
    model: nn.Module,
    fn: LossFunction,
    batch: FlatBatch,
    settings: TraceSettings,
    wider: Mapping[str, Shape],
    *,
    training: bool,
) -> TracedGraph:
    call = _Call(model, fn, batch, settings, training)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    scalar = torch.empty((), dtype=torch.float64)  # a third must be a third in any loss's dtype
    counter = torch.empty((), dtype=torch.int64)
    originals = [*call.reach.own, *batch.tensors]
    fakes = [_fake(mode, tensor, settings) for tensor in (*originals, counter, counter, scalar)]
    for place, name in enumerate(call.reach.named):
        if name in wider:
            with mode:
                fakes[place] = fakes[place].new_empty(wider[name])
    with deterministic_algorithms(settings.deterministic):
        module = call.traced(call.once, fakes, mode)
        _refuse_effects(call, module, fakes, mode)
    _refuse_mixed_products(module, settings)
    refuse_random_nodes(module)
    _refuse_own_constants(module, call)
    move_to(module, settings.device)
    drop_constant_masks(module)

    names = (
        [(InputKind.PARAMETER, name) for name in call.parameters]
        + [(InputKind.BUFFER, name) for name in call.buffers]
        + [(InputKind.BATCH, leaf.path) for leaf in batch.spec.leaves]
        + [(InputKind.SEED, "seed"), (InputKind.COUNTER, "counter"), (InputKind.TANGENT, "tangent")]
    )
    inputs = tuple(
        GraphInput(kind, name, tuple(fake.shape), str(fake.dtype))
        for (kind, name), fake in zip(names, fakes, strict=True)
    )
    outputs = [GraphOutput(OutputKind.METRIC, name) for name in call.metrics]
    if training:
        _refuse_changed_parameters(module, list(call.parameters))
        outputs.insert(0, GraphOutput(OutputKind.LOSS, "loss"))
        outputs += [GraphOutput(OutputKind.BUFFER, name) for name in call.buffers]
        outputs += [GraphOutput(OutputKind.GRADIENT, name) for name in call.used_parameters]
    results = output_nodes(module)
    kept = [
        position
        for position, (output, node) in enumerate(zip(outputs, results, strict=False))
        # A buffer that comes back as it went in has not changed.
        if output.kind is not OutputKind.BUFFER or source_of(node).op != "placeholder"
    ]
    buffers = [position for position in kept if outputs[position].kind is OutputKind.BUFFER]
    _warn_of_checkpointed(
        [outputs[position].name for position in buffers if REGION in source_of(results[position]).meta]
    )
    simplify(module, kept)
    return TracedGraph(module, inputs, tuple(outputs[position] for position in kept))


class _Call:
    """A member's code, to be run on stand-ins for its tensors and its batch."""

    def __init__(
        self, model: nn.Module, fn: LossFunction, batch: FlatBatch, settings: TraceSettings, training: bool
    ) -> None:
        self._model, self._fn, self._batch, self._settings = model, fn, batch, settings
        self._training = training
        self.parameters, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self.substitution = Substitution(model, fn)
        self.reach = self.substitution.reach
        self.after: list[list[Items]] = []
        """Contents of the holders after each call."""
        self.metrics: list[str] = []
        self.used_parameters: list[str] = []
        self._draws: Draws
        self._checks: list[Tensor] = []
        self._num_forward_checks = 0
        self._num_regions = 0
        self._learns = [tensor.requires_grad and training for tensor in self.parameters.values()]

    def traced(
        self, step: Callable[..., Any], fakes: Sequence[Tensor], mode: FakeTensorMode
    ) -> fx.GraphModule:
        """The graph of ``step``, one of the two methods below."""

        def mark(nodes: list[fx.Node]) -> None:
            self._num_regions += 1
            for node in nodes:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta[REGION] = self._num_regions

        def run(*flat: Tensor) -> list[Any]:
            return self._with_failures(functionalized(step)(*flat))

        table: dict[Any, Callable[..., Any]] = torch._decomp.get_decompositions(_DECOMPOSE)
        table |= random_decompositions(lambda: self._draws) | fixed_shape_decompositions()
        table[torch.ops.aten._linalg_check_errors.default] = self._note_check
        table[torch.ops.aten._local_scalar_dense.default] = known_scalar
        tracer = make_fx(run, decomposition_table=table, user_frames=frames_of(is_user_file))
        # What torch says about its own fake kernels is not news to the user.
        quiet, regions = ignored_warnings(), checkpoint_regions(mark)
        seeds: dict[str, Any] = {"manual_seed": lambda seed: self._draws.note_seed(seed)}
        with (
            quiet,
            mode,
            tracing_thread(),
            replaced(torch, **seeds),
            replaced(torch.random, **seeds),
            own_composites(),
            transformers_as_in_eager(),
            regions,
        ):
            return tracer(*fakes)

    def once(self, *flat: Tensor) -> list[Any]:
        """Results of one call, as the graph returns them."""
        self.after = []
        return self._run(flat)

    def twice(self, *flat: Tensor) -> list[Any]:
        """Results of a second call; ``flat`` has the arguments of both."""
        self.after = []
        half = len(flat) // 2
        self._run(flat[:half])
        return self._run(flat[half:], self.after[0])

    def _note_check(self, info: Tensor, *args: Any, **kwargs: Any) -> None:
        """Note the error code of a factorization, which torch would read on the host and raise."""
        self._checks.append(info)

    def _with_failures(self, results: list[Any]) -> list[Any]:
        """Results with NaN as loss, or as gradients, where a factorization of that pass failed.

        A graph cannot raise, and one member's failure must not stop the others: a loss of NaN freezes its
        member. Where the backward pass factorizes (``linalg.eig`` solves a system), gradients are NaN.
        """
        forward, backward = self._checks[: self._num_forward_checks], self._checks[self._num_forward_checks :]
        results[0] = _nan_if(forward, results[0])
        end = len(results) - len(self.parameters)
        begin = end - len(self.used_parameters)
        results[begin:end] = [_nan_if(backward, gradient) for gradient in results[begin:end]]
        return results

    def _run(self, flat: Sequence[Any], contents: Sequence[Items] | None = None) -> list[Any]:
        self._draws = Draws(*map(traced_tensor, flat[-3:-1]))
        self._checks = []
        num_parameters, num_own = len(self.parameters), len(self.reach.own)
        used = [
            tensor.detach().requires_grad_(True) if learns else tensor
            for tensor, learns in zip(flat[:num_parameters], self._learns, strict=True)
        ]
        held = list(flat[num_parameters:num_own])
        leaves = list(flat[num_own:][: len(self._batch.tensors)])
        with self.substitution.active([*used, *held], contents) as read:
            try:
                own = zip(self.parameters.values(), used, self._learns, strict=True)
                for parameter, tensor, learns in own:
                    for hook in (parameter._backward_hooks or {}).values() if learns else ():
                        tensor.register_hook(hook)
                with _surroundings(self._settings, self._training):
                    result = self._fn(self._model, self._batch.rebuild(leaves))
                self._num_forward_checks = len(self._checks)
                if not self._training:
                    return self._named(_as_metrics(result))
                # Hooks run now, and may look at the model, too.
                loss, metrics = _as_loss(result)
                values = self._named(metrics)
                gradients = self._gradients(loss, used, flat[-1])
                new_buffers = list(map(self._model.get_buffer, self.buffers))
            finally:
                self.after.append(read())
        # The parameters go out too: a placeholder that comes back as itself was not changed.
        return [loss.detach().reshape(()), *values, *new_buffers, *gradients, *used]

    def _gradients(self, loss: Tensor, used: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
        learning = [tensor for tensor, learns in zip(used, self._learns, strict=True) if learns]
        names = [name for name, learns in zip(self.parameters, self._learns, strict=True) if learns]
        # A custom backward pass must run even where it leads to no parameter: it may accumulate some itself.
        known = set(map(id, learning))
        others = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
        found = torch.autograd.grad(
            loss, [*learning, *others], tangent.to(loss.dtype).reshape(loss.shape), allow_unused=True
        )
        kept = {}
        for name, tensor, grad in zip(names, learning, found, strict=False):
            # A custom backward pass that calls ``backward`` itself, as reversible layers do, adds to grad.
            parts = [each for each in (grad, tensor.grad) if each is not None]
            if parts:
                kept[name] = sum(parts[1:], parts[0])
        if not kept:
            raise LossError(_INDEPENDENT)
        self.used_parameters = list(kept)
        return list(kept.values())

    def _named(self, metrics: dict[str, Any]) -> list[Tensor]:
        """Values of the metrics, whose names are kept; refuses what is no tensor."""
        for name, value in metrics.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise LossError(f"metric {name!r}: expected a tensor, got {kind}; do not call .item() on it")
        self.metrics = [str(name) for name in metrics]
        # The clone keeps a metric that is an input or the loss itself a value of its own.
        return [value.detach().clone() for value in metrics.values()]


def _warn_of_checkpointed(buffers: Sequence[str]) -> None:
    """Warn of buffers that a checkpointed region changes."""
    if buffers:
        warn_user(
            f"{', '.join(buffers)}: changed within torch.utils.checkpoint, which computes its code twice and "
            "so changes them twice in each step; a fleet changes them once. To have the same numbers in "
            "plain torch, keep what changes buffers, such as batch norm, out of such code"
        )


def _leaves(loss: Tensor) -> list[Any]:
    """Tensors that ``loss.backward()`` would give gradients to."""
    found, seen = [], set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node.variable)
        left += [each for each, _ in node.next_functions]
    return found


def _refuse_effects(
    call: _Call, module: fx.GraphModule, fakes: Sequence[Tensor], mode: FakeTensorMode
) -> None:
    """Refuse code that changes Python state, or draws random numbers of Python's or NumPy's."""
    reach, changes = call.reach, call.substitution.changes
    changed = changes(reach.contents, call.after[0])
    if not changed:
        return

    def more_fakes() -> list[Tensor]:
        with mode:
            return [torch.empty_like(fake) for fake in fakes]

    def line_of(change: Change) -> str | None:
        with watched_lines(reach.holders[change.holder].read) as found, suppress(Exception):
            call.traced(call.once, more_fakes(), mode)
        return found[0] if found else None

    for change in changed:
        if isinstance(change.value, GeneratorState):
            raise random_error(line_of(change))
    again = call.traced(call.twice, [*more_fakes(), *fakes], mode)
    first, second = call.after
    changed_again = changes(first, second)
    for change in lasting(reach, first, changed_again):
        raise state_error(reach.path(change.holder, change.key), line_of(change))
    if not same_results(module, again):
        change = (changed_again or changed)[0]
        path = reach.path(change.holder, change.key)
        raise state_error(path, line_of(change), is_first_call=not changed_again)
    stored = sorted({reach.path(change.holder, change.key) for change in changed_again})
    if stored:
        warnings.warn(
            f"{', '.join(stored)}: set by every call of the loss function, but not by the steps of a fleet, "
            "which run a graph; return what you want to see as a metric",
            TrainmuxWarning,
            stacklevel=2,
        )


def _refuse_own_constants(module: fx.GraphModule, call: _Call) -> None:
    """Refuse a graph that has a parameter or buffer of the model as a constant, which would never change."""
    own = list(call.reach.named)
    for node in module.graph.find_nodes(op="get_attr"):
        for number in call.reach.memory.overlapping(graph_constant(module, node)):
            raise refusal(
                f"{own[number]} is read",
                " through an object that cannot be followed; expected it to be read from the model, a "
                "container, a closure or a plain view: read the parameter or buffer itself",
                next((place for user in node.users if (place := node_location(user))), None),
            )


def _fake(mode: FakeTensorMode, tensor: Tensor, settings: TraceSettings) -> Tensor:
    dtype = tensor.dtype
    if settings.compute_dtype is not None and dtype.is_floating_point:
        dtype = settings.compute_dtype
    # Stacked storage is contiguous per member, whatever strides the member's own tensor has.
    with mode:
        return torch.empty(tensor.shape, dtype=dtype, device=settings.device)


def _nan_if(checks: list[Tensor], value: Tensor) -> Tensor:
    """NaN where one of the error codes is not zero."""
    if not checks:
        return value
    failed = torch.stack([(info != 0).any() for info in checks]).any()
    return torch.where(failed, torch.full_like(value, float("nan")), value)


@contextmanager
def _surroundings(settings: TraceSettings, training: bool) -> Iterator[None]:
    """Autocast, gradients and default device as a step has them."""
    # The weight cache would hand a cast made in one place to another with a graph of its own.
    kind, dtype = settings.device.type, settings.autocast
    with (
        torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False),
        torch.set_grad_enabled(training),
        settings.default_device or nullcontext(),
    ):
        yield


def _with_metrics(result: Any, reserved: frozenset[str]) -> tuple[Any, dict[str, Any]]:
    """A result, without the metrics that came with it, and those; refuses ``reserved`` names."""
    if not (isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], dict)):
        return result, {}
    taken = sorted(reserved.intersection(map(str, result[1])))
    if taken:
        raise LossError(
            f"expected metrics with names other than {sorted(reserved)}, which the fleet gives itself, got "
            f"{taken}; rename them"
        )
    return result[0], result[1]


def _as_loss(result: Any) -> tuple[Tensor, dict[str, Any]]:
    loss, metrics = _with_metrics(result, _RESERVED)
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
    return loss, metrics


def _as_metrics(result: Any) -> dict[str, Any]:
    loss, metrics = _with_metrics(result, frozenset({"loss"}))
    if isinstance(loss, Tensor):
        return {"loss": loss, **metrics}
    if not isinstance(result, dict) or not result:
        raise LossError(
            f"expected the metric function to return a tensor or a dict of tensors, got "
            f"{type(result).__name__}; return {{name: scalar tensor}}"
        )
    return result


def _trace_error(error: Exception) -> TraceError:
    """A typed error for one that stopped a trace."""
    location = innermost_user_frame(error.__traceback__)
    if refuses_generators(error):
        return own_generator_error(str(traced_operator(error)), location)
    op = getattr(error, "func", None)
    outer = higher_order_operator(error)
    if isinstance(error, ConstantChangedError):
        what = op = str(error)
        reason = (
            " changes a tensor in place that is not part of the model; expected only buffers of the model to "
            "be changed: register the tensor as a buffer of the model, or make a new one"
        )
    elif isinstance(error, TooLongError):
        what = "a step is too long to be traced"
        reason = (
            f": {error}; expected loops and recurrent layers of at most {MAX_NODES:,} operators unrolled: "
            "train on shorter sequences (cut long ones and carry the state in the batch) or fewer layers"
        )
    elif isinstance(error, DrawnBranchError):
        what = "Python reads a random number"
        reason = (
            ", which a graph cannot; expected layers to be skipped with a probability of 0 or 1: set it to 0 "
            "(layerdrop, stochastic depth by batch), or choose by torch.where"
        )
    elif isinstance(error, DATA_DEPENDENT_ERRORS):
        what = str(op)
        remedy = next((text for part, text in _REMEDIES.items() if part in what), _remedy_at(error))
        reason = (
            ": the result or its shape depends on the values in a tensor, which a graph cannot express; "
            f"{remedy}"
        )
    elif outer is not None:
        what = op = outer
        reason = (
            ": expected operators on tensors, got one that takes functions; compute both branches and choose "
            "with torch.where, or write the loop in Python"
        )
    else:
        what = "tracing stopped"
        reason = (
            f": {type(error).__name__}: {error}; run it in plain torch first, then on fake tensors: no "
            "NumPy, no Python values read from tensors, constants registered as buffers"
        )
    return refusal(what, reason, location, op)


def _remedy_at(error: Exception) -> str:
    """A remedy by the code around the line that reads values."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    if any((frame.line or "").lstrip().startswith("assert ") for frame in frames[-2:]):
        return "run Python with -O, which leaves assertions out"
    if any("expert" in f"{frame.name} {frame.line}".lower() for frame in frames):
        return _EXPERTS
    return _REMEDY


def _refuse_mixed_products(module: fx.GraphModule, settings: TraceSettings) -> None:
    """Refuse products of two dtypes: fake tensors compute them, and no kernel does."""
    held = settings.compute_dtype
    note = "" if held is None else f" (the fleet holds everything floating in {held})"
    for node in module.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "overloadpacket", None) not in _PRODUCTS:
            continue
        dtypes = {operand.meta["val"].dtype for operand in node.all_input_nodes}
        if len(dtypes) > 1:
            raise refusal(
                str(node.target),
                f": expected operands of one dtype{note}, got {' and '.join(sorted(map(str, dtypes)))}; cast "
                "to the weight's own, x.to(weight.dtype)",
                node_location(node),
                node.target,
            )


def _refuse_changed_parameters(module: fx.GraphModule, names: list[str]) -> None:
    placeholders = module.graph.find_nodes(op="placeholder")[: len(names)]
    returned = output_nodes(module)[-len(names) :] if names else []
    for name, placeholder, value in zip(names, placeholders, returned, strict=True):
        changed = source_of(value)
        if changed is not placeholder:
            raise refusal(
                f"parameter {name} is changed in place",
                " by the forward pass; expected parameters to be changed by the optimizer only: compute a "
                "new tensor, or keep the value in a buffer",
                node_location(changed),
                changed.target,
            )
