"""Each private torch API that tracing builds on, held to what we rely on.

If a new torch release breaks one of these, this file says which, before anything else fails.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from trainmux.tracing import _torch_private as private
from trainmux.tracing._joint import _DECOMPOSE
from trainmux.tracing._torch_private import FakeTensor, FakeTensorMode, make_fx

aten = torch.ops.aten
PACKAGE = Path(private.__file__).parent.parent


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def traced(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> fx.GraphModule:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in inputs]
        return make_fx(fn, **options)(*fakes)


# ---- imports ---------------------------------------------------------------------------------------------


def test_nothing_else_imports_these_names() -> None:
    unique = ("torch._subclasses", "torch._functorch", "torch.fx.experimental", "torch._dispatch")
    for file in PACKAGE.rglob("*.py"):
        if file.name != "_torch_private.py":
            text = file.read_text(encoding="utf-8")
            assert not any(name in text for name in unique), file.name
            if file.name != "_inductor.py" and "bench" not in file.parts:
                assert "import torch._inductor" not in text, file.name
                assert "from torch._inductor" not in text, file.name


# ---- fake tensors and the errors they raise --------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense.default"),
        (lambda x: x.nonzero(), "aten.nonzero.default"),
        (lambda x: x.unique(), "aten._unique2.default"),
    ],
)
def test_data_dependent_code_raises_an_error_that_knows_its_operator(
    call: Callable[[Tensor], Any], op: str
) -> None:
    with FakeTensorMode() as mode, pytest.raises(private.DATA_DEPENDENT_ERRORS) as raised:
        call(mode.from_tensor(torch.ones(3)))
    assert str(raised.value.func) == op  # type: ignore[union-attr]


def test_an_operator_without_a_fake_form_raises_an_error_that_knows_it() -> None:
    library = torch.library.Library("trainmux_private_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    with FakeTensorMode() as mode, pytest.raises(private.DATA_DEPENDENT_ERRORS) as raised:
        torch.ops.trainmux_private_test.opaque(mode.from_tensor(torch.ones(3)))
    assert str(raised.value.func) == "trainmux_private_test.opaque.default"  # type: ignore[union-attr]
    library._destroy()


def test_fake_tensors_know_their_mode_and_hold_no_memory() -> None:
    with FakeTensorMode() as mode:
        huge = torch.empty(10**6, 10**6)
        product = huge @ huge
    assert isinstance(product, FakeTensor)
    assert product.fake_mode is mode
    assert product.device == torch.device("cpu")
    assert product.untyped_storage().device == torch.device("meta")


def test_real_constants_may_meet_fake_tensors_and_stay_real() -> None:
    constant = torch.arange(3.0)
    module = traced(lambda x: x * constant, torch.ones(3))
    (attribute,) = module.graph.find_nodes(op="get_attr")
    held = getattr(module, attribute.target)
    assert not isinstance(held, FakeTensor)
    assert torch.equal(held, constant)
    assert torch.equal(module(torch.full((3,), 2.0)), 2 * constant)


# ---- make_fx ---------------------------------------------------------------------------------------------


def test_a_trace_leaves_modules_alone_and_says_so_to_nobody() -> None:
    """Torch's tracer of modules, which patches their class, may be at work in another thread."""
    call = nn.Module.__call__
    seen: list[bool] = []
    in_another_thread: list[list[str]] = []

    def trace_modules() -> None:
        symbolic = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        in_another_thread.append([node.op for node in symbolic.graph.nodes])

    def run(x: Tensor) -> Tensor:
        seen.append(nn.Module.__call__ is call and not fx._symbolic_trace._is_fx_tracing_flag)
        thread = threading.Thread(target=trace_modules)
        thread.start()
        thread.join()
        return nn.ReLU()(x)

    with FakeTensorMode():
        module = make_fx(run)(torch.empty(2))
    assert seen == [True]
    assert in_another_thread == [["placeholder", "call_module", "call_module", "output"]]
    assert targets(module) == [aten.relu.default]
    assert nn.Module.__call__ is call


@pytest.mark.parametrize("packet", _DECOMPOSE, ids=str)
def test_the_decompositions_we_ask_for_exist(packet: Any) -> None:
    table = torch._decomp.get_decompositions((packet,))
    assert {op.overloadpacket for op in table} == {packet}


# ---- functionalization -----------------------------------------------------------------------------------


def mutates(x: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    held.mul_(2)
    y = x + held
    y[0] = 5.0
    y.relu_()
    view = y.view(-1)
    view.add_(1)
    return y, held


def test_every_mutation_becomes_a_new_value() -> None:
    module = traced(private.functionalized(mutates), torch.zeros(3), torch.zeros(3))
    for target in targets(module):
        assert not target._schema.is_mutable, target
    x, held = torch.tensor([-1.0, -9.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])
    before = held.clone()
    y, changed = module(x, held)
    assert torch.equal(held, before)
    expected_y, expected_held = mutates(x.clone(), before)
    assert torch.equal(y, expected_y)
    assert torch.equal(changed, expected_held)


# ---- flags -----------------------------------------------------------------------------------------------


def test_model_code_sees_that_it_is_traced_and_only_then() -> None:
    assert not torch.compiler.is_compiling()
    with private.tracing_thread():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()
    with pytest.raises(ValueError, match="inside"), private.tracing_thread():
        raise ValueError("inside")
    assert not torch.compiler.is_compiling()


# ---- composite operators ---------------------------------------------------------------------------------

ATTENTION = aten.scaled_dot_product_attention.default


def attend(x: Tensor) -> Tensor:
    with private.tracing_thread():
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_composite_operator_is_replaced_for_a_while_also_under_autograd() -> None:
    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(attend(x).sum(), x)[0]

    def fails(*args: Any, **kwargs: Any) -> Tensor:
        raise ValueError("inside")

    def usual_attention(*args: Any, **kwargs: Any) -> Tensor:
        return private.native_composite(ATTENTION, *args, **kwargs)

    x = torch.ones(1, 1, 2, 4)
    usual = targets(traced(attend, x))
    with private.override_composites({ATTENTION: lambda query, *args, **kwargs: query * 42}):
        assert torch.equal(traced(step, x)(x), torch.full_like(x, 42.0))
        with private.override_composites({ATTENTION: usual_attention}):
            assert targets(traced(attend, x)) == usual
        assert targets(traced(attend, x)) == [aten.mul.Tensor]
    with pytest.raises(ValueError, match="inside"), private.override_composites({ATTENTION: fails}):
        traced(attend, x)
    assert targets(traced(attend, x)) == usual


# ---- the tracer's graph ----------------------------------------------------------------------------------


def test_the_tracer_graph_is_the_one_being_written() -> None:
    seen: list[tuple[fx.Graph, list[Any]]] = []

    def fn(x: Tensor) -> Tensor:
        graph = private.tracer_graph()
        last = private.last_node(graph)
        y = torch.cos(torch.sin(x))
        seen.append((graph, [node.target for node in private.nodes_after(graph, last)]))
        return y.neg()

    module = traced(fn, torch.ones(2))
    (graph, added) = seen[0]
    assert added == [aten.sin.default, aten.cos.default]
    assert [node.name for node in graph.nodes] == [node.name for node in module.graph.nodes]


# ---- vmap ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "is_known"),
    [
        (aten.histc.default, False),
        (aten.sin.default, True),
        (aten.linear.default, True),
        (aten.binary_cross_entropy_with_logits.default, True),
        (aten.native_dropout_backward.default, True),
    ],
)
def test_operators_that_vmap_would_loop_over_are_known(op: Any, is_known: bool) -> None:
    assert private.has_vmap_rule(op) is is_known


def test_rules_that_vmap_registers_at_its_first_call_are_known_before_it() -> None:
    """The first fleet of a process looped over the members' cross entropies: 1.22 times the step."""
    code = (
        "import torch; from trainmux.tracing import has_vmap_rule; "
        "assert has_vmap_rule(torch.ops.aten.nll_loss_forward.default)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- checkpoint regions ----------------------------------------------------------------------------------


def region_targets(fn: Callable[[Tensor], Any], x: Tensor) -> tuple[list[list[Any]], fx.GraphModule]:
    regions: list[list[Any]] = []

    def keep(nodes: list[fx.Node]) -> None:
        regions.append([node.target for node in nodes])

    with private.tracing_thread(), private.checkpoint_regions(keep):
        module = traced(fn, x)
    return regions, module


def test_regions_nest_and_take_keyword_arguments_and_options() -> None:
    def inside(v: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        return v * factor, v + factor

    def outer(v: Tensor) -> list[Tensor]:
        options = {"preserve_rng_state": False, "determinism_check": "none"}
        return list(checkpoint(inside, v.exp(), factor=3.0, use_reentrant=False, **options))

    regions, module = region_targets(lambda x: checkpoint(outer, x, use_reentrant=False), torch.zeros(2))
    assert regions == [
        [aten.mul.Tensor, aten.add.Tensor],
        [aten.exp.default, aten.mul.Tensor, aten.add.Tensor],
    ]
    assert [out.tolist() for out in module(torch.zeros(2))] == [[3.0, 3.0], [4.0, 4.0]]


def test_real_checkpoints_are_back_afterwards() -> None:
    module = torch.utils.checkpoint
    before = (module._checkpoint_without_reentrant_generator, module.CheckpointFunction)
    with pytest.raises(ValueError, match="inside"), private.checkpoint_regions(lambda nodes: None):
        raise ValueError("inside")
    assert (module._checkpoint_without_reentrant_generator, module.CheckpointFunction) == before
    calls = []

    def inside(v: Tensor) -> Tensor:
        calls.append(1)
        return v.sin()

    for use_reentrant in (False, True):
        calls.clear()
        checkpoint(inside, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == 2


# ---- errors and names ------------------------------------------------------------------------------------


def test_an_operator_with_a_generator_is_told_from_other_errors() -> None:
    def stopped(func: Any, message: str) -> None:
        raise NotImplementedError(message)

    with pytest.raises(NotImplementedError) as caught:
        stopped(aten.rand.generator, f"argument of type: {torch.Generator}")
    assert private.refuses_generators(caught.value)
    assert private.traced_operator(caught.value) is aten.rand.generator
    assert not private.refuses_generators(NotImplementedError("no such operator"))
    assert private.traced_operator(NotImplementedError("outside of any tracer")) is None


class CountingSet(set[str]):
    """Counts how often it is asked."""

    num_asked = 0

    def __contains__(self, item: object) -> bool:
        self.num_asked += 1
        return super().__contains__(item)


def test_copied_nodes_find_names_without_a_search() -> None:
    """Of as many equal nodes as a large model has: torch 2.11 by itself asks for 80,000 names here."""

    def row(x: Tensor) -> Tensor:
        for _ in range(100):
            x = x + 1
        return x

    part = private.make_fx(row)(torch.zeros(2))
    graph = fx.Graph()
    names = CountingSet(graph._graph_namespace._used_names)
    graph._graph_namespace._used_names = names
    value = graph.placeholder("x")
    for _ in range(4):
        copied = {next(iter(part.graph.nodes)): value}
        for node in part.graph.nodes:
            if node.op == "call_function":
                copied[node] = value = private.copy_node(graph, node, copied.__getitem__)
    graph.output(value)
    assert len({node.name for node in graph.nodes}) == 402
    assert names.num_asked < 6 * 402
    module = fx.GraphModule({}, graph)
    assert torch.equal(module(torch.zeros(2)), torch.full((2,), 400.0))
