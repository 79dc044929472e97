"""One member's step as a graph: its inputs, its outputs, and that it is plain torch's step."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import (
    AUTOCAST,
    assert_equals_torch,
    assert_outputs_close,
    doubles,
    joint,
    kinds,
    run,
    run_eagerly,
    square_loss,
    targets,
)

from trainmux.ir import InputKind, OutputKind
from trainmux.tracing import FakeTensor, TracedGraph

X = doubles(5, 3, seed=1)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()


def product_dtypes(traced: TracedGraph) -> set[torch.dtype]:
    products = ("aten.mm.default", "aten.addmm.default")
    found = [node for node in traced.module.graph.nodes if str(node.target) in products]
    return {node.meta["val"].dtype for node in found}


# ---- inputs and outputs ----------------------------------------------------------------------------------


def test_inputs_and_outputs_are_described_in_order() -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(x)
        return out.square().mean(), {"largest": out.amax(), "input": x.mean()}

    traced = assert_equals_torch(small_net(), loss, X)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [(item.kind, item.name) for item in traced.inputs] == (
        [(InputKind.PARAMETER, name) for name in names]
        + [(InputKind.BUFFER, name) for name in buffers]
        + [(InputKind.BATCH, "batch")]
        + [(InputKind.SEED, "seed"), (InputKind.COUNTER, "counter"), (InputKind.TANGENT, "tangent")]
    )
    assert (traced.inputs[0].shape, traced.inputs[0].dtype) == ((4, 3), "torch.float64")
    for node, item in zip(traced.module.graph.find_nodes(op="placeholder"), traced.inputs, strict=True):
        assert isinstance(node.meta["val"], FakeTensor)
        assert (tuple(node.meta["val"].shape), str(node.meta["val"].dtype)) == (item.shape, item.dtype)
    assert [(output.kind, output.name) for output in traced.outputs] == (
        [(OutputKind.LOSS, "loss"), (OutputKind.METRIC, "largest"), (OutputKind.METRIC, "input")]
        + [(OutputKind.BUFFER, name) for name in buffers]
        + [(OutputKind.GRADIENT, name) for name in names]
    )


class Changes(nn.Module):
    """A buffer changed in place, one reassigned, one only read; activations changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("reassigned", torch.zeros(()))
        self.register_buffer("only_read", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.add_(x.detach().sum(0))
        self.reassigned = self.reassigned + 1
        y = self.linear(x) * self.only_read
        y += 1.0
        y[:, 0] = y[:, 1] * 2
        y.view(-1)[2:5].mul_(0.5)
        out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        out[:, 1:] = y
        return F.leaky_relu_(out, 0.1)


def test_every_mutation_becomes_a_new_value_and_changed_buffers_are_outputs() -> None:
    torch.manual_seed(0)
    traced = assert_equals_torch(Changes().double(), square_loss, X)
    assert not any(target._schema.is_mutable for target in targets(traced.module))
    assert kinds(traced, OutputKind.BUFFER) == ["in_place", "reassigned"]
    assert kinds(assert_equals_torch(small_net().eval(), square_loss, X), OutputKind.BUFFER) == []


def test_frozen_unused_and_detached_parameters_have_no_gradient() -> None:
    model = small_net()
    model.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    model[1].bias.requires_grad_(False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model[3](model[1](model[0](x).detach())).square().mean()

    traced = assert_equals_torch(model, loss, X)
    assert kinds(traced, OutputKind.GRADIENT) == ["1.weight", "3.weight", "3.bias"]
    assert (InputKind.PARAMETER, "unused") in [(item.kind, item.name) for item in traced.inputs]


class Reversible(torch.autograd.Function):
    """Computes the layer again in the backward pass, and calls ``backward`` for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        return x + layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            ctx.layer(x).backward(gradient)
        return gradient + x.grad, None


def test_gradients_that_a_custom_backward_pass_accumulates_count() -> None:
    """Added to what autograd returns for the same weights, alone, and where no weight comes before."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return (model[2](Reversible.apply(model[1](model[0](x)), model[1]))).square().mean()

    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]
    assert_equals_torch(nn.Sequential(*layers), loss, doubles(3, 4))

    def alone(model: Any, x: Tensor) -> Tensor:
        return Reversible.apply(model[0](x), model[1]).square().mean()

    assert_equals_torch(nn.Sequential(*layers[:2]), alone, doubles(3, 4))

    def first(model: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        return model[1](Reversible.apply(x, model[0])).square().mean()

    assert_equals_torch(nn.Sequential(*layers[:2]), first, doubles(3, 4))


def test_a_loss_of_one_element_strided_parameters_and_a_batch_that_needs_gradients() -> None:
    model, x = small_net(), X.t().contiguous().t().requires_grad_(True)
    model[3].weight = nn.Parameter(doubles(4, 2).t())
    traced = joint(model, lambda m, v: square_loss(m, v).reshape(1, 1), x)
    assert x.grad is None
    assert_outputs_close(run(traced, model, x.detach()), run_eagerly(model, square_loss, x.detach()))


# ---- dtypes ----------------------------------------------------------------------------------------------


def test_autocast_multiplies_in_bf16_and_keeps_fp32_gradients() -> None:
    def under_autocast(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square_loss(m, x)

    model = small_net().float()
    traced = joint(model, square_loss, X.float(), AUTOCAST)
    assert product_dtypes(traced) == {torch.bfloat16}
    outputs = run(traced, model, X.float())
    for (kind, name), value in outputs.items():
        assert kind is not OutputKind.GRADIENT or value.dtype == torch.float32, name
    assert_outputs_close(outputs, run_eagerly(model, under_autocast, X.float()), 1e-6)

    def in_part(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = m[0](x)
        return m[3](F.relu(hidden.float())).square().mean()

    assert product_dtypes(joint(model, in_part, X.float())) == {torch.bfloat16, torch.float32}


# ---- memory ----------------------------------------------------------------------------------------------


def test_a_model_of_1e12_parameters_is_traced_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(1_000_000, 1_000_000)
    x = torch.empty(8, 1_000_000, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    traced = joint(model, square_loss, x)
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
    (product,) = traced.module.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert product.meta["val"].device == torch.device("cpu")
    assert kinds(traced, OutputKind.GRADIENT) == ["weight", "bias"]


def test_control_flow_on_python_values_is_taken_as_it_is() -> None:
    def loss(model: nn.Module, given: dict[str, Any]) -> Tensor:
        assert torch.compiler.is_compiling()  # some libraries ask
        assert torch.compiler.is_compiling() | False
        assert not (False | (torch.compiler.is_compiling() & False))
        out = model(given["x"])
        return (out * 2 if given["twice"] else out).square().mean()

    once, twice = (joint(small_net(), loss, {"x": X, "twice": twice}) for twice in (False, True))
    assert len(targets(twice.module)) > len(targets(once.module))
    assert not torch.compiler.is_compiling()


def test_two_traces_of_one_model_are_the_same_graph_and_draw_no_random_numbers() -> None:
    model = nn.Sequential(small_net(), nn.Dropout(0.5))
    before = torch.get_rng_state()
    first, second = joint(model, square_loss, X), joint(model, square_loss, X)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(first.module.graph) == str(second.module.graph)
    assert (first.inputs, first.outputs) == (second.inputs, second.outputs)
