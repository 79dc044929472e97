"""Whole graphs: random small ones, the workloads, attention on a GPU's kernels, and size against width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from fusion_tools import Values, assert_close, described
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainmux.fusion import FusedGraph, fuse
from trainmux.ir import GraphInput, InputKind
from trainmux.tracing import (
    FakeTensorMode,
    TracedGraph,
    TraceSettings,
    flatten_batch,
    make_fx,
    trace_joint,
    unique_buffers,
    unique_parameters,
)

aten = torch.ops.aten

# ---- random graphs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operation on earlier values, named by their positions."""

    name: str
    inputs: tuple[int, ...]
    numbers: tuple[int, ...] = ()

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        return OPERATIONS[self.name](*[values[i] for i in self.inputs], *self.numbers)


def pad_last(x: Tensor, before: int, after: int) -> Tensor:
    return torch.nn.functional.pad(x, [before, after], value=0.5)


UNARY: dict[str, Callable[..., Tensor]] = {
    "tanh": torch.tanh,
    "clone": torch.clone,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "flatten": lambda x: x.reshape(-1),
    "unsqueeze first": lambda x: x.unsqueeze(0),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.squeeze(),
    "expand": lambda x: x.expand(2, *x.shape),
    "zeros": lambda x: torch.zeros_like(x) + 1,
}
ALONG_A_DIMENSION: dict[str, Callable[..., Tensor]] = {
    "sum over": lambda x, d: x.sum(d),
    "mean over, kept": lambda x, d: x.mean(d, keepdim=True),
    "largest over": lambda x, d: x.amax(d),
    "softmax": lambda x, d: x.softmax(d),
    "log softmax": lambda x, d: x.log_softmax(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "flip": lambda x, d: x.flip(d),
    "select": lambda x, d: x.select(d, -1),
    "slice": lambda x, d: x.narrow(d, 0, max(1, x.shape[d] - 1)),
    "transpose": lambda x, d: x.transpose(d, -1),
    "last to": lambda x, d: x.movedim(-1, d),
    "sorted": lambda x, d: x.sort(d).values,
}
TOGETHER: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
}
PRODUCTS: dict[str, Callable[..., Tensor]] = {"matmul": torch.matmul}
JOINED: dict[str, Callable[..., Tensor]] = {
    "cat": lambda x, y: torch.cat([x, y], -1),
    "stack": lambda x, y: torch.stack([x, y]),
}
OPERATIONS = UNARY | ALONG_A_DIMENSION | TOGETHER | PRODUCTS | JOINED | {"pad": pad_last}

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[Step]]:
    """Input shapes and steps that fit together."""
    inputs = draw(st.lists(shapes, min_size=1, max_size=3))
    values = [torch.empty(shape, device="meta") for shape in inputs]
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted(OPERATIONS)))
        first = draw(st.integers(0, len(values) - 1))
        if name in UNARY:
            step = Step(name, (first,))
        elif name in ALONG_A_DIMENSION or name == "pad":
            if values[first].dim() == 0:
                continue
            rank = values[first].dim()
            numbers = (1, 0) if name == "pad" else (draw(st.integers(-rank, rank - 1)),)
            step = Step(name, (first,), numbers)
        else:
            fitting = [i for i in range(len(values)) if fits(name, values[first], values[i])]
            if not fitting:
                continue
            step = Step(name, (first, draw(st.sampled_from(fitting))))
        result = step(values)
        if 0 < result.numel() <= 200 and result.dim() <= 4:
            values.append(result)
            steps.append(step)
    return inputs, steps


def fits(name: str, x: Tensor, y: Tensor) -> bool:
    if name in JOINED:
        return x.shape == y.shape and (name == "stack" or x.dim() > 0)
    try:
        OPERATIONS[name](x, y)
    except RuntimeError:
        return False
    return True


def program_graph(inputs: Sequence[tuple[int, ...]], steps: Sequence[Step]) -> TracedGraph:
    def run(*given: Tensor) -> list[Tensor]:
        return run_program(given, steps)

    with FakeTensorMode():
        examples = [torch.empty(shape, dtype=torch.float64) for shape in inputs]
        return described(make_fx(run)(*examples))


def run_program(given: Sequence[Tensor], steps: Sequence[Step]) -> list[Tensor]:
    values = list(given)
    for step in steps:
        values.append(step(values))
    return values[len(given) :]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(), width=st.integers(1, 3), data=st.data())
def test_a_random_graph_gives_what_members_compute_alone(
    program: tuple[list[tuple[int, ...]], list[Step]], width: int, data: st.DataObject
) -> None:
    shapes_of_inputs, steps = program
    if not steps:
        return
    batched = data.draw(
        st.lists(st.booleans(), min_size=len(shapes_of_inputs), max_size=len(shapes_of_inputs))
    )
    values = Values(1)
    inputs = [
        values.normal(*((width, *shape) if own else shape))
        for shape, own in zip(shapes_of_inputs, batched, strict=True)
    ]
    fused = fuse(program_graph(shapes_of_inputs, steps), width, batched)
    results = fused.module(*inputs)
    for index in range(width):
        member = [tensor[index] if own else tensor for tensor, own in zip(inputs, batched, strict=True)]
        for number, (result, wanted) in enumerate(zip(results, run_program(member, steps), strict=True)):
            assert_close(result[index], wanted, f"member {index}, step {number}")


# ---- workloads -------------------------------------------------------------------------------------------


@cache
def traced_workload(name: str) -> TracedGraph:
    workload = SMALL[name]
    model = workload.build(0).double()
    model.train()
    flat = flatten_batch(workload.batch(1, torch.float64))
    return trace_joint(model, workload.loss, flat, TraceSettings(torch.device("cpu"), None, None))


def is_stacked(item: GraphInput, shared_batch: bool) -> bool:
    return item.kind is not InputKind.TANGENT and not (shared_batch and item.kind is InputKind.BATCH)


def inputs_of(model: nn.Module, leaves: Sequence[Tensor], seed: int) -> list[Tensor]:
    named = (*unique_parameters(model), *unique_buffers(model))
    tensors = [item.tensor.detach() for item in named]
    return [*tensors, *leaves, torch.tensor(seed), torch.tensor(3), torch.tensor(1.0, dtype=torch.float64)]


def assert_fused_is_each_members_own(
    traced: TracedGraph, members: Sequence[list[Tensor]], shared_batch: bool
) -> None:
    batched = [is_stacked(item, shared_batch) for item in traced.inputs]
    expected = [traced.module(*member) for member in members]
    stacked = [
        torch.stack(column) if own else column[0]
        for column, own in zip(zip(*members, strict=True), batched, strict=True)
    ]
    results = fuse(traced, len(members), batched).module(*stacked)
    for index, member in enumerate(expected):
        for output, result, wanted in zip(traced.outputs, results, member, strict=True):
            scale = max(1.0, wanted.abs().max().item()) if wanted.is_floating_point() else 1
            assert_close(result[index] / scale, wanted / scale, f"{output}, member {index}")


@pytest.mark.parametrize("shared_batch", [True, False], ids=["shared batch", "own batches"])
@pytest.mark.parametrize("name", ["mlp", "cnn_with_dropout", "transformer_with_dropout", "dlrm"])
def test_a_fused_workload_gives_each_members_own_step(name: str, shared_batch: bool) -> None:
    workload = SMALL[name]
    members = []
    for seed in range(3):
        batch = workload.batch(9 if shared_batch else seed, torch.float64)
        members.append(inputs_of(workload.build(seed).double(), flatten_batch(batch).tensors, seed))
    assert_fused_is_each_members_own(traced_workload(name), members, shared_batch)


@pytest.mark.parametrize(
    ("name", "shared_batch"),
    [
        ("mlp", True),
        ("cnn", True),
        ("bert_mlm", True),
        ("dlrm", True),
        ("dlrm", False),
    ],
)
def test_the_graph_does_not_grow_with_the_width(name: str, shared_batch: bool) -> None:
    traced = traced_workload(name)
    batched = [is_stacked(item, shared_batch) for item in traced.inputs]
    fused = [fuse(traced, width, batched) for width in (2, 64)]
    assert counts(fused[0]) == counts(fused[1])
    assert fused[0].records == fused[1].records
    assert not any(record.fallback for record in fused[0].records)


def counts(fused: FusedGraph) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in fused.module.graph.nodes:
        found[str(node.target)] = found.get(str(node.target), 0) + (node.op == "call_function")
    return {target: count for target, count in found.items() if count}


def test_what_members_share_is_not_computed_for_each() -> None:
    traced = traced_workload("dlrm")
    fused = fuse(traced, 4, [is_stacked(item, shared_batch=True) for item in traced.inputs])
    assert any(record.how == "shared" for record in fused.records)


# ---- the first layer, whose input needs no gradient ------------------------------------------------------

FIRST_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch norm, no affine": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)),
        (5, 4),
    ),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (5, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (5, 4, 3)),
    "convolution": (lambda: nn.Conv1d(4, 3, 2), (5, 4, 3)),
    "prelu": (lambda: nn.PReLU(4), (5, 4)),
    "bilinear": (lambda: Squared(nn.Bilinear(4, 4, 2)), (5, 4)),
}


class Squared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) + 0.5).square().mean()


@pytest.mark.parametrize(
    ("name", "shared_batch"),
    [*[(name, True) for name in FIRST_LAYERS], ("batch norm", False), ("layer norm", False)],
)
def test_a_first_layer_is_fused_whatever_it_is(name: str, shared_batch: bool) -> None:
    build, shape = FIRST_LAYERS[name]
    torch.manual_seed(0)
    models = [build().double() for _ in range(3)]
    batches = [Values(9 if shared_batch else seed).normal(*shape) for seed in range(3)]
    settings_ = TraceSettings(torch.device("cpu"), None, None)
    traced = trace_joint(models[0], square_loss, flatten_batch(batches[0]), settings_)
    members = [
        inputs_of(model, [batch], seed)
        for seed, (model, batch) in enumerate(zip(models, batches, strict=True))
    ]
    assert_fused_is_each_members_own(traced, members, shared_batch)


# ---- attention kernels of a GPU, by shape ----------------------------------------------------------------


def attention_step(kernel: str) -> Callable[..., list[Any]]:
    """Forward and backward of one of the kernels that torch picks on a GPU."""
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")

    def step(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, *bias: Tensor) -> list[Any]:
        attn_bias = bias[0] if bias else None
        if kernel == "flash":
            out = forward(query, key, value)
            saved = (*out[:6], 0.0, False, *out[6:8])
            gradients = backward(grad, query, key, value, *saved)
        elif kernel == "efficient":
            out = forward(query, key, value, attn_bias, True)
            wanted = [True, True, True, attn_bias is not None]
            gradients = backward(grad, query, key, value, attn_bias, *out[:4], 0.0, wanted)
        else:
            out = forward(query, key, value, attn_bias, True)
            saved = (*out[:2], *out[6:8], attn_bias, None, None, 5, 5, 0.0, False)
            gradients = backward(grad, query, key, value, *saved)
        return [out[0], *[item for item in gradients if isinstance(item, Tensor)]]

    return step


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("flash", None),
        ("efficient", None),
        ("efficient", (2, 3, 8, 8)),
        ("cudnn", None),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("width", [1, 3])
def test_attention_kernels_of_a_gpu_are_fused_by_shape(
    kernel: str, mask: tuple[int, ...] | None, batch: int, width: int
) -> None:
    """Only shapes can be checked here: the kernels do not run on a CPU."""
    shape = (batch, 3, 8, 16)
    bias = [] if mask is None else [(batch, *mask[1:])]
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in [*[shape] * 4, *bias]]
        traced = described(make_fx(attention_step(kernel))(*inputs))
    fused = fuse(traced, width, [True] * len(inputs))
    (output,) = fused.module.graph.find_nodes(op="output")
    for node in output.args[0][:4]:
        assert node.meta["val"].shape == (width, *shape)
    attention = [record for record in fused.records if "scaled_dot_product" in record.op]
    assert {record.how for record in attention} == {"fold model axis into batch"}
