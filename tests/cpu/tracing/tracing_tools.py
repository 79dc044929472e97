"""Trace a small model, run the graph on real tensors, and compare it with plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainmux.ir import InputKind, OutputKind
from trainmux.tracing import (
    LossFunction,
    TracedGraph,
    TraceSettings,
    flatten_batch,
    trace_forward,
    trace_joint,
)

CPU = torch.device("cpu")
AS_IS = TraceSettings(CPU, None, None)
AUTOCAST = TraceSettings(CPU, torch.bfloat16, None)

Outputs = dict[tuple[OutputKind, str], Tensor]


def joint(model: nn.Module, loss: LossFunction, batch: Any, settings: TraceSettings = AS_IS) -> TracedGraph:
    return trace_joint(model, loss, flatten_batch(batch), settings)


def forward(model: nn.Module, metric: LossFunction, batch: Any) -> TracedGraph:
    return trace_forward(model, metric, flatten_batch(batch), AS_IS)


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def weighted_sum(out: Tensor) -> Tensor:
    """A scalar that depends on every number of ``out`` in its own way."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(
    traced: TracedGraph, model: nn.Module, batch: Any, *, seed: int = 0, counter: int = 0
) -> list[Tensor]:
    """The values of the graph's placeholders, in order; the tangent is one."""
    flat = flatten_batch(batch)
    values = {(InputKind.PARAMETER, name): value.detach() for name, value in model.named_parameters()}
    values |= {(InputKind.BUFFER, name): value for name, value in model.named_buffers()}
    paths = [leaf.path for leaf in flat.spec.leaves]
    values |= {(InputKind.BATCH, path): value for path, value in zip(paths, flat.tensors, strict=True)}
    values[InputKind.SEED, "seed"] = torch.tensor(seed)
    values[InputKind.COUNTER, "counter"] = torch.tensor(counter)
    values[InputKind.TANGENT, "tangent"] = torch.tensor(1.0)
    return [
        values[item.kind, item.name].to(getattr(torch, item.dtype.removeprefix("torch.")))
        for item in traced.inputs
    ]


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
    """The outputs that a copy of the model has in plain torch."""
    model = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    result = loss_fn(model, batch)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    loss.backward()
    outputs: Outputs = {(OutputKind.LOSS, "loss"): loss.detach()}
    outputs |= {(OutputKind.METRIC, name): value.detach() for name, value in metrics.items()}
    for name, value in model.named_buffers():
        if not torch.equal(value, before[name]):
            outputs[OutputKind.BUFFER, name] = value
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is not None:
            outputs[OutputKind.GRADIENT, name] = grad.to_dense() if grad.is_sparse else grad
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


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def kinds(traced: TracedGraph, kind: OutputKind) -> list[str]:
    return [output.name for output in traced.outputs if output.kind is kind]
