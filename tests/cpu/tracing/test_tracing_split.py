"""Forward and backward, cut apart, are the joint graph again; checkpoint regions are recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from tracing_tools import arguments, assert_equals_torch, joint, run

from trainmux.ir import InputKind, OutputKind
from trainmux.tracing import SplitGraph, TracedGraph, output_nodes, split_joint

aten = torch.ops.aten


def split(traced: TracedGraph) -> SplitGraph:
    return split_joint(traced.module, traced.inputs, traced.outputs)


def saved_names(parts: SplitGraph) -> list[str]:
    return [node.name for node in output_nodes(parts.forward)[parts.num_forward_outputs :]]


def targets_of(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def recomposed(parts: SplitGraph, traced: TracedGraph, given: list[Tensor]) -> list[Tensor]:
    tangents = [t for t, item in zip(given, traced.inputs, strict=True) if item.kind is InputKind.TANGENT]
    primals = [t for t, item in zip(given, traced.inputs, strict=True) if item.kind is not InputKind.TANGENT]
    with torch.no_grad():
        results = list(parts.forward(*primals))
        saved = dict(zip(saved_names(parts), results[parts.num_forward_outputs :], strict=True))
        needed = [node.name for node in parts.backward.graph.find_nodes(op="placeholder")]
        gradients = parts.backward(*[saved.get(name, tangents[0]) for name in needed])
    return results[: parts.num_forward_outputs] + list(gradients)


def assert_split_recomposes(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> SplitGraph:
    traced = joint(model, loss, batch)
    given = arguments(traced, model, batch, seed=3, counter=2)
    expected = run(traced, model, batch, seed=3, counter=2)
    parts = split(traced)
    got = recomposed(parts, traced, given)
    for (key, wanted), value in zip(expected.items(), got, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=1e-14, msg=lambda m, k=key: f"{k}: {m}")
    return parts


@pytest.mark.parametrize("name", ["cnn_with_dropout", "dlrm"])
def test_forward_and_backward_together_are_the_joint_graph(name: str) -> None:
    workload = SMALL[name]
    model = workload.build(0).double()
    model.train()
    assert_split_recomposes(model, workload.loss, workload.batch(1, torch.float64))


def test_forward_holds_no_gradient_work_and_backward_no_loss() -> None:
    workload = SMALL["mlp"]
    traced = joint(workload.build(0), workload.loss, workload.batch(1, torch.float32))
    num_gradients = sum(output.kind is OutputKind.GRADIENT for output in traced.outputs)
    parts = split(traced)
    assert parts.num_forward_outputs == len(traced.outputs) - num_gradients
    assert len(output_nodes(parts.backward)) == num_gradients
    assert not any("backward" in str(target) for target in targets_of(parts.forward))
    assert "tangents" not in "".join(str(n.target) for n in parts.forward.graph.find_nodes(op="placeholder"))


def test_cheap_chains_are_computed_again_instead_of_saved() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        return (hidden.sin().cos().sin().cos() * hidden.exp()).sum()

    parts = assert_split_recomposes(nn.Linear(4, 4).double(), loss, torch.randn(64, 4).double())
    batch_sized = [
        node for node in output_nodes(parts.forward)[1:] if tuple(node.meta["val"].shape) == (64, 4)
    ]
    assert len(batch_sized) <= 2  # the input and the product, not the six values of the chain


# ---- checkpoint regions ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.inside = nn.Sequential(
            nn.Linear(4, 32),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(32, 32),
            nn.Sigmoid(),
            nn.Linear(32, 4),
        )
        self.last = nn.Linear(4, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = checkpoint(self.inside, hidden, use_reentrant=self.use_reentrant)
        return self.last(hidden)


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def inside_shapes(nodes: list[fx.Node]) -> list[fx.Node]:
    """Values as wide as only the inside of the region is."""
    return [node for node in nodes if tuple(node.meta["val"].shape) == (16, 32)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_model_gives_torchs_numbers(use_reentrant: bool) -> None:
    assert_equals_torch(Checkpointed(use_reentrant).double(), square_loss, X)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_inside_of_a_region_is_recomputed_not_saved(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant).double()
    parts = assert_split_recomposes(model, square_loss, X)
    assert inside_shapes(output_nodes(parts.forward)[1:]) == []
    backward = targets_of(parts.backward)
    assert backward.count(aten.tanh.default) == 1
    assert backward.count(aten.sigmoid.default) == 1


def test_without_a_region_the_inside_is_saved() -> None:
    model = Checkpointed().double()

    def plainly(m: nn.Module, x: Tensor) -> Tensor:
        return m.last(m.inside(m.first(x))).square().mean()

    parts = assert_split_recomposes(model, plainly, X)
    assert inside_shapes(output_nodes(parts.forward)[1:]) != []


def test_dropout_in_a_region_draws_the_same_when_recomputed() -> None:
    model = Checkpointed(dropout=0.5).double()
    parts = assert_split_recomposes(model, square_loss, X)
    assert inside_shapes(output_nodes(parts.forward)[1:]) == []
    words = [target for target in targets_of(parts.forward) if "random_words" in str(target)]
    assert len(words) == 1


def test_every_region_has_a_number_of_its_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.first, x, use_reentrant=False).tanh()
            return checkpoint(self.second, x, use_reentrant=False)

    traced = assert_equals_torch(Twice().double(), square_loss, X)
    marks = [node.meta["ac_graph_id"] for node in traced.module.graph.nodes if "ac_graph_id" in node.meta]
    assert sorted(set(marks)) == [1, 2]
    assert marks == sorted(marks)
