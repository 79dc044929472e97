"""Operators without a rule of ours: torch.vmap of the one operator, or a loop that is on record."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from fusion_tools import (
    Sample,
    batched_combinations,
    check_fused,
    described,
    make_case,
    num_tensors,
    sample,
    single_op,
)
from torch import fx

from trainmux.errors import FusionError
from trainmux.fusion import fuse
from trainmux.fusion._stacked import find_rule
from trainmux.fusion.rules.pointwise import is_pointwise
from trainmux.tracing import FakeTensorMode

aten = torch.ops.aten

SAMPLES = [
    sample(aten.gather.default, lambda v: (v.normal(3, 4), 1, v.integers(4, 3, 2))),
    sample(aten.scatter.src, lambda v: (v.normal(3, 4), -1, v.integers(1, 3, 1), v.normal(3, 1))),
    sample(aten.scatter_add.default, lambda v: (v.normal(3, 4), 1, v.integers(4, 3, 5), v.normal(3, 5))),
    sample(
        aten.scatter_reduce.two, lambda v: (v.normal(3, 4), 0, v.integers(3, 5, 4), v.normal(5, 4), "amax")
    ),
    sample(aten.index.Tensor, lambda v: (v.normal(3, 4), [None, v.integers(4, 2)])),
    sample(aten.index.Tensor, lambda v: (v.normal(3, 4), [v.integers(3, 2), v.integers(4, 2)]), "pairs"),
    sample(aten.index_put.default, lambda v: (v.normal(3, 4), [v.integers(3, 2)], v.normal(2, 4), True)),
    sample(aten.index_select.default, lambda v: (v.normal(3, 4), -1, v.integers(4, 2))),
    sample(aten.sort.default, lambda v: (v.normal(3, 4), -1)),
    sample(aten.topk.default, lambda v: (v.normal(3, 4), 2)),
    sample(aten.argmax.default, lambda v: (v.normal(3, 4), -1)),
    sample(aten.argmax.default, lambda v: (v.normal(3, 4),), "flat"),
    sample(aten.max.dim, lambda v: (v.normal(3, 4), 1)),
    sample(aten.max.default, lambda v: (v.normal(3, 4),)),
    sample(aten.any.dim, lambda v: (v.booleans(3, 4), -1)),
    sample(aten.all.default, lambda v: (v.booleans(3, 4),)),
    sample(aten.prod.dim_int, lambda v: (v.normal(3, 4), 0)),
    Sample(aten.var.correction, lambda v: ((v.normal(3, 4), [1]), {"correction": 1})),
    Sample(aten.var_mean.correction, lambda v: ((v.normal(3, 4), [0]), {"correction": 0, "keepdim": True})),
    sample(aten.linalg_vector_norm.default, lambda v: (v.normal(3, 4), 2.0, [-1])),
    sample(aten.logsumexp.default, lambda v: (v.normal(3, 4), [1])),
    sample(aten.repeat.default, lambda v: (v.normal(3, 4), [2, 1, 2])),
    sample(aten.roll.default, lambda v: (v.normal(3, 4), [1], [-1])),
    sample(aten.tril.default, lambda v: (v.normal(3, 4),)),
    sample(aten.triu.default, lambda v: (v.normal(3, 4), 1)),
    sample(aten.diagonal.default, lambda v: (v.normal(3, 4),)),
    sample(aten.unfold.default, lambda v: (v.normal(3, 6), -1, 3, 2)),
    sample(aten.nll_loss_forward.default, lambda v: (v.normal(3, 4), v.integers(4, 3), None, 1, -100)),
    sample(
        aten.nll_loss_forward.default,
        lambda v: (v.normal(3, 4), v.integers(4, 3), v.positive(4), 0, 1),
        "weighted",
    ),
    sample(
        aten.nll_loss_backward.default,
        lambda v: (v.normal(), v.normal(3, 4), v.integers(4, 3), None, 1, -100, v.positive()),
    ),
    sample(
        aten.native_group_norm.default,
        lambda v: (v.normal(2, 4, 3), v.normal(4), v.normal(4), 2, 4, 3, 2, 1e-5),
    ),
    sample(aten.mse_loss.default, lambda v: (v.normal(3, 4), v.normal(3, 4))),
    sample(aten.smooth_l1_loss.default, lambda v: (v.normal(3, 4), v.normal(3, 4))),
    sample(aten.log_sigmoid_forward.default, lambda v: (v.normal(3, 4),)),
    sample(aten.hardswish.default, lambda v: (v.normal(3, 4),)),
    sample(aten._prelu_kernel.default, lambda v: (v.normal(2, 3, 2), v.normal(1, 3, 1))),
    sample(aten._prelu_kernel_backward.default, lambda v: (v.normal(5, 4), v.normal(5, 4), v.normal(1, 4))),
    sample(aten.as_strided.default, lambda v: (v.normal(4), [2], [2], 1)),
    sample(aten.as_strided_scatter.default, lambda v: (v.normal(4), v.normal(2), [2], [2], 1)),
    sample(aten.searchsorted.Tensor, lambda v: (v.normal(5).sort().values, v.normal(3))),
    sample(aten.max_pool3d_with_indices.default, lambda v: (v.normal(1, 2, 4, 4, 4), [2, 2, 2])),
    sample(aten.reflection_pad2d.default, lambda v: (v.normal(2, 3, 4, 4), [1, 1, 1, 1])),
    sample(aten.upsample_bicubic2d.default, lambda v: (v.normal(1, 2, 3, 3), [6, 6], False)),
    sample(aten.im2col.default, lambda v: (v.normal(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])),
    sample(aten.grid_sampler_2d.default, lambda v: (v.normal(1, 2, 4, 4), v.normal(1, 3, 3, 2), 0, 0, False)),
    sample(aten.linalg_inv_ex.default, lambda v: (v.normal(3, 3) + 4 * torch.eye(3, dtype=torch.float64),)),
    sample(aten.histc.default, lambda v: (v.normal(20), 5, -2.0, 2.0)),
    sample(aten._pdist_forward.default, lambda v: (v.normal(4, 3),)),
]


@pytest.mark.parametrize("given", SAMPLES, ids=lambda given: given.name)
def test_the_long_tail_gives_what_members_compute_alone(given: Sample) -> None:
    assert find_rule(given.op) is None
    assert not is_pointwise(given.op)
    combinations = list(batched_combinations(num_tensors(given)))
    for batched in {*combinations[:2], *combinations[-2:]}:
        check_fused(make_case(given, 2, batched))


@pytest.mark.parametrize("given", SAMPLES, ids=lambda given: given.name)
def test_what_grows_with_the_width_is_on_record_as_a_loop(given: Sample) -> None:
    """torch.vmap falls back to a loop of its own where it has no rule; that must be said too."""
    sizes = []
    for width in (2, 5):
        case = make_case(given, width, [True] * num_tensors(given))
        fused = fuse(single_op(given.op, case.members[0]), width, case.batched)
        sizes.append(len(fused.module.graph.nodes))
        (record,) = fused.records
        assert record.op == str(given.op)
        assert record.count == 1
        assert record.how in ("vmap", "loop")
        assert bool(record.fallback) == (record.how == "loop")
    assert (record.how == "loop") == (sizes[0] != sizes[1])


LIBRARY = torch.library.Library("trainmux_fusion_test", "DEF")
LIBRARY.define("opaque(Tensor x, Tensor y) -> (Tensor, Tensor)")


def opaque_on_cpu(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y.sum(), x.amax()


LIBRARY.impl("opaque", opaque_on_cpu, "CPU")
torch.library.register_fake(
    "trainmux_fusion_test::opaque", lambda x, y: (torch.empty_like(x), x.new_empty(())), lib=LIBRARY
)
OPAQUE = Sample(
    torch.ops.trainmux_fusion_test.opaque.default, lambda v: ((v.normal(2, 3), v.normal(4)), {}), "custom"
)


def test_an_operator_that_nobody_knows_is_looped_over_with_a_reason_and_a_place() -> None:
    for batched in batched_combinations(2):
        fused = check_fused(make_case(OPAQUE, 3, batched))
        (record,) = fused.records
        assert record.how == "loop"
        assert record.fallback == "torch.vmap has no rule for it"
        assert "\n" not in record.fallback
        assert record.locations == (f"{single_op.__code__.co_filename}:1 in forward",)
        calls = [node for node in fused.module.graph.nodes if node.target == OPAQUE.op]
        assert len(calls) == 3


def test_a_loop_leaves_nothing_of_the_failed_attempt_in_the_graph() -> None:
    fused = check_fused(make_case(OPAQUE, 3, [True, True]))
    for node in fused.module.graph.nodes:
        assert node.users or node.op in ("output", "placeholder"), node


# ---- records and errors ----------------------------------------------------------------------------------


def not_an_operator(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def graph_of_a_python_function() -> Any:
    graph = fx.Graph()
    node = graph.placeholder("x")
    mode = FakeTensorMode()
    node.meta["val"] = mode.from_tensor(torch.ones(3))
    call = graph.call_function(not_an_operator, (node,))
    call.meta["val"] = node.meta["val"]
    call.meta["stack_trace"] = '  File "model.py", line 12, in forward\n    y = f(x)\n'
    graph.output([call])
    return described(fx.GraphModule(torch.nn.Module(), graph))


def test_what_is_not_an_operator_is_refused_with_its_place() -> None:
    with pytest.raises(FusionError) as raised:
        fuse(graph_of_a_python_function(), 2, [True])
    error = raised.value
    assert "not_an_operator" in (error.op or "")
    assert error.location == "model.py:12 in forward"
    assert "at model.py:12 in forward cannot be fused over 2 members: it is not an ATen operator" in str(
        error
    )


def test_what_is_not_an_operator_runs_at_width_one() -> None:
    fused = fuse(graph_of_a_python_function(), 1, [True])
    assert fused.records[0].fallback == "not an ATen operator"
    assert fused.module(torch.ones(1, 3))[0].tolist() == [[2.0, 2.0, 2.0]]


def test_what_is_shared_by_all_members_is_computed_once() -> None:
    graph = fx.Graph()
    mode = FakeTensorMode()
    shared, own = graph.placeholder("shared"), graph.placeholder("own")
    shared.meta["val"] = mode.from_tensor(torch.ones(3))
    own.meta["val"] = mode.from_tensor(torch.ones(3))
    first = graph.call_function(aten.sin.default, (shared,))
    first.meta["val"] = shared.meta["val"]
    second = graph.call_function(aten.mul.Tensor, (first, own))
    second.meta["val"] = shared.meta["val"]
    graph.output([first, second])
    fused = fuse(described(fx.GraphModule(torch.nn.Module(), graph)), 4, [False, True])
    assert [(record.op, record.how) for record in fused.records] == [
        ("aten.sin.default", "shared"),
        ("aten.mul.Tensor", "pointwise"),
    ]
    (sin,) = [node for node in fused.module.graph.nodes if node.target == aten.sin.default]
    assert sin.meta["val"].shape == (3,)
    x, y = torch.randn(3), torch.randn(4, 3)
    outputs = fused.module(x, y)
    assert torch.equal(outputs[0], x.sin().expand(4, 3))
    assert outputs[0].is_contiguous()
    assert torch.equal(outputs[1], x.sin() * y)
    assert [item.batched for item in fused.inputs] == [False, True]


def test_nodes_keep_their_place_in_the_members_graph() -> None:
    case = make_case(sample(aten.mm.default, lambda v: (v.normal(2, 3), v.normal(3, 4))), 2, [True, True])
    fused = check_fused(case)
    made = [node for node in fused.module.graph.nodes if node.op == "call_function"]
    assert made
    for node in made:
        assert node.meta["origin"] == "mm_default"
        assert "in forward" in node.meta["stack_trace"]


def test_a_result_of_another_shape_than_the_members_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainmux.fusion import _stacked

    wrong = _stacked.NamedRule("wrong", "wrong", lambda context, op, x, y: _stacked.Stacked(x.tensor))
    monkeypatch.setitem(_stacked._RULES, aten.mm.default, wrong)
    case = make_case(sample(aten.mm.default, lambda v: (v.normal(2, 3), v.normal(3, 4))), 2, [True, True])
    with pytest.raises(FusionError, match=r"the rule 'wrong' gave \(2, 2, 3\).*where \(2, 2, 4\)"):
        check_fused(case)


def test_a_second_rule_for_an_operator_is_refused() -> None:
    from trainmux.fusion._stacked import rule

    with pytest.raises(RuntimeError, match="expected one rule for"):
        rule(aten.mm.default, how="again")(operator.matmul)
