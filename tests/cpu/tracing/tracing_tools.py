"""Trace a small model, run the graph on real tensors, and hold it against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from trainmux.ir import InputKind, OutputKind
from trainmux.tracing import (
    LossFunction,
    TracedGraph,
    TraceSettings,
    flatten_batch,
    trace_forward,
    trace_joint,
    unique_buffers,
    unique_parameters,
)

CPU = torch.device("cpu")
AS_IS = TraceSettings(CPU, None, None)
FP64 = TraceSettings(CPU, None, torch.float64)
AUTOCAST = TraceSettings(CPU, torch.bfloat16, None)

Outputs = dict[tuple[OutputKind, str], Tensor]


def joint(model: nn.Module, loss: LossFunction, batch: Any, settings: TraceSettings = AS_IS) -> TracedGraph:
    return trace_joint(model, loss, flatten_batch(batch), settings)


def forward(
    model: nn.Module, metric: LossFunction, batch: Any, settings: TraceSettings = AS_IS
) -> TracedGraph:
    return trace_forward(model, metric, flatten_batch(batch), settings)


def arguments(
    traced: TracedGraph, model: nn.Module, batch: Any, *, seed: int = 0, counter: int = 0
) -> list[Tensor]:
    """What the graph's placeholders stand for, in order; the tangent is one."""
    values = {(InputKind.PARAMETER, named.name): named.tensor.detach() for named in unique_parameters(model)}
    values |= {(InputKind.BUFFER, named.name): named.tensor for named in unique_buffers(model)}
    flat = flatten_batch(batch)
    values |= {
        (InputKind.BATCH, leaf.path): tensor
        for leaf, tensor in zip(flat.spec.leaves, flat.tensors, strict=True)
    }
    values[InputKind.SEED, "seed"] = torch.tensor(seed)
    values[InputKind.COUNTER, "counter"] = torch.tensor(counter)
    tensors = []
    for described in traced.inputs:
        dtype = getattr(torch, described.dtype.removeprefix("torch."))
        value = values.get((described.kind, described.name), torch.tensor(1.0))
        tensors.append(value.to(dtype))
    return tensors


def run(traced: TracedGraph, model: nn.Module, batch: Any, *, seed: int = 0, counter: int = 0) -> Outputs:
    """The graph's outputs on real tensors, by kind and name."""
    given = arguments(traced, model, batch, seed=seed, counter=counter)
    before = [tensor.clone() for tensor in given]
    with torch.no_grad():
        results = traced.module(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "a graph changed its inputs"
    keys = [(output.kind, output.name) for output in traced.outputs]
    return dict(zip(keys, results, strict=True))


def run_eagerly(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Outputs:
    """The same outputs from a copy of the model in plain torch."""
    model = copy.deepcopy(model)
    before = {named.name: named.tensor.clone() for named in unique_buffers(model)}
    result = loss_fn(model, batch)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    loss.backward()
    outputs: Outputs = {(OutputKind.LOSS, "loss"): loss.detach()}
    outputs |= {(OutputKind.METRIC, name): value.detach() for name, value in metrics.items()}
    for named in unique_buffers(model):
        if not torch.equal(named.tensor, before[named.name]):
            outputs[OutputKind.BUFFER, named.name] = named.tensor
    for named in unique_parameters(model):
        if named.tensor.grad is not None:
            grad = named.tensor.grad
            outputs[OutputKind.GRADIENT, named.name] = grad.to_dense() if grad.is_sparse else grad
    return outputs


def assert_outputs_close(actual: Outputs, expected: Outputs, tolerance: float = 1e-12) -> None:
    assert set(actual) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(
            actual[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def assert_equals_torch(
    model: nn.Module, loss_fn: LossFunction, batch: Any, tolerance: float = 1e-12
) -> TracedGraph:
    """The traced step of a model without randomness gives plain torch's numbers; returns the trace."""
    traced = joint(model, loss_fn, batch)
    assert_outputs_close(run(traced, model, batch), run_eagerly(model, loss_fn, batch), tolerance)
    return traced


def targets(traced: TracedGraph) -> list[Any]:
    return [node.target for node in traced.module.graph.nodes if node.op == "call_function"]


def kinds(traced: TracedGraph, kind: OutputKind) -> list[str]:
    return [output.name for output in traced.outputs if output.kind is kind]
