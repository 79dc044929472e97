"""Private torch APIs that tracing builds on, each held to what we rely on where no trace would show it.

If a new torch release breaks one of these, this file says which, before anything else fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from trainmux.tracing import FakeTensorMode, copy_node, make_fx
from trainmux.tracing import _torch_private as private
from trainmux.tracing._joint import _DECOMPOSE

aten = torch.ops.aten
PACKAGE = Path(private.__file__).parent.parent


def test_nothing_else_imports_these_names() -> None:
    unique = ("torch._subclasses", "torch._functorch", "torch.fx.experimental", "torch._dispatch")
    for file in PACKAGE.rglob("*.py"):
        names = () if file.name == "_torch_private.py" else unique
        if file.name not in ("_torch_private.py", "_inductor.py"):
            names = (*names, "import torch._inductor", "from torch._inductor")
        text = file.read_text(encoding="utf-8")
        assert not any(name in text for name in names), file.name


@pytest.mark.parametrize("packet", _DECOMPOSE, ids=str)
def test_the_decompositions_we_ask_for_exist(packet: Any) -> None:
    assert {op.overloadpacket for op in torch._decomp.get_decompositions((packet,))} == {packet}


def test_a_process_knows_what_vmap_loops_over_and_splits_a_graph_without_torchs_compilers() -> None:
    """``vmap`` registers rules in its first call: a process's first fleet looped over cross entropies, 1.22
    times the step. Importing the compilers takes a second, in which a fleet's first step would wait."""
    code = """
import sys, torch, trainmux as tm
from trainmux.tracing import has_vmap_rule

aten = torch.ops.aten
losses = [aten.nll_loss_forward, aten.binary_cross_entropy_with_logits]
assert all(has_vmap_rule(op.default) for op in [*losses, aten.linear, aten.native_dropout_backward])
assert not has_vmap_rule(aten.histc.default)

model = torch.nn.Linear(4, 1)
member = tm.Member(model, torch.optim.AdamW(model.parameters()))
fleet = tm.Fleet([member], lambda model, x: model(x).mean(), torch.ones(2, 4), device="cpu")
fleet.step(torch.ones(2, 4))
assert {"torch._inductor.pattern_matcher", "torch._inductor.lowering"}.isdisjoint(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_checkpoint_regions_nest_and_take_keyword_arguments_and_options() -> None:
    regions: list[list[Any]] = []

    def inside(v: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        return v * factor, v + factor

    def outer(v: Tensor) -> list[Tensor]:
        options = {"preserve_rng_state": False, "determinism_check": "none"}
        return list(checkpoint(inside, v.exp(), factor=3.0, use_reentrant=False, **options))

    def keep(nodes: list[fx.Node]) -> None:
        regions.append([node.target for node in nodes])

    with private.tracing_thread(), private.checkpoint_regions(keep), FakeTensorMode():
        module = make_fx(lambda x: checkpoint(outer, x, use_reentrant=False))(torch.zeros(2))
    products = [aten.mul.Tensor, aten.add.Tensor]
    assert regions == [products, [aten.exp.default, *products]]
    assert [out.tolist() for out in module(torch.zeros(2))] == [[3.0, 3.0], [4.0, 4.0]]


def test_an_operator_with_a_generator_is_told_from_other_errors() -> None:
    """As torch 2.11 refuses one; later releases trace it."""

    def stopped(func: Any, message: str) -> None:
        raise NotImplementedError(message)

    with pytest.raises(NotImplementedError) as caught:
        stopped(aten.rand.generator, f"argument of type: {torch.Generator}")
    assert private.refuses_generators(caught.value)
    assert private.traced_operator(caught.value) is aten.rand.generator
    assert not private.refuses_generators(NotImplementedError("no such operator"))


class CountingSet(set[str]):
    """Counts how often it is asked."""

    num_asked = 0

    def __contains__(self, item: object) -> bool:
        self.num_asked += 1
        return super().__contains__(item)


def test_copied_nodes_find_names_without_a_search() -> None:
    """Of as many equal nodes as a large model has: torch 2.11 by itself asks for 80,000 names here."""
    part = fx.symbolic_trace(lambda x: sum([x] * 100))
    graph = fx.Graph()
    names = CountingSet(graph._graph_namespace._used_names)
    graph._graph_namespace._used_names = names
    value = graph.placeholder("x")
    for _ in range(4):
        copied = {next(iter(part.graph.nodes)): value}
        for node in part.graph.nodes:
            if node.op == "call_function":
                copied[node] = value = copy_node(graph, node, copied.__getitem__)
    graph.output(value)
    assert len({node.name for node in graph.nodes}) == 402
    assert names.num_asked < 6 * 402
    assert torch.equal(fx.GraphModule({}, graph)(torch.ones(2)), torch.full((2,), 1e8))
