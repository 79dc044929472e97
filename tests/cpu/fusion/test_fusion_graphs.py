"""Whole graphs: random small ones, the workloads, attention on a GPU's kernels, and size against width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fusion_tools import Values, assert_close, described
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from short_workloads import SHORT
from torch import Tensor, nn

from trainmux.fusion import FusedGraph, fuse
from trainmux.ir import InputKind
from trainmux.tracing import (
    FakeTensorMode,
    LossFunction,
    TracedGraph,
    TraceSettings,
    flatten_batch,
    make_fx,
    trace_joint,
)

aten = torch.ops.aten

# ---- random graphs ---------------------------------------------------------------------------------------

UNARY: dict[str, Callable[..., Tensor]] = {
    "tanh": torch.tanh,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "flatten": lambda x: x.reshape(-1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.squeeze(),
    "expand": lambda x: x.expand(2, *x.shape),
    "zeros": lambda x: torch.zeros_like(x) + 1,
}
ALONG_A_DIMENSION: dict[str, Callable[..., Tensor]] = {
    "mean over": lambda x, d: x.mean(d, keepdim=True),
    "largest over": lambda x, d: x.amax(d),
    "softmax": lambda x, d: x.softmax(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "select": lambda x, d: x.select(d, -1),
    "slice": lambda x, d: x.narrow(d, 0, max(1, x.shape[d] - 1)),
    "transpose": lambda x, d: x.transpose(d, -1),
    "sorted": lambda x, d: x.sort(d).values,
    "pad": lambda x, d: torch.nn.functional.pad(x, [1, 0], value=0.5),
}
TOGETHER: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "matmul": torch.matmul,
    "cat": lambda x, y: torch.cat([x, y], -1),
    "stack": lambda x, y: torch.stack([x, y]),
}
OPERATIONS = UNARY | ALONG_A_DIMENSION | TOGETHER
Program = list[tuple[str, tuple[int, ...], tuple[int, ...]]]
"""Names of operations with the positions of the values that each takes, and further numbers."""


def run_program(given: Sequence[Tensor], program: Program) -> list[Tensor]:
    values = list(given)
    for name, inputs, numbers in program:
        values.append(OPERATIONS[name](*[values[i] for i in inputs], *numbers))
    return values[len(given) :]


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], Program]:
    """Input shapes and operations that fit together."""
    shapes = draw(st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=3))
    values = [torch.empty(shape, device="meta") for shape in shapes]
    program: Program = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted(OPERATIONS)))
        num_inputs = 2 if name in TOGETHER else 1
        inputs = tuple(draw(st.integers(0, len(values) - 1)) for _ in range(num_inputs))
        rank = values[inputs[0]].dim()
        if name in ALONG_A_DIMENSION and rank == 0:
            continue
        numbers = (draw(st.integers(-rank, rank - 1)),) if name in ALONG_A_DIMENSION else ()
        try:
            (result,) = run_program(values, [(name, inputs, numbers)])
        except (RuntimeError, IndexError):
            continue  # shapes that do not fit
        if 0 < result.numel() <= 200 and result.dim() <= 4:
            values.append(result)
            program.append((name, inputs, numbers))
    return shapes, program


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=programs(), width=st.integers(1, 3), data=st.data())
def test_a_random_graph_gives_what_members_compute_alone(
    drawn: tuple[list[tuple[int, ...]], Program], width: int, data: st.DataObject
) -> None:
    shapes, program = drawn
    if not program:
        return
    batched = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    values = Values(1)
    inputs = [
        values.normal(*((width, *shape) if own else shape))
        for shape, own in zip(shapes, batched, strict=True)
    ]
    with FakeTensorMode():
        examples = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
        traced = described(make_fx(lambda *given: run_program(given, program))(*examples))
    results = fuse(traced, width, batched).module(*inputs)
    for index in range(width):
        member = [tensor[index] if own else tensor for tensor, own in zip(inputs, batched, strict=True)]
        for number, (result, wanted) in enumerate(zip(results, run_program(member, program), strict=True)):
            assert_close(result[index], wanted, f"member {index}, step {number}")


# ---- workloads -------------------------------------------------------------------------------------------


def inputs_of(model: nn.Module, batch: Any, seed: int) -> list[Tensor]:
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    leaves = flatten_batch(batch).tensors
    return [*tensors, *leaves, torch.tensor(seed), torch.tensor(3), torch.tensor(1.0, dtype=torch.float64)]


def ways_of_inputs(traced: TracedGraph, shared_batch: bool) -> list[bool]:
    own = {*InputKind} - {InputKind.TANGENT} - ({InputKind.BATCH} if shared_batch else set())
    return [item.kind in own for item in traced.inputs]


def assert_fused_is_each_members_own(
    models: Sequence[nn.Module], loss: LossFunction, batches: Sequence[Any], shared_batch: bool
) -> tuple[TracedGraph, FusedGraph]:
    settings = TraceSettings(torch.device("cpu"), None, None)
    traced = trace_joint(models[0], loss, flatten_batch(batches[0]), settings)
    batched = ways_of_inputs(traced, shared_batch)
    members = [inputs_of(models[seed], batches[seed], seed) for seed in range(len(models))]
    stacked = [
        torch.stack(column) if own else column[0]
        for column, own in zip(zip(*members, strict=True), batched, strict=True)
    ]
    fused = fuse(traced, len(members), batched)
    results = fused.module(*stacked)
    for index, member in enumerate(members):
        for output, result, wanted in zip(traced.outputs, results, traced.module(*member), strict=True):
            scale = max(1.0, wanted.abs().max().item()) if wanted.is_floating_point() else 1
            assert_close(result[index] / scale, wanted / scale, f"{output}, member {index}")
    return traced, fused


@pytest.mark.parametrize(
    ("name", "shared_batch"),
    [
        ("mlp", False),
        ("dlrm", True),
        pytest.param("cnn_with_dropout", True, marks=pytest.mark.extensive),
        pytest.param("transformer_with_dropout", False, marks=pytest.mark.extensive),
    ],
)
def test_a_fused_workload_gives_each_members_own_step_and_does_not_grow(
    name: str, shared_batch: bool
) -> None:
    workload = SHORT[name]
    models = [workload.build(seed).double().train() for seed in range(3)]
    batches = [workload.batch(9 if shared_batch else seed, torch.float64) for seed in range(3)]
    traced, fused = assert_fused_is_each_members_own(models, workload.loss, batches, shared_batch)
    wide = fuse(traced, 64, ways_of_inputs(traced, shared_batch))
    assert [node.target for node in fused.module.graph.nodes] == [n.target for n in wide.module.graph.nodes]
    assert fused.records == wide.records
    assert not any(record.fallback for record in fused.records)
    assert shared_batch <= any(record.how == "shared" for record in fused.records)


# ---- the first layer, whose input needs no gradient ------------------------------------------------------

FIRST_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "no affine": (lambda: nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)), (5, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (5, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (5, 4, 3)),
    "prelu": (lambda: nn.PReLU(4), (5, 4)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 2), (5, 4)),
}


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x, x) if isinstance(model, nn.Bilinear) else model(x)
    return (out + 0.5).square().mean()


@pytest.mark.parametrize(
    ("name", "shared_batch"),
    [*[(name, True) for name in FIRST_LAYERS], ("batch norm", False), ("layer norm", False)],
)
def test_a_first_layer_is_fused_whatever_it_is(name: str, shared_batch: bool) -> None:
    build, shape = FIRST_LAYERS[name]
    torch.manual_seed(0)
    models = [build().double() for _ in range(3)]
    batches = [Values(9 if shared_batch else seed).normal(*shape) for seed in range(3)]
    assert_fused_is_each_members_own(models, square_loss, batches, shared_batch)


# ---- attention kernels of a GPU, by shape ----------------------------------------------------------------


def attention_step(kernel: str) -> Callable[..., list[Any]]:
    """Forward and backward of one of the kernels that torch picks on a GPU."""
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")

    def step(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, *mask: Tensor) -> list[Any]:
        (bias,) = mask or (None,)
        out = forward(query, key, value, *(() if kernel == "flash" else (bias, True)))
        if kernel == "flash":
            saved = (*out[:6], 0.0, False, *out[6:8])
        elif kernel == "efficient":
            saved = (bias, *out[:4], 0.0, [True, True, True, bias is not None])
        else:
            saved = (*out[:2], *out[6:8], bias, None, None, 5, 5, 0.0, False)
        gradients = backward(grad, query, key, value, *saved)
        return [out[0], *[item for item in gradients if isinstance(item, Tensor)]]

    return step


@pytest.mark.parametrize(
    ("kernel", "has_mask", "batch", "width"),
    [
        ("flash", False, 1, 3),
        ("flash", False, 2, 1),
        ("efficient", False, 2, 3),
        ("efficient", True, 2, 3),
        ("efficient", True, 1, 3),
        ("cudnn", False, 2, 3),
    ],
)
def test_attention_kernels_of_a_gpu_are_fused_by_shape(
    kernel: str, has_mask: bool, batch: int, width: int
) -> None:
    """Only shapes can be checked here: the kernels do not run on a CPU."""
    shape = (batch, 3, 8, 16)
    bias = [(batch, 3, 8, 8)] if has_mask else []
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in [*[shape] * 4, *bias]]
        traced = described(make_fx(attention_step(kernel))(*inputs))
    fused = fuse(traced, width, [True] * len(inputs))
    (output,) = fused.module.graph.find_nodes(op="output")
    for node in output.args[0][:4]:
        assert node.meta["val"].shape == (width, *shape)
    attention = [record for record in fused.records if "scaled_dot_product" in record.op]
    assert {record.how for record in attention} == {"fold model axis into batch"}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("num_keys", [8, 7])
def test_attention_biases_have_the_strides_that_kernels_of_a_gpu_accept(batch: int, num_keys: int) -> None:
    """Rows begin at multiples of 16 bytes and are dense, however the model computes its bias."""
    shape = (batch, 3, num_keys, 16)
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in [shape] * 4]
        table = torch.empty(batch, num_keys, num_keys, 3, dtype=torch.bfloat16, device="cuda")

        def step(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, table: Tensor) -> list[Any]:
            return attention_step("efficient")(query, key, value, grad, table.permute(0, 3, 1, 2))

        fused = fuse(described(make_fx(step)(*inputs, table)), 2, [True] * 5)
    kernels = [node for node in fused.module.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(kernels) == 2
    for node in kernels:
        *rows, last = (
            node.all_input_nodes[3 if "backward" not in str(node.target) else 4].meta["val"].stride()
        )
        assert last == 1
        assert all(stride % 8 == 0 for stride in rows)
