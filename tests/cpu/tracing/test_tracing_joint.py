"""One member's step as a graph: what goes in, what comes out, and that it is plain torch's step."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import (
    AUTOCAST,
    FP64,
    arguments,
    assert_equals_torch,
    assert_outputs_close,
    forward,
    joint,
    kinds,
    run,
    run_eagerly,
    targets,
)

from trainmux.errors import LossError
from trainmux.ir import InputKind, OutputKind
from trainmux.tracing import FakeTensor

aten = torch.ops.aten


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def small_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2)).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)


# ---- inputs and outputs ----------------------------------------------------------------------------------


def test_inputs_are_described_in_order() -> None:
    traced = joint(small_net(), square_loss, {"x": batch()}["x"])
    described = [(item.kind, item.name) for item in traced.inputs]
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert described == (
        [(InputKind.PARAMETER, name) for name in names]
        + [(InputKind.BUFFER, name) for name in buffers]
        + [(InputKind.BATCH, "batch")]
        + [(InputKind.SEED, "seed"), (InputKind.COUNTER, "counter"), (InputKind.TANGENT, "tangent")]
    )
    assert traced.inputs[0].shape == (4, 3)
    assert traced.inputs[0].dtype == "torch.float64"
    assert traced.inputs[8].dtype == "torch.int64"
    placeholders = traced.module.graph.find_nodes(op="placeholder")
    for node, item in zip(placeholders, traced.inputs, strict=True):
        assert isinstance(node.meta["val"], FakeTensor)
        assert tuple(node.meta["val"].shape) == item.shape
        assert str(node.meta["val"].dtype) == item.dtype


def test_outputs_are_loss_metrics_buffers_gradients() -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(x)
        return out.square().mean(), {"largest": out.amax(), "input": x.mean()}

    traced = assert_equals_torch(small_net(), loss, batch())
    assert [output.kind.value for output in traced.outputs] == (
        ["loss"] + ["metric"] * 2 + ["buffer"] * 3 + ["gradient"] * 6
    )
    assert kinds(traced, OutputKind.METRIC) == ["largest", "input"]
    assert traced.num_forward_outputs == 6


class Counts(nn.Module):
    """A buffer changed in place, one reassigned, one only read, one written with its own value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("reassigned", torch.zeros(()))
        self.register_buffer("only_read", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.add_(x.detach().sum(0))
        self.reassigned = self.reassigned + 1
        return x * self.weight * self.only_read


def test_changed_buffers_are_outputs_in_place_or_reassigned() -> None:
    traced = assert_equals_torch(Counts().double(), square_loss, batch())
    assert kinds(traced, OutputKind.BUFFER) == ["in_place", "reassigned"]
    assert kinds(assert_equals_torch(small_net().eval(), square_loss, batch()), OutputKind.BUFFER) == []


def test_frozen_unused_and_detached_parameters_have_no_gradient() -> None:
    model = small_net()
    model.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    model[1].bias.requires_grad_(False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model[3](model[1](model[0](x).detach())).square().mean()

    traced = assert_equals_torch(model, loss, batch())
    assert kinds(traced, OutputKind.GRADIENT) == ["1.weight", "3.weight", "3.bias"]
    assert (InputKind.PARAMETER, "unused") in [(item.kind, item.name) for item in traced.inputs]


def test_the_gradient_scales_with_the_tangent() -> None:
    model, x = small_net(), batch()
    traced = joint(model, square_loss, x)
    given = arguments(traced, model, x)
    once = traced.module(*given)
    given[-1] = torch.tensor(3.0, dtype=given[-1].dtype)
    thrice = traced.module(*given)
    for output, one, three in zip(traced.outputs, once, thrice, strict=True):
        expected = 3.0 * one if output.kind is OutputKind.GRADIENT else one
        torch.testing.assert_close(three, expected, rtol=1e-12, atol=1e-15)


def test_a_loss_of_one_element_is_a_scalar() -> None:
    model, x = small_net(), batch()
    traced = joint(model, lambda m, v: m(v).square().mean().reshape(1, 1), x)
    assert run(traced, model, x)[OutputKind.LOSS, "loss"].shape == ()
    assert_outputs_close(run(traced, model, x), run_eagerly(model, square_loss, x))


def test_non_contiguous_parameters_and_batches_that_need_gradients() -> None:
    model, x = small_net(), batch().t().contiguous().t().requires_grad_(True)
    model[3].weight = nn.Parameter(torch.randn(4, 2).double().t())
    traced = joint(model, square_loss, x)
    assert x.grad is None
    assert_outputs_close(run(traced, model, x.detach()), run_eagerly(model, square_loss, x.detach()))


# ---- dtypes ----------------------------------------------------------------------------------------------


def test_fp64_is_computed_in_fp64_whatever_the_model_is() -> None:
    model = small_net(torch.float32)
    traced = joint(model, square_loss, batch(torch.float32), FP64)
    outputs = run(traced, model, batch(torch.float32))
    floating = [value for value in outputs.values() if value.is_floating_point()]
    assert {value.dtype for value in floating} == {torch.float64}
    assert_outputs_close(outputs, run_eagerly(model.double(), square_loss, batch(torch.float32).double()))
    for node in traced.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_floating_point():
            assert value.dtype == torch.float64, node


def test_autocast_multiplies_in_bf16_and_keeps_fp32_gradients() -> None:
    model = small_net(torch.float32)
    traced = joint(model, square_loss, batch(torch.float32), AUTOCAST)
    products = [
        node.meta["val"].dtype for node in traced.module.graph.nodes if str(node.target) in MATRIX_PRODUCTS
    ]
    assert len(products) >= 4
    assert set(products) == {torch.bfloat16}
    outputs = run(traced, model, batch(torch.float32))
    for (kind, name), value in outputs.items():
        if kind is OutputKind.GRADIENT:
            assert value.dtype == torch.float32, name

    def under_autocast(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square_loss(m, x)

    assert_outputs_close(outputs, run_eagerly(model, under_autocast, batch(torch.float32)), 1e-6)


MATRIX_PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}


def test_autocast_of_the_users_own_is_kept() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[0](x)
        return model[3](F.relu(hidden.float())).square().mean()

    traced = joint(small_net(torch.float32), loss, batch(torch.float32))
    products = {
        node.meta["val"].dtype for node in traced.module.graph.nodes if str(node.target) in MATRIX_PRODUCTS
    }
    assert products == {torch.bfloat16, torch.float32}


def test_an_outer_autocast_or_no_grad_does_not_leak_into_the_trace() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        traced = joint(small_net(), square_loss, batch())
    values = [node.meta.get("val") for node in traced.module.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.dtype == torch.bfloat16 for value in values)
    assert len(kinds(traced, OutputKind.GRADIENT)) == 6


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
    (product,) = [node for node in traced.module.graph.nodes if node.target == aten.addmm.default]
    assert product.meta["val"].device == torch.device("cpu")
    assert kinds(traced, OutputKind.GRADIENT) == ["weight", "bias"]


# ---- evaluation ------------------------------------------------------------------------------------------


def test_a_forward_trace_is_in_evaluation_mode_and_has_no_gradients() -> None:
    model = small_net()
    x = batch()
    model(x)
    traced = forward(model, lambda m, v: {"mean": m(v).mean(), "training": torch.tensor(m.training)}, x)
    assert {output.kind for output in traced.outputs} == {OutputKind.METRIC}
    assert kinds(traced, OutputKind.METRIC) == ["mean", "training"]
    outputs = run(traced, model, x)
    assert not outputs[OutputKind.METRIC, "training"]
    torch.testing.assert_close(outputs[OutputKind.METRIC, "mean"], model.eval()(x).mean().detach())


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_trace_puts_every_training_flag_back(fails: bool) -> None:
    model = small_net()
    model.train()
    model[1].eval()
    flags = [module.training for module in model.modules()]
    if fails:
        with pytest.raises(ValueError):
            forward(model, lambda m, v: None, batch())
    else:
        forward(model, square_loss, batch())
    assert [module.training for module in model.modules()] == flags


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        (lambda m, x: m(x).mean(), ["loss"]),
        (lambda m, x: (m(x).mean(), {"a": x.mean()}), ["loss", "a"]),
        (lambda m, x: {"a": x.mean(), "b": m(x).sum()}, ["a", "b"]),
    ],
)
def test_what_a_metric_function_may_return(metric: Any, names: list[str]) -> None:
    assert kinds(forward(small_net(), metric, batch()), OutputKind.METRIC) == names


@pytest.mark.parametrize("result", [None, {}, 1.0, {"a": 2.0}])
def test_metrics_that_are_no_tensors_are_refused(result: Any) -> None:
    with pytest.raises(LossError, match="expected"):
        forward(small_net(), lambda m, x: result, batch())


def test_dropout_is_off_in_a_forward_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    traced = forward(model, square_loss, batch(torch.float32))
    assert not any("random" in str(target) for target in targets(traced))


# ---- linear algebra that may fail ------------------------------------------------------------------------


class Factorizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3, dtype=torch.float64))

    def forward(self, shift: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.weight @ self.weight.T + shift * torch.eye(3, dtype=shift.dtype))


def test_a_factorization_that_fails_gives_a_loss_that_is_not_a_number() -> None:
    model = Factorizes()
    good, bad = torch.tensor(1.0).double(), torch.tensor(-5.0).double()
    traced = assert_equals_torch(model, square_loss, good)
    assert run(traced, model, bad)[OutputKind.LOSS, "loss"].isnan()


# ---- models that mutate, branch and share ----------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += 1.0
        y[:, 0] = y[:, 1] * 2
        y.view(-1)[2:5].mul_(0.5)
        out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        out[:, 1:] = y
        return F.leaky_relu_(out, 0.1)


def test_in_place_code_is_plain_torchs() -> None:
    torch.manual_seed(0)
    assert_equals_torch(InPlace().double(), square_loss, batch())


def test_control_flow_on_python_values_is_taken_as_it_is() -> None:
    def loss(model: nn.Module, given: dict[str, Any]) -> Tensor:
        out = model(given["x"])
        if given["twice"]:
            out = out * 2
        return out.square().mean()

    model, x = small_net(), batch()
    once = joint(model, loss, {"x": x, "twice": False})
    twice = joint(model, loss, {"x": x, "twice": True})
    assert len(targets(twice)) > len(targets(once))


def test_two_traces_of_one_model_are_the_same_graph_and_draw_no_random_numbers() -> None:
    model, x = nn.Sequential(small_net(), nn.Dropout(0.5)), batch()
    before = torch.get_rng_state()
    first, second = joint(model, square_loss, x), joint(model, square_loss, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(first.module.graph) == str(second.module.graph)
    assert first.inputs == second.inputs
    assert first.outputs == second.outputs
