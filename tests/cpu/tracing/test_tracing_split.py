"""Forward and backward, cut apart, are the joint graph again; checkpoint regions are recomputed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from tracing_tools import arguments, assert_equals_torch, doubles, joint, run, square_loss, targets

from trainmux.errors import TrainmuxWarning
from trainmux.ir import OutputKind
from trainmux.tracing import SplitGraph, output_nodes, split_joint

aten = torch.ops.aten


def saved(parts: SplitGraph, *shape: int) -> list[fx.Node]:
    """Values of this shape that pass from forward to backward."""
    nodes = output_nodes(parts.forward)[parts.num_forward_outputs :]
    return [node for node in nodes if not shape or tuple(node.meta["val"].shape) == shape]


def assert_split_recomposes(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> SplitGraph:
    """Run forward and backward one after the other, and compare the results with the joint graph's."""
    traced = joint(model, loss, batch)
    *primals, tangent = arguments(traced, model, batch, seed=3, counter=2)
    expected = run(traced, model, batch, seed=3, counter=2)
    parts = split_joint(traced.module, traced.inputs, traced.outputs)
    with torch.no_grad():
        results = list(parts.forward(*primals))
        names = [node.name for node in saved(parts)]
        values = dict(zip(names, results[parts.num_forward_outputs :], strict=True))
        needed = [node.name for node in parts.backward.graph.find_nodes(op="placeholder")]
        gradients = parts.backward(*[values.get(name, tangent) for name in needed])
    got = [*results[: parts.num_forward_outputs], *gradients]
    for (key, wanted), value in zip(expected.items(), got, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=1e-14, msg=lambda m, k=key: f"{k}: {m}")
    num_gradients = sum(output.kind is OutputKind.GRADIENT for output in traced.outputs)
    assert len(output_nodes(parts.backward)) == num_gradients
    assert not any("backward" in str(target) for target in targets(parts.forward))
    assert "tangents" not in "".join(str(n.target) for n in parts.forward.graph.find_nodes(op="placeholder"))
    return parts


@pytest.mark.parametrize("name", ["cnn_with_dropout", "dlrm"])
def test_forward_and_backward_together_are_the_joint_graph(name: str) -> None:
    workload = SMALL[name]
    model = workload.build(0).double()
    model.train()
    assert_split_recomposes(model, workload.loss, workload.batch(1, torch.float64))


def test_cheap_chains_are_computed_again_instead_of_saved() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        return (hidden.sin().cos().sin().cos() * hidden.exp()).sum()

    parts = assert_split_recomposes(nn.Linear(4, 4).double(), loss, doubles(64, 4))
    assert len(saved(parts, 64, 4)) <= 2  # the input and the product, not the six values of the chain


def test_equal_values_are_computed_once_but_each_result_has_memory_of_its_own() -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value = model(x).sum()
        return value + (x.exp() * x.exp()).mean(), {"first": value * 2, "second": value * 2}

    x = doubles(8, 4)
    parts = assert_split_recomposes(nn.Linear(4, 4).double(), lambda model, x: loss(model, x)[0], x)
    assert targets(parts.forward).count(aten.exp.default) == 1
    traced = joint(nn.Linear(4, 4).double(), loss, x)
    parts = split_joint(traced.module, traced.inputs, traced.outputs)
    metrics = [i for i, output in enumerate(traced.outputs) if output.kind is OutputKind.METRIC]
    first, second = (output_nodes(parts.forward)[position] for position in metrics)
    assert first is not second


class Checkpointed(nn.Module):
    """A region that is wider inside than everything around it."""

    def __init__(self, use_reentrant: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(dropout)
        self.inside = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), self.drop, nn.Linear(32, 4), nn.Sigmoid())
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.use_reentrant is None:
            return self.last(self.inside(hidden))
        return self.last(checkpoint(self.inside, hidden, use_reentrant=self.use_reentrant))


X = doubles(16, 4)


@pytest.mark.parametrize("use_reentrant", [False, True, None])
def test_the_inside_of_a_region_is_recomputed_not_saved(use_reentrant: bool | None) -> None:
    model = Checkpointed(use_reentrant).double()
    assert_equals_torch(model, square_loss, X)
    parts = assert_split_recomposes(model, square_loss, X)
    assert bool(saved(parts, 16, 32)) == (use_reentrant is None)
    if use_reentrant is not None:  # elsewhere its input or its result may be saved: they are of one size
        assert targets(parts.backward).count(aten.tanh.default) == 1


def test_dropout_in_a_region_draws_the_same_when_recomputed() -> None:
    parts = assert_split_recomposes(Checkpointed(False, dropout=0.5).double(), square_loss, X)
    assert saved(parts, 16, 32) == []
    assert sum("random_words" in str(target) for target in targets(parts.forward)) == 1


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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_in_a_checkpoint_region_are_warned_of(use_reentrant: bool) -> None:
    """Plain torch changes them again when it recomputes the region."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return checkpoint(self.norm, hidden, use_reentrant=use_reentrant)

    x = torch.randn(8, 4)
    with pytest.warns(TrainmuxWarning, match="norm.running_mean, .* changes them twice"):
        joint(Normed(), square_loss, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joint(Normed().norm, square_loss, x[:, :3])  # no region
        joint(nn.Linear(4, 3), lambda model, x: checkpoint(square_loss, model, x, use_reentrant=False), x)
